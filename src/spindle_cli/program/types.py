"""A rank's program: what one device does in one iteration, in order, as data.

Derived from the plan alone (no torch, no workload), so that it can be printed, proved deadlock-free,
simulated, and run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from spindle_cli.account.activations import WHOLE, Layout
from spindle_cli.account.step_end import UpdatePart, collectives_of_step, parts_by_device
from spindle_cli.account.types import Edge, ParameterGroup, Pass, Purpose, Together
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.program.reached import reached_slices


class Kind(StrEnum):
    """What an action does. Messages and collectives are posted without waiting; compute waits for the
    receives it needs, UPDATE for the losses and its own sums, and STEP for everything.
    """

    RECV = "RECV"  # post the receive of an activation chunk
    FORWARD = "F"  # wait for the chunks of every input, run the slice forward
    SEND = "SEND"  # post the send of an activation chunk
    RECV_GRAD = "RECV_GRAD"  # post the receive of a gradient chunk
    BACKWARD = "B"  # wait for the gradient chunks of every output, run the slice backward
    SEND_GRAD = "SEND_GRAD"  # post the send of a gradient chunk
    LOSSES = "LOSSES"  # start the sum of the tasks' losses over all devices
    SUM = "SUM"  # start the gradient sum of a parameter group
    FLAGS = "FLAGS"  # start telling which parameters of shared optimizer state any device has reached
    NORM = "NORM"  # wait for all sums, sum the gradients' norm over all devices; has one overflowed?
    UPDATE = "UPDATE"  # wait for the sums up to a group's, step what is complete with them
    STEP = "STEP"  # wait for everything posted, step the optimizer
    GATHER = "GATHER"  # start handing on the parameters of a group, of which each device has stepped a range


TRANSFERS = (Kind.RECV, Kind.SEND, Kind.RECV_GRAD, Kind.SEND_GRAD)
RECEIVES = (Kind.RECV, Kind.RECV_GRAD)
SENDS = (Kind.SEND, Kind.SEND_GRAD)
COMPUTES = (Kind.FORWARD, Kind.BACKWARD)
# What a step takes once, however many batches it adds up.
ONCE_A_STEP = (Kind.LOSSES, Kind.SUM, Kind.FLAGS, Kind.NORM, Kind.UPDATE, Kind.STEP, Kind.GATHER)


@dataclass(frozen=True)
class Communicator:
    """Devices that exchange messages, or take part in collectives, one after another in the order in which
    they post them.

    `index`: position in `Program.communicators`, in which order they are made. `ranks`: ascending. `senders`:
    of messages, whose go over it, ascending.
    """

    index: int
    ranks: tuple[int, ...]
    purpose: Purpose
    senders: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepSettings:
    """What of the train settings changes a step's communication.

    Attributes:
        sharded: devices that hold the same parameters share their optimizer state: sums come with flags, and
            new values are gathered.
        clips: gradients are clipped by their norm.
        scales: losses are scaled, and all devices learn together whether a gradient has overflowed.
        by_parts: the optimizers may step some parameters before the gradients of others are summed.
    """

    sharded: bool = False
    clips: bool = False
    scales: bool = False
    by_parts: bool = False

    @property
    def checks_gradients(self) -> bool:
        """Whether devices find something out together about a step's gradients (NORM) before the update."""
        return self.clips or self.scales

    @property
    def updates_early(self) -> bool:
        """Whether devices update parts of their parameters while the sums of others are under way (UPDATE).

        Not where all gradients are checked first; nor where devices share optimizer state, as there the flags
        behind all sums tell which parameters have gradients.
        """
        return self.by_parts and not self.checks_gradients and not self.sharded


@dataclass(frozen=True, slots=True)
class Transfer:
    """A chunk that one slice hands to another: an activation, or (`is_gradient`) its gradient going back.

    `key` orders all transfers of an iteration, in which order every device posts its own. `producer` and
    `consumer` are indices into `Plan.slices`, of the forward direction. Samples [first, last). For a value
    without a batch dimension the whole value is sent, or (of a gradient) zeros to all copies but one.
    `part`: (i, n), of the chunk's numbers the i-th of n equal parts: the n devices that hold the share, of
    which the destination is the i-th in ascending order, gather them when the pass that takes them begins.
    """

    key: int
    producer: int
    consumer: int
    source: int  # device
    destination: int  # device
    first: int
    last: int
    is_gradient: bool
    num_bytes: int  # predicted, from the plan's output_bytes
    part: tuple[int, int] = WHOLE


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank's program.

    Attributes:
        slice_index: index into `Plan.slices` (F, B).
        transfer: that is posted (sends, receives).
        group: that is summed (SUM) or whose parameters are handed on (GATHER); of an UPDATE, the last one
            whose parameters are updated, with all that come before it in the order of sums and are not yet,
            the first time with what the device sums with nobody; None: that alone.
        op: of the slice that runs backward just before, the op whose backward completes what this device
            adds to the sum (SUM). The sum may start there, before the slice is through; the order of a
            device's sums stays.
        communicator: index into `Program.communicators` of what is posted; of an F or B, of the sums that
            tensor parallelism, or batch norms over shares, take inside of it. None where nothing is
            communicated.
        shards: of an F or B, ascending, the communicators over which it gathers sharded parameters, or sums
            gradients that are sharded, while it runs.
        left: of an F or B, ascending, the keys of what the device has sent and gives up before it, when all
            of it has left: what is sent over an edge, either way, is not needed once the producer has run
            backward.
    """

    kind: Kind
    slice_index: int | None = None
    transfer: Transfer | None = None
    group: int | None = None
    op: int | None = None
    communicator: int | None = None
    shards: tuple[int, ...] = ()
    left: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """Every device's actions for one iteration of a plan.

    Attributes:
        slices: `plan.slices`; everything else names slices by their index in it.
        layouts: who holds which samples, of each slice.
        order: of all passes; each device runs its own in it.
        edges: which slice takes whose output.
        groups: in the order of their sums.
        communicators: in the order in which all devices make them.
        settings: what the step takes beside its batch.
        actions: by device, for every device of the cluster.
    """

    plan: Plan
    slices: tuple[Slice, ...]
    layouts: tuple[Layout, ...]
    order: tuple[Pass, ...]
    edges: tuple[Edge, ...]
    groups: tuple[ParameterGroup, ...]
    communicators: tuple[Communicator, ...]
    settings: StepSettings
    actions: dict[int, tuple[Action, ...]]

    @cached_property
    def reached(self) -> tuple[bool, ...]:
        """Says for each slice whether gradients come to it."""
        return reached_slices(len(self.slices), self.groups, self.edges)

    @cached_property
    def updates(self) -> dict[int, tuple[UpdatePart, ...]]:
        """By device, what each of its UPDATEs steps, and last what is left to its STEP."""
        ends = {
            device: [action.group for action in actions if action.kind is Kind.UPDATE]
            for device, actions in self.actions.items()
        }
        return parts_by_device(self.groups, ends)

    @cached_property
    def collectives(self) -> tuple[Together, ...]:
        """What devices do together once in a step, with its bytes."""
        settings = self.settings
        return collectives_of_step(
            self.plan, self.groups, sharded=settings.sharded, clips=settings.clips, scales=settings.scales
        )
