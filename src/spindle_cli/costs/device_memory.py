"""What a plan holds on each device: the one definition that planner, checker, simulator and report call.

Parameters, gradients and optimizer state of every op the device ever runs (once, however many slices use
them), activations kept from forward to backward, and buffers of transfers and gradient sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Protocol

from spindle_cli.cluster import Cluster
from spindle_cli.costs.memory import (
    MetaOpSizes,
    SliceShape,
    activation_bytes,
    inner_bytes,
    op_param_bytes,
    parameter_block,
    recomputed_bytes,
    working_bytes,
)
from spindle_cli.units import MIB

# On CPU devices (gloo), what gradient sums under way may take in receive buffers where optimizer state is
# sharded; the runtime lets further sums wait. A single sum may be larger.
SUM_BUFFER_BYTES = 32 * MIB


class OptimizerNumbers(Protocol):
    """What is needed of an optimizer; `Profile` and `Plan` have it."""

    @property
    def optimizer_state_per_param(self) -> float: ...
    @property
    def optimizer_state_sharded(self) -> bool: ...


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


def device_memory(
    metaops: Iterable[MetaOpSizes],
    slices: Sequence[SliceShape],
    cluster: Cluster,
    optimizer: OptimizerNumbers,
) -> tuple[DeviceMemory, ...]:
    """Peak memory of every device of the cluster under a plan.

    Gradients take the bytes of the trained parameters; optimizer state `optimizer_state_per_param` times
    that, where it is sharded divided by the number of devices that hold the same parameters. Buffers: what
    each slice received from other devices stays until its backward pass; on top, of the largest slice, the
    gradients of its output and its inputs and those on their way through one op; and what gradient sums take
    beyond the activations that have been let go of when they start (`SUM_BUFFER_BYTES`).
    """
    by_name = {metaop.name: metaop for metaop in metaops}
    in_order = sorted(slices, key=lambda piece: piece.start_s)
    parts = [_Part(piece, by_name) for piece in in_order]
    sources = _Sources(in_order, by_name)
    roles: list[list[_Role]] = [[] for _ in range(cluster.num_devices)]
    for index, piece in enumerate(in_order):
        received = sources.received_by(index)
        for position, device in enumerate(piece.devices):
            roles[device].append((index, position % piece.tp, received[position] if received else 0.0))
    # Most devices do the same as others; each of these sets of roles is added up once.
    of_device = [tuple(role) for role in roles]
    account = _Account(parts, _Holders(in_order, parts), cluster, optimizer)
    needs = {role: account.need(role) for role in set(of_device)}
    return tuple(needs[role] for role in of_device)


_Role = tuple[int, int, float]  # index of a slice, which of its `tp` shards, and bytes received for it
_Block = tuple[str, int]
_Shards = set[tuple[float, float]]  # intervals of a block, as shares of it


class _Part:
    """What a slice takes of each of its devices."""

    __slots__ = ("activations", "blocks", "num_ops", "passing", "recomputed", "tp")

    def __init__(self, piece: SliceShape, by_name: Mapping[str, MetaOpSizes]) -> None:
        metaop = by_name[piece.metaop]
        first, last = piece.ops
        self.tp = piece.tp
        self.num_ops = last - first
        self.activations = activation_bytes(
            metaop, last - first, piece.dp, piece.tp, recompute=piece.recompute
        )
        self.recomputed = recomputed_bytes(metaop, piece.dp, piece.tp, recompute=piece.recompute)
        taken = sum(num_bytes for num_bytes, _ in _inputs(piece, by_name))
        handed = max(metaop.output_bytes, inner_bytes(metaop))
        self.passing = (taken + handed) / piece.dp + working_bytes(metaop, piece.dp, piece.tp)
        # (identity, bytes unsharded, bytes that are trained) of the parameters of each op that has any
        self.blocks = {
            op - first: (parameter_block(metaop, op), num_bytes, num_bytes * metaop.trainable_fraction)
            for op in range(first, last)
            if (num_bytes := op_param_bytes(metaop, op))
        }


def _inputs(piece: SliceShape, by_name: Mapping[str, MetaOpSizes]) -> list[tuple[int, str]]:
    """(bytes, whole batch; MetaOp that makes it) of all that a slice takes in from other slices."""
    metaop = by_name[piece.metaop]
    if piece.ops[0] == 0:
        return [(by_name[name].output_bytes, name) for name in metaop.inputs]
    others = [(by_name[name].output_bytes, name) for name in metaop.inputs_of_every_op]
    return [(inner_bytes(metaop), metaop.name), *others]


class _Sources:
    """What slices receive from other devices. A share that lies on the device already is not copied."""

    def __init__(self, slices: Sequence[SliceShape], by_name: Mapping[str, MetaOpSizes]) -> None:
        self._slices = slices
        self._by_name = by_name
        self._ending_at: dict[tuple[str, int], SliceShape] = {}
        self._last: dict[str, SliceShape] = {}
        self._places: dict[int, dict[int, int]] = {}
        for piece in slices:
            self._ending_at[piece.metaop, piece.ops[1]] = piece
            if piece.metaop not in self._last or self._last[piece.metaop].ops[1] < piece.ops[1]:
                self._last[piece.metaop] = piece

    def received_by(self, index: int) -> list[float] | None:
        """Bytes that each device of a slice receives for it, in the order of its devices; None: nothing."""
        piece = self._slices[index]
        received: list[float] | None = None
        for num_bytes, name in _inputs(piece, self._by_name):
            if name == piece.metaop:
                source = self._ending_at.get((name, piece.ops[0]))
            else:
                source = self._last.get(name)
            if source is not None and (source.devices, source.dp, source.tp) == (
                piece.devices,
                piece.dp,
                piece.tp,
            ):
                continue
            received = received or [0.0] * len(piece.devices)
            for position, device in enumerate(piece.devices):
                if source is None or not self._has(source, device, piece, position // piece.tp):
                    received[position] += num_bytes / piece.dp
        return received

    def _has(self, source: SliceShape, device: int, piece: SliceShape, share: int) -> bool:
        """Whether a device's share of `source` includes the `share`-th of `piece`."""
        if id(source) not in self._places:
            self._places[id(source)] = {held: place for place, held in enumerate(source.devices)}
        place = self._places[id(source)].get(device)
        if place is None:
            return False
        own = place // source.tp
        return own * piece.dp <= share * source.dp and (share + 1) * source.dp <= (own + 1) * piece.dp


