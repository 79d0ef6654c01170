"""Parameter groups: which parameters are summed together, over which devices, and when each sum can start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple

from spindle_cli.account.holdings import blocks_of
from spindle_cli.account.types import ParameterGroup, PlacedPlan
from spindle_cli.costs.links import all_reduce_s
from spindle_cli.costs.memory import SliceShape
from spindle_cli.files.cluster import Cluster
from spindle_cli.units import GIB, KIB

# Sizes of a sum to choose from, and one that takes its links' full bandwidth.
_SUM_BYTES = tuple(64 * KIB << power for power in range(11))
_LARGE_SUM_BYTES = GIB


# Ends the key of what tensor parallelism leaves whole.
WHOLE = " (whole)"


@dataclass(frozen=True)
class ParameterBlock:
    """Trained parameters that are always used together: a key, a block of it, and the bytes of their
    gradients, unsplit.

    `split`: whether tensor parallelism gives each device of a group its part of them; else all hold them
    whole.
    """

    key: str
    block: int
    num_bytes: int
    split: bool = True


# (MetaOp name, index of the op in it) -> the trained parameters that the op uses, neighbouring glue included.
ParameterUses = Mapping[tuple[str, int], Sequence[ParameterBlock]]


def planned_parameters(plan: PlacedPlan) -> dict[tuple[str, int], tuple[ParameterBlock, ...]]:
    """Which parameters each op trains, as far as the plan knows: a block an op, and one of what tensor
    parallelism leaves whole, its glue's parameters included.

    A runtime that knows the parameters themselves gives `link` its own.
    """
    uses: dict[tuple[str, int], tuple[ParameterBlock, ...]] = {}
    for metaop in plan.by_name.values():
        for op in range(metaop.num_ops):
            uses[metaop.name, op] = tuple(
                ParameterBlock(key if is_split else f"{key}{WHOLE}", block, num_bytes, is_split)
                for (key, block, is_split), trained in (
                    (use.block, use.trained_bytes) for use in blocks_of(metaop, op)
                )
                if (num_bytes := round(trained))
            )
    return uses


def parameter_groups(
    slices: Sequence[SliceShape], order: tuple[int, ...], uses: ParameterUses, cluster: Cluster
) -> tuple[ParameterGroup, ...]:
    """Group all used parameters by the devices that hold them and by when their gradients are complete.

    Groups come in the order in which they are complete: in the backward pass of the first slice, in `order`,
    that uses them, from its last op to its first. What is complete one after the other on the same devices is
    summed together until it is worth a sum (`sum_bytes`).
    """
    position = {index: place for place, index in enumerate(order)}
    holders = _Holders(slices)
    parts: list[_Part] = []
    for users, names in _used_alike(slices, order, uses).items():
        first = users[0]
        num_bytes = sum(names.values())
        first_ops = {user.piece: user.op for user in users}
        for fragment, devices in holders.of(tuple((user.piece, user.split) for user in users)):
            share = -(-num_bytes // fragment[1])
            ready = (position[first.piece], first.op)
            parts.append(_Part(ready, devices, fragment, list(names), share, dict(first_ops)))
    parts.sort(key=_Part.when)
    return tuple(part.group(index) for index, part in enumerate(_join_small(parts, cluster)))


def sum_bytes(devices: tuple[int, ...], cluster: Cluster) -> int:
    """Bytes from which a sum over these devices is worth its latency: the least that moves at half the speed
    of a large one, from 64 KiB to 64 MiB.
    """
    if len(devices) < 2:
        return _SUM_BYTES[0]
    large_s_per_byte = all_reduce_s(_LARGE_SUM_BYTES, devices, cluster) / _LARGE_SUM_BYTES
    for num_bytes in _SUM_BYTES:
        if all_reduce_s(num_bytes, devices, cluster) <= 2 * num_bytes * large_s_per_byte:
            return num_bytes
    return _SUM_BYTES[-1]


class _User(NamedTuple):
    """A slice that uses some parameters: the first of its ops that does; whether it has parts of them."""

    piece: int
    op: int
    split: bool


def _used_alike(
    slices: Sequence[SliceShape], order: tuple[int, ...], uses: ParameterUses
) -> dict[tuple[_User, ...], dict[tuple[str, int], int]]:
    """Parameters that the same ops are the first to use, in the same way, with their bytes."""
    size: dict[tuple[str, int], int] = {}
    users: dict[tuple[str, int], dict[int, _User]] = {}
    for index in order:
        piece = slices[index]
        for op in range(*piece.ops):
            for block in uses[piece.metaop, op]:
                name = (block.key, block.block)
                size[name] = max(size.get(name, 0), block.num_bytes)
                known = users.setdefault(name, {}).get(index, _User(index, op, split=True))
                users[name][index] = known._replace(split=known.split and block.split)
    alike: dict[tuple[_User, ...], dict[tuple[str, int], int]] = {}
    for name, by_slice in users.items():
        alike.setdefault(tuple(by_slice.values()), {})[name] = size[name]
    return alike


@dataclass
class _Part:
    """A group in the making.

    Attributes:
        ready: when it is complete: position in the order of the first slice that uses it, and the first op
            in it.
        first_ops: of each slice that adds to it, the first op that does.
    """

    ready: tuple[int, int]
    devices: tuple[int, ...]
    fragment: tuple[int, int]
    blocks: list[tuple[str, int]]
    num_bytes: int
    first_ops: dict[int, int]

    def when(self) -> tuple[int, int]:
        """Ascending in the order of the backward pass."""
        return -self.ready[0], -self.ready[1]

    def join(self, later: _Part) -> None:
        """Add what is complete later."""
        self.ready = later.ready
        self.blocks += later.blocks
        self.num_bytes += later.num_bytes
        for index, op in later.first_ops.items():
            self.first_ops[index] = min(op, self.first_ops.get(index, op))

    def group(self, index: int) -> ParameterGroup:
        """The finished group."""
        slices = tuple(sorted(self.first_ops))
        return ParameterGroup(
            index=index,
            devices=self.devices,
            blocks=tuple(self.blocks),
            num_bytes=self.num_bytes,
            slices=slices,
            first_ops=tuple(self.first_ops[slice_] for slice_ in slices),
            fragment=self.fragment,
        )


@dataclass
class _Holders:
    """Who holds each of the finest common fragments of parameters that some slices use."""

    slices: Sequence[SliceShape]
    found: dict[tuple[tuple[int, bool], ...], list[tuple[tuple[int, int], tuple[int, ...]]]] = field(
        default_factory=dict
    )

    def of(self, users: tuple[tuple[int, bool], ...]) -> list[tuple[tuple[int, int], tuple[int, ...]]]:
        """[((i, n), devices ascending)] for parameters of which the slices `users` use parts, or all."""
        if users not in self.found:
            pieces = [(self.slices[index], self.slices[index].tp if split else 1) for index, split in users]
            count = lcm(*(parts for _, parts in pieces))
            holders: list[set[int]] = [set() for _ in range(count)]
            for piece, parts in pieces:
                width = count // parts
                for fragment in range(count):
                    holders[fragment].update(piece.devices[fragment // width :: parts])
            self.found[users] = [
                ((fragment, count), tuple(sorted(devices))) for fragment, devices in enumerate(holders)
            ]
        return self.found[users]


def _join_small(parts: list[_Part], cluster: Cluster) -> list[_Part]:
    """Join each part that is too small with the next ones of the same devices; it then waits for the last."""
    joined: list[_Part] = []
    waiting: dict[tuple[tuple[int, ...], tuple[int, int]], _Part] = {}
    enough: dict[tuple[int, ...], int] = {}
    for part in parts:
        key = (part.devices, part.fragment)
        if part.devices not in enough:
            enough[part.devices] = sum_bytes(part.devices, cluster)
        if key in waiting:
            waiting[key].join(part)
        else:
            waiting[key] = part
        if waiting[key].num_bytes >= enough[part.devices]:
            joined.append(waiting.pop(key))
    joined.extend(waiting.values())
    joined.sort(key=_Part.when)
    return joined
