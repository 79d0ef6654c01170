"""What each device holds while pieces are placed: account/device_memory.py's account, one slice at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil

from spindle_cli.costs.memory import (
    held_param_bytes,
    inner_bytes,
    input_bytes,
    parameter_block,
    running_bytes,
    slice_activation_bytes,
)
from spindle_cli.costs.parameters import level_of, optimizer_bytes
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import UnplacedSlice
from spindle_cli.profile.types import MetaOp

Block = tuple[str, int, int]  # parameters key, block, degree of tensor parallelism


class Footprint:
    """What a slice adds to each of its devices, in bytes.

    Attributes:
        part: of the MetaGraph that the slice is of, which hangs together with no other.
        kept: activations and received inputs, until the slice's backward pass.
        passing: on top while it runs backward; only the largest slice's counts on a device.
        blocks: (identity, bytes with gradients and optimizer state) of each block of parameters; those that a
            device already holds add nothing.
    """

    __slots__ = ("_shared", "blocks", "kept", "names", "parameter_bytes", "part", "passing")

    def __init__(self, problem: Problem, slice_: UnplacedSlice) -> None:
        metaop = problem.nodes[slice_.node].metaop
        point = slice_.point
        self.part = problem.part_of[metaop.name]
        largest = ceil(metaop.batch_size / point.dp)
        if point.rows is not None:
            largest = max(last - first for first, last in pairwise(point.rows))
        shares = metaop.batch_size / largest
        taken = input_bytes(metaop, slice_.first, problem.profile.by_name) / shares
        handed = max(metaop.output_bytes, inner_bytes(metaop)) / shares
        ops = (slice_.first, slice_.last)
        activations = slice_activation_bytes(
            metaop, ops, shares, point.tp, recompute=point.recompute, selective=point.selective
        )
        self.kept = activations + taken
        running = running_bytes(
            metaop, ops, shares, point.tp, recompute=point.recompute, selective=point.selective
        )
        self.passing = taken + handed + running
        # With tensor parallelism a device holds a shard; which one counts as different from whole blocks.
        # Other pieces may hold the parameters too, on other devices: then there is less of the state here.
        level = level_of(metaop, problem.profile.sharding)
        is_shared = problem.profile.optimizer_state_sharded and level is not Sharding.NONE
        owners = point.dp * _above_least(problem) if is_shared else 1
        kept = optimizer_bytes(metaop, problem.profile)
        per_param = kept.state_per_param / owners + kept.whole_state_per_param
        wide = problem.profile.gradient_bytes_per_param
        # Of all parameters, what devices share out, and hold whole only while an op or two use it.
        trained = metaop.trainable_fraction
        shared = trained * (1 - kept.whole_share) if level.is_by_pass else 0.0
        gathered = shared + 1 - trained if level is Sharding.PARAMETERS else 0.0
        whole = (1 - 1 / owners) * (wide * shared + gathered)
        state = 1 + trained * (wide + per_param) - whole
        held = [held_param_bytes(metaop, op, point.tp) for op in range(slice_.first, slice_.last)]
        self.passing += 2 * whole * max(held)
        self.blocks = tuple(_blocks(metaop, slice_, held, state))
        self.names = frozenset(block for block, _ in self.blocks)
        self.parameter_bytes = sum(num_bytes for _, num_bytes in self.blocks)
        self._shared: dict[frozenset[Block], float] = {}

    def shared_bytes(self, held: frozenset[Block]) -> float:
        """How much of the slice's parameters with all their state a device holds already."""
        if not held:
            return 0.0
        if held not in self._shared:
            self._shared[held] = sum(num_bytes for block, num_bytes in self.blocks if block in held)
        return self._shared[held]


def _blocks(
    metaop: MetaOp, slice_: UnplacedSlice, held: Sequence[float], state: float
) -> Iterator[tuple[Block, float]]:
    """Each block of a slice's parameters, those that it is tied to once. `held`: bytes of each op's on a
    device. `state`: of each of them, with gradients and optimizer state.
    """
    tp = slice_.point.tp
    tied: dict[str, float] = {}
    for op, num_bytes in zip(range(slice_.first, slice_.last), held, strict=True):
        for entry in metaop.tied:
            if entry.op == op:
                taken = entry.num_bytes / (tp if entry.is_split else 1)
                num_bytes -= taken
                tied[entry.parameter] = max(tied.get(entry.parameter, 0.0), taken)
        yield (*parameter_block(metaop, op), tp), max(0.0, num_bytes) * state
    for name, num_bytes in tied.items():
        yield (name, 0, tp), num_bytes * state


def _above_least(problem: Problem) -> float:
    """How many times the least weight of a device the mean one is: a placement that has room for the least
    part is left for the account to judge, which knows the devices.
    """
    weights = problem.profile.shard_weights
    return sum(weights) / len(weights) / min(weights) if weights else 1


class Usage:
    """Bytes held by every device so far; an upper estimate where shards of one block overlap.

    Devices that ran the same pieces share one set of blocks, so that what a slice would share with it is
    counted once.
    """

    def __init__(self, capacity_bytes: Sequence[int], *, one_part_at_once: bool = False) -> None:
        """`one_part_at_once`: each part of the MetaGraph is run forward and backward before the next one, so
        that of what they keep the fullest counts.
        """
        self.capacity_bytes = capacity_bytes
        self._one_part_at_once = one_part_at_once
        self._kept = [0.0] * len(capacity_bytes)
        self._of_parts = [dict[int, float]() for _ in capacity_bytes]
        self._fullest = [0.0] * len(capacity_bytes)
        self._passing = [0.0] * len(capacity_bytes)
        self._blocks: list[frozenset[Block]] = [frozenset()] * len(capacity_bytes)

    def shared_bytes(self, device: int, footprint: Footprint) -> float:
        """How much of the slice's parameters with all their state a device holds already."""
        return footprint.shared_bytes(self._blocks[device])

    def after(self, device: int, footprint: Footprint) -> float:
        """Bytes on the device if it ran the slice too."""
        added = footprint.parameter_bytes - self.shared_bytes(device, footprint)
        added += max(0.0, self._part_with(device, footprint) - self._fullest[device])
        return self._kept[device] + added + max(self._passing[device], footprint.passing)

    def fits(self, device: int, footprint: Footprint) -> bool:
        """Whether the device has room for the slice."""
        return self.after(device, footprint) <= self.capacity_bytes[device]

    def add(self, devices: Sequence[int], footprint: Footprint) -> None:
        """Let the devices run the slice."""
        joined: dict[frozenset[Block], frozenset[Block]] = {}
        for device in devices:
            held = self._blocks[device]
            part = self._part_with(device, footprint)
            added = footprint.parameter_bytes - footprint.shared_bytes(held)
            self._kept[device] += added + max(0.0, part - self._fullest[device])
            if self._one_part_at_once:
                self._of_parts[device][footprint.part] = part
                self._fullest[device] = max(self._fullest[device], part)
            self._passing[device] = max(self._passing[device], footprint.passing)
            if held not in joined:
                joined[held] = held | footprint.names
            self._blocks[device] = joined[held]

    def _part_with(self, device: int, footprint: Footprint) -> float:
        """What the slice's part keeps with it, where only the fullest counts; else the slice alone."""
        if not self._one_part_at_once:
            return footprint.kept
        return self._of_parts[device].get(footprint.part, 0.0) + footprint.kept