class _Holders:
    """How many devices hold each fragment of each block of parameters."""

    def __init__(self, slices: Sequence[SliceShape], parts: Sequence[_Part]) -> None:
        self._slices = slices
        self._users: dict[_Block, list[int]] = {}
        for index, part in enumerate(parts):
            for block, _, _ in part.blocks.values():
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


@dataclass
class _Held:
    """A block of parameters on one device.

    Attributes:
        num_bytes, trained_bytes: of the whole block.
        shards: of it that the device has.
        first_use: the first op on the device that uses it.
        owned: share of the block whose optimizer state the device has.
        summed: share whose gradients it sums with other devices.
    """

    num_bytes: float
    trained_bytes: float
    shards: _Shards
    first_use: int
    owned: float = 0.0
    summed: float = 0.0

    def share(self) -> float:
        """Of the block, what the device has: the length of the union of its shards."""
        covered, end = 0.0, 0.0
        for first, last in sorted(self.shards):
            covered += max(0.0, last - max(first, end))
            end = max(end, last)
        return covered

    def divide(self, counts: Sequence[int]) -> None:
        """Set `owned` and `summed` from how many devices hold each of the block's equal fragments."""
        held = [
            count
            for fragment, count in enumerate(counts)
            if any(first <= (fragment + 0.5) / len(counts) < last for first, last in self.shards)
        ]
        self.owned = sum(1 / count for count in held) / len(counts)
        self.summed = sum(count > 1 for count in held) / len(counts)


@dataclass(frozen=True)
class _Account:
    """What devices need under a plan."""

    parts: Sequence[_Part]
    holders: _Holders
    cluster: Cluster
    optimizer: OptimizerNumbers

    def need(self, roles: Iterable[_Role]) -> DeviceMemory:
        """Memory of a device with these roles, which are in the order in which it runs them."""
        received = recomputed = passing = 0.0
        activations: list[float] = []  # of each op that the device runs
        held: dict[_Block, _Held] = {}
        for index, shard, received_bytes in roles:
            part = self.parts[index]
            received += received_bytes
            recomputed = max(recomputed, part.recomputed)
            passing = max(passing, part.passing)
            for op, (block, num_bytes, trained_bytes) in part.blocks.items():
                there = held.setdefault(block, _Held(0.0, 0.0, set(), len(activations) + op))
                there.num_bytes = max(there.num_bytes, num_bytes)
                there.trained_bytes = max(there.trained_bytes, trained_bytes)
                there.shards.add((shard / part.tp, (shard + 1) / part.tp))
            activations += [part.activations / part.num_ops] * part.num_ops
        sharded = self.optimizer.optimizer_state_sharded
        if sharded:
            for block, there in held.items():
                there.divide(self.holders.of(block))
        trained = sum(there.share() * there.trained_bytes for there in held.values())
        updated = sum(there.owned * there.trained_bytes for there in held.values()) if sharded else trained
        sums = self._sums(held.values(), activations) if self.cluster.device_type == "cpu" else 0.0
        return DeviceMemory(
            parameter_bytes=round(sum(there.share() * there.num_bytes for there in held.values())),
            gradient_bytes=round(trained),
            optimizer_bytes=round(updated * self.optimizer.optimizer_state_per_param),
            activation_bytes=round(sum(activations) + recomputed),
            buffer_bytes=round(received + passing + sums),
            updated_bytes=round(updated),
        )

    def _sums(self, held: Iterable[_Held], activations: Sequence[float]) -> float:
        """What the buffers of gradient sums take beyond the activations that have been let go of.

        A block's sum starts when the backward pass is through with the first op that uses it.
        """
        starting = [0.0] * len(activations)
        largest = 0.0
        for there in held:
            starting[there.first_use] += there.summed * there.trained_bytes
            largest = max(largest, there.summed * there.trained_bytes)
        limit = max(SUM_BUFFER_BYTES, largest)
        most = freed = under_way = 0.0
        for op in reversed(range(len(activations))):
            freed += activations[op]
            under_way += starting[op]
            most = max(most, min(under_way, limit) - freed)
        return most
