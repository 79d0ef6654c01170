"""What a plan holds on each device: the one definition that planner, checker, simulator and report call.

Parameters, gradients and optimizer state of every op the device ever runs (once, however many slices use
them), activations kept from forward to backward, and transfer buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Protocol

from spindle_cli.cluster import Cluster
from spindle_cli.units import MIB

# Of a transformer layer's activations, what tensor parallelism does not split: 10 of 34 bytes per token and
# channel (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation
# 2, without scores).
UNSPLIT_ACTIVATION_SHARE = 10 / 34

# On CPU devices (gloo), what gradient sums under way may take in receive buffers where optimizer state is
# sharded; the runtime lets further sums wait. A single sum may be larger.
SUM_BUFFER_BYTES = 32 * MIB


class MetaOpSizes(Protocol):
    """What is needed of a MetaOp; `MetaOpProfile` and `PlanMetaOp` have it. Bytes are for the whole batch."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def inputs_of_every_op(self) -> tuple[str, ...]: ...
    @property
    def parameters(self) -> str | None: ...
    @property
    def parameter_blocks(self) -> tuple[int, ...] | None: ...
    @property
    def param_bytes_per_op(self) -> int: ...
    @property
    def extra_param_bytes(self) -> dict[int, int]: ...
    @property
    def trainable_fraction(self) -> float: ...
    @property
    def activation_bytes_per_op(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...
    @property
    def inner_output_bytes(self) -> int | None: ...


class OptimizerNumbers(Protocol):
    """What is needed of an optimizer; `Profile` and `Plan` have it."""

    @property
    def optimizer_state_per_param(self) -> float: ...
    @property
    def optimizer_state_sharded(self) -> bool: ...


class SliceShape(Protocol):
    """What is needed of a slice; `plan.types.Slice` has it."""

    @property
    def metaop(self) -> str: ...
    @property
    def ops(self) -> tuple[int, int]: ...
    @property
    def devices(self) -> tuple[int, ...]: ...
    @property
    def dp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def recompute(self) -> bool: ...


@dataclass(frozen=True)
class DeviceMemory:
    """Peak bytes of one device, by what takes them.

    `updated_bytes`: of the parameters, those that the device's own optimizer updates.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    buffer_bytes: int
    updated_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.buffer_bytes
        )


def parameter_block(metaop: MetaOpSizes, op: int) -> tuple[str, int]:
    """Identity of an op's parameters: ops with the same pair hold the same parameters."""
    block = metaop.parameter_blocks[op] if metaop.parameter_blocks is not None else op
    return (metaop.name if metaop.parameters is None else metaop.parameters), block


def op_param_bytes(metaop: MetaOpSizes, op: int) -> int:
    """Bytes of the parameters of one op, unsharded, with those of its glue."""
    return metaop.param_bytes_per_op + metaop.extra_param_bytes.get(op, 0)


def inner_bytes(metaop: MetaOpSizes) -> int:
    """Bytes that an inner op hands to the next one, whole batch."""
    return metaop.output_bytes if metaop.inner_output_bytes is None else metaop.inner_output_bytes


def activation_bytes(
    metaop: MetaOpSizes, num_ops: int, dp: int, tp: int, *, recompute: bool = False
) -> float:
    """Bytes that one device keeps from forward to backward for `num_ops` ops of its share.

    With `recompute` only each op's input is kept; see `recomputed_bytes`.
    """
    if recompute:
        return num_ops * inner_bytes(metaop) / dp
    return num_ops * _op_activation_bytes(metaop, dp, tp)


def recomputed_bytes(metaop: MetaOpSizes, dp: int, tp: int, *, recompute: bool) -> float:
    """Bytes that one device needs while it recomputes an op in the backward pass, one op at a time."""
    return _op_activation_bytes(metaop, dp, tp) if recompute else 0.0


def _op_activation_bytes(metaop: MetaOpSizes, dp: int, tp: int) -> float:
    split = UNSPLIT_ACTIVATION_SHARE + (1 - UNSPLIT_ACTIVATION_SHARE) / tp
    return metaop.activation_bytes_per_op / dp * split


def input_bytes(metaop: MetaOpSizes, first_op: int, by_name: Mapping[str, MetaOpSizes]) -> int:
    """Bytes that a slice starting at `first_op` takes in from other slices, whole batch."""
    if first_op == 0:
        return sum(by_name[name].output_bytes for name in metaop.inputs)
    return inner_bytes(metaop) + sum(by_name[name].output_bytes for name in metaop.inputs_of_every_op)


def slice_output_bytes(metaop: MetaOpSizes, last_op: int, num_ops: int) -> int:
    """Bytes that a slice ending before `last_op` hands on, whole batch; `num_ops` is the MetaOp's."""
    return metaop.output_bytes if last_op == num_ops else inner_bytes(metaop)


def device_memory(
    metaops: Iterable[MetaOpSizes],
    slices: Sequence[SliceShape],
    cluster: Cluster,
    optimizer: OptimizerNumbers,
) -> tuple[DeviceMemory, ...]:
    """Peak memory of every device of the cluster under a plan.

    Gradients take the bytes of the trained parameters; optimizer state `optimizer_state_per_param` times
    that, where it is sharded divided by the number of devices that hold the same parameters. Buffers: what
    each slice received stays until its backward pass; on top, of the largest slice, the gradients of its
    output and its inputs; and receive buffers of gradient sums (see `SUM_BUFFER_BYTES`).
    """
    by_name = {metaop.name: metaop for metaop in metaops}
    parts = [_Part(piece, by_name) for piece in slices]
    roles: list[list[_Role]] = [[] for _ in range(cluster.num_devices)]
    for index, piece in enumerate(slices):
        for position, device in enumerate(piece.devices):
            roles[device].append((index, position % piece.tp))
    # Most devices do the same as others; each of these sets of roles is added up once.
    of_device = [tuple(role) for role in roles]
    account = _Account(parts, _Holders(slices, parts), cluster, optimizer)
    needs = {role: account.need(role) for role in set(of_device)}
    return tuple(needs[role] for role in of_device)


_Role = tuple[int, int]  # index of a slice, and which of its `tp` shards
_Block = tuple[str, int]
_Shards = set[tuple[float, float]]  # intervals of a block, as shares of it


class _Part:
    """What a slice takes of each of its devices."""

    __slots__ = ("activations", "blocks", "handed", "recomputed", "taken", "tp")

    def __init__(self, piece: SliceShape, by_name: Mapping[str, MetaOpSizes]) -> None:
        metaop = by_name[piece.metaop]
        first, last = piece.ops
        self.tp = piece.tp
        self.activations = activation_bytes(
            metaop, last - first, piece.dp, piece.tp, recompute=piece.recompute
        )
        self.recomputed = recomputed_bytes(metaop, piece.dp, piece.tp, recompute=piece.recompute)
        self.taken = input_bytes(metaop, first, by_name) / piece.dp
        self.handed = max(metaop.output_bytes, inner_bytes(metaop)) / piece.dp
        # (identity, bytes unsharded, bytes that are trained) of each block of parameters
        self.blocks = [
            (parameter_block(metaop, op), num_bytes, num_bytes * metaop.trainable_fraction)
            for op in range(first, last)
            if (num_bytes := op_param_bytes(metaop, op))
        ]


class _Holders:
    """How many devices hold each fragment of each block of parameters."""

    def __init__(self, slices: Sequence[SliceShape], parts: Sequence[_Part]) -> None:
        self._slices = slices
        self._users: dict[_Block, list[int]] = {}
        for index, part in enumerate(parts):
            for block, _, _ in part.blocks:
                self._users.setdefault(block, []).append(index)
        self._counts: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, block: _Block) -> tuple[int, ...]:
        """Of each of the finest common fragments of the block, which are equal, the number of devices."""
        users = tuple(self._users[block])
        if users not in self._counts:
            pieces = [self._slices[index] for index in users]
            count = lcm(*(piece.tp for piece in pieces))
            self._counts[users] = tuple(
                len(set().union(*(piece.devices[i * piece.tp // count :: piece.tp] for piece in pieces)))
                for i in range(count)
            )
        return self._counts[users]


@dataclass(frozen=True)
class _Account:
    """What devices need under a plan."""

    parts: Sequence[_Part]
    holders: _Holders
    cluster: Cluster
    optimizer: OptimizerNumbers

    def need(self, roles: Iterable[_Role]) -> DeviceMemory:
        """Memory of a device with these roles."""
        activations = recomputed = received = largest = 0.0
        held: dict[_Block, tuple[float, float]] = {}
        shards: dict[_Block, _Shards] = {}
        for index, shard in roles:
            part = self.parts[index]
            activations += part.activations
            recomputed = max(recomputed, part.recomputed)
            received += part.taken
            largest = max(largest, part.taken + part.handed)
            for block, num_bytes, trained_bytes in part.blocks:
                before = held.get(block, (0.0, 0.0))
                held[block] = (max(before[0], num_bytes), max(before[1], trained_bytes))
                shards.setdefault(block, set()).add((shard / part.tp, (shard + 1) / part.tp))
        parameters = trained = owned = summed = largest_sum = 0.0
        for block, (whole, trained_whole) in held.items():
            share = _covered(shards[block])
            parameters += share * whole
            trained += share * trained_whole
            if self.optimizer.optimizer_state_sharded and trained_whole:
                own, others = self._owned(block, shards[block])
                owned += own * trained_whole
                summed += others * trained_whole
                largest_sum = max(largest_sum, others * trained_whole)
        if not self.optimizer.optimizer_state_sharded:
            owned = trained
        sums = min(summed, max(SUM_BUFFER_BYTES, largest_sum)) if self.cluster.device_type == "cpu" else 0.0
        return DeviceMemory(
            parameter_bytes=round(parameters),
            gradient_bytes=round(trained),
            optimizer_bytes=round(owned * self.optimizer.optimizer_state_per_param),
            activation_bytes=round(activations + recomputed),
            buffer_bytes=round(received + largest + sums),
            updated_bytes=round(owned),
        )

    def _owned(self, block: _Block, shards: _Shards) -> tuple[float, float]:
        """Shares of a block: that a device with these shards of it owns, and that it sums with others."""
        counts = self.holders.of(block)
        held = [
            count
            for fragment, count in enumerate(counts)
            if any(first <= (fragment + 0.5) / len(counts) < last for first, last in shards)
        ]
        owned = sum(1 / count for count in held) / len(counts)
        return owned, sum(count > 1 for count in held) / len(counts)


def _covered(shards: _Shards) -> float:
    """Length of the union of some intervals."""
    covered, end = 0.0, 0.0
    for first, last in sorted(shards):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered
