"""What a plan moves, sums and holds, as data: edges between slices, messages, parameter groups, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.parameters import Summing
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf, ShardWeights
from spindle_cli.profile.types import MetaOp


class StepNumbers(Protocol):
    """What of the train settings changes what a step moves; `Profile` and `Plan` have it."""

    @property
    def accumulate(self) -> int: ...
    @property
    def gradient_bytes_per_param(self) -> float: ...
    @property
    def optimizer_state_sharded(self) -> bool: ...
    @property
    def clips_gradients(self) -> bool: ...
    @property
    def scales_losses(self) -> bool: ...
    @property
    def updates_by_parts(self) -> bool: ...
    @property
    def sharding(self) -> ShardingOf: ...
    @property
    def shard_weights(self) -> ShardWeights: ...


@dataclass(frozen=True, eq=False)
class Joint:
    """Several plans that train the same parameters in turn (joint.py).

    Attributes:
        slices: of all plans, each once.
        plans: the slices of each, with its own times.
        members: of each plan, where its slices are in `slices`, in its own order.
        tasks: of each plan.
        by_name: the MetaOps of all plans.
    """

    slices: tuple[SliceShape, ...]
    plans: tuple[tuple[SliceShape, ...], ...]
    members: tuple[tuple[int, ...], ...]
    tasks: tuple[frozenset[str], ...]
    by_name: Mapping[str, MetaOp]


class PlacedPlan(StepNumbers, Protocol):
    """What is needed of a plan; `plan.types.Plan` has it, and the planner's candidates once they are placed.

    `slices` are in the order in which they start; everything else names them by their index in it. `joint`:
    the plans that it runs in turn with, of which it is that at `member`; None: there are none.
    `sums_by_node`: whether what devices of several nodes sum and gather may go inside of these and between
    them by itself, which takes more communicators.
    """

    @property
    def slices(self) -> Sequence[SliceShape]: ...
    @property
    def by_name(self) -> Mapping[str, MetaOp]: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def joint(self) -> Joint | None: ...
    @property
    def member(self) -> int: ...
    @property
    def sums_by_node(self) -> bool: ...


class Purpose(StrEnum):
    """What a communicator is for."""

    EVERYONE = "everyone"  # losses, norm, and the sums of groups that are on all devices
    MESSAGES = "messages"  # activations and gradients, of half of the devices that send any
    SUMS = "sums"  # of gradients, with their flags and gathers
    SHARDS = "shards"  # of parameters and gradients: gathers and sums inside of passes
    TENSOR = "tensor parallelism"
    STATISTICS = "batch statistics"  # what the shares of an op sum or gather: batch norms, contrastive losses


class CommunicatorRanks(NamedTuple):
    """The devices of a communicator, ascending, and what it is for. `senders`: where it is for messages, the
    devices that send over it.
    """

    ranks: tuple[int, ...]
    purpose: Purpose
    senders: tuple[int, ...] = ()


class Pass(NamedTuple):
    """A slice's forward or backward pass; `slice_index`: index into the plan's slices."""

    slice_index: int
    is_backward: bool


@dataclass(frozen=True)
class Edge:
    """Slice `consumer` takes the output of slice `producer` (indices into the plan's slices)."""

    producer: int
    consumer: int
    inner: bool  # both of one MetaOp


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters held by the same set of devices, whose gradients become complete together and are summed in
    one go; or parameters that are not trained, which these devices share out and gather together.

    Several groups may have the same devices (they share one communicator): what is complete earlier is summed
    while backward still runs. `index` is also the order in which every device starts its sums. A group of one
    device needs no sum.

    Attributes:
        index: position among the plan's groups.
        devices: ascending.
        blocks: (parameters key, block) pairs.
        num_bytes: of the gradients that each device brings to the sum; 0 where nothing is trained.
        parameter_bytes: of the parameters themselves, which a gather hands on.
        slices: indices of the slices whose backward adds to these gradients, ascending.
        first_ops: of each of `slices`, the first op that uses these parameters: with its backward the
            slice has added all that it does.
        fragment: (i, n): the i-th of n equal parts of every tensor that tensor parallelism splits; (0, 1) is
            all of it. Slices with different tp that share parameters meet in the finest common fragments.
            Parameters that it does not split are held, and summed, by all devices of their slices.
        last_ops: of each of `slices`, the last op that uses these parameters.
        sharding: what the devices share out of them. Where that is more than optimizer state, each of
            `slices` runs on all of `devices`, or of one of the `replica_groups`: the gradients are summed
            inside of each backward pass.
        replica_groups: of the devices, those that share the parameters out among themselves, each ascending,
            by their first ones; none: all of them do. What a replica group has summed is summed over the
            replica groups behind its last backward pass, each device stepping a part of its range, and
            handing it on to the other replica groups.
        is_trained: whether there are any gradients.
        summing: how its gradients are summed. One that is gathered is of one parameter, which all step whole.
        share_tokens: of the largest share of what is gathered; 0 where nothing is.
        gathered_bytes: that each device has in the end of the gather.
        product_s: seconds by which the gradient takes longer to make of all factors than of a share's own.
        weights: of each of `devices`, what its range of what they share out is in proportion to; none: the
            ranges are equal.
        pads_sum, pads_gather: whether unequal ranges are padded to the largest to be summed, and to be
            gathered; else each goes by itself.
        sums_whole, gathers_whole: whether, though each device needs or has a range alone, all of it is summed
            over all, for a gather with zeros in place of the others' ranges.
        nodes: of its devices, by their nodes, equally many each, where what is not summed whole is summed
            inside of every node first, and then between the devices of the same place in all of them, and
            gathered the other way round; none: over all of them at once.
    """

    index: int
    devices: tuple[int, ...]
    blocks: tuple[tuple[str, int], ...]
    num_bytes: int
    parameter_bytes: int
    slices: tuple[int, ...]
    first_ops: tuple[int, ...]
    fragment: tuple[int, int]
    last_ops: tuple[int, ...] = ()
    sharding: Sharding = Sharding.OPTIMIZER
    replica_groups: tuple[tuple[int, ...], ...] = ()
    is_trained: bool = True
    summing: Summing = Summing.DENSE
    share_tokens: int = 0
    gathered_bytes: int = 0
    product_s: float = 0.0
    weights: tuple[int, ...] = ()
    pads_sum: bool = False
    pads_gather: bool = False
    sums_whole: bool = False
    gathers_whole: bool = False
    nodes: tuple[tuple[int, ...], ...] = ()

    @property
    def across(self) -> tuple[tuple[int, ...], ...]:
        """The devices of the same place in all of `nodes`."""
        return tuple(zip(*self.nodes, strict=True))

    @property
    def is_gathered(self) -> bool:
        """Whether its gradient is made of what its devices gather."""
        return self.summing is not Summing.DENSE

    @property
    def is_summed_at_once(self) -> bool:
        """Whether its gradients are summed once in a step, behind the passes that add to them."""
        is_summed_in_passes = self.sharding.is_by_pass and not self.replica_groups
        return len(self.devices) > 1 and self.is_trained and not is_summed_in_passes

    @property
    def is_handed_on(self) -> bool:
        """Whether devices have parts of it updated that others have to get, where they share state out."""
        if len(self.devices) == 1 or self.sharding is Sharding.NONE:
            return False
        return not self.sharding.is_fetched or (bool(self.replica_groups) and self.is_trained)

    def awaited_ops(self, slices: Sequence[SliceShape]) -> Iterator[tuple[int, int]]:
        """Say for each of its slices which op is the first that waits for what is handed on: the first that
        uses it; where a replica group gathers it for its passes the one before, with which that gather
        starts.
        """
        for index, op in zip(self.slices, self.first_ops, strict=True):
            yield index, max(slices[index].ops[0], op - 1) if self.replica_groups else op

    def in_replica_group(self, device: int) -> ParameterGroup:
        """What the devices share out that hold it together with one of them, as a group of their own."""
        if not self.replica_groups:
            return self
        replica_group = next(
            replica_group for replica_group in self.replica_groups if device in replica_group
        )
        weight_of = dict(zip(self.devices, self.weights, strict=False))
        weights = tuple(weight_of[member] for member in replica_group) if weight_of else ()
        return replace(self, devices=replica_group, replica_groups=(), weights=weights)

    @property
    def moved_bytes(self) -> int:
        """Bytes that each device brings to its sum, or has in the end of the gather in its place."""
        return self.gathered_bytes if self.is_gathered else self.num_bytes


class Collective(StrEnum):
    """What several devices do together once in a step."""

    LOSSES = "losses"  # sum the tasks' losses over all devices
    SUM = "sum"  # sum the gradients of a parameter group, each for its own part where they share the state
    FLAGS = "flags"  # tell which parameters of shared optimizer state any device has reached
    NORM = "norm"  # sum the gradients' norm over all devices, and whether any has overflowed
    GATHER = "gather"  # hand on the parameters of a group, of which each device has updated a part


@dataclass(frozen=True)
class Together:
    """A collective of a step.

    Attributes:
        devices: that take part, ascending.
        num_bytes: that each brings to a sum, or has in the end of a gather.
        rounds: times that the bytes go around: 2 where each device gets all of a sum, 1 for a part of it, and
            for a gather, also of what gradients are made of.
        group: index of the parameter group (SUM, GATHER).
        weights: of the devices, what their parts of the bytes are in proportion to; none: they are equal.
        by_node: whether it goes inside of nodes and between them by itself (`ParameterGroup.nodes`).
    """

    kind: Collective
    devices: tuple[int, ...]
    num_bytes: int
    rounds: int
    group: int | None = None
    weights: tuple[int, ...] = ()
    by_node: bool = False


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device at its fullest moment, by what takes them.

    `allocator_bytes`: what torch's allocator holds beyond the tensors. `outside_bytes`: what is outside of
    it, the cluster's reserve for context and libraries, and communicators. `host_bytes`: the most of its
    activations that are in its node's memory; of the other numbers only on CPUs part of the activations.
    `updated_bytes`: of the parameters, those that the device's own optimizer updates. `lasting_bytes`: of
    all, what is there at every moment.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    buffer_bytes: int
    updated_bytes: int
    lasting_bytes: int
    allocator_bytes: int = 0
    outside_bytes: int = 0
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of them together, as the driver shows it."""
        return self.tensor_bytes + self.allocator_bytes + self.outside_bytes

    def with_communicators(self, num_bytes: int) -> DeviceMemory:
        """Add what communicators take, if that was not counted."""
        return replace(self, outside_bytes=self.outside_bytes + num_bytes)

    @property
    def tensor_bytes(self) -> int:
        """Bytes that tensors take."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.buffer_bytes
        )

    @property
    def parts(self) -> dict[str, int]:
        """All of them by what people call them."""
        return {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer state": self.optimizer_bytes,
            "activations": self.activation_bytes,
            "buffers": self.buffer_bytes,
            "allocator": self.allocator_bytes,
            "reserve and communicators": self.outside_bytes,
        }
