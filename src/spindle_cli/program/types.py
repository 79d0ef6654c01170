"""A rank's program: what one device does in one iteration, in order, as data.

Derived from the plan alone (no torch, no workload), so that it can be printed, proved deadlock-free,
simulated, and run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from spindle_cli.account.rows import Layout
from spindle_cli.account.types import Edge, ParameterGroup
from spindle_cli.plan.types import Plan, Slice


class Kind(StrEnum):
    """What an action does. Sends and receives are posted without waiting; compute waits for the receives it
    needs.
    """

    RECV = "RECV"  # post the receive of an activation chunk
    FORWARD = "F"  # wait for the chunks of every input, run the slice forward
    SEND = "SEND"  # post the send of an activation chunk
    RECV_GRAD = "RECV_GRAD"  # post the receive of a gradient chunk
    BACKWARD = "B"  # wait for the gradient chunks of every output, run the slice backward
    SEND_GRAD = "SEND_GRAD"  # post the send of a gradient chunk
    SUM = "SUM"  # start the gradient sum of a parameter group
    STEP = "STEP"  # wait for all sums, step the optimizer


@dataclass(frozen=True, slots=True)
class Transfer:
    """A chunk that one slice hands to another: an activation, or (`is_gradient`) its gradient going back.

    `key` orders all transfers of an iteration; both ends of a pair of devices post theirs in the order of
    `key`. `producer` and `consumer` are indices into `Plan.slices`, of the forward direction. Samples [first,
    last). For a value without a batch dimension the whole value is sent.
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


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank's program.

    Attributes:
        piece: index into `Plan.slices` (F, B).
        transfer: that is posted (sends, receives).
        group: that is summed (SUM).
        op: of the slice that runs backward just before, the op whose backward completes what this device
            adds to the sum (SUM). The sum may start there, before the slice is through; the order of a
            device's sums stays.
    """

    kind: Kind
    piece: int | None = None
    transfer: Transfer | None = None
    group: int | None = None
    op: int | None = None


@dataclass(frozen=True)
class Program:
    """Every device's actions for one iteration of a plan.

    Attributes:
        slices: `plan.slices`; everything else names slices by their index in it.
        layouts: who holds which samples, of each slice.
        order: indices of the slices in the order in which they run forward; backward is the reverse.
        edges: which slice takes whose output.
        groups: in the order of their sums.
        actions: by device, for every device of the cluster.
    """

    plan: Plan
    slices: tuple[Slice, ...]
    layouts: tuple[Layout, ...]
    order: tuple[int, ...]
    edges: tuple[Edge, ...]
    groups: tuple[ParameterGroup, ...]
    actions: dict[int, tuple[Action, ...]]
