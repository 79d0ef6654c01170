"""Parameter groups: which parameters are summed together, over which devices, and when each sum can start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

from spindle_cli.costs.memory import op_param_bytes, parameter_block
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.program.types import ParameterGroup
from spindle_cli.units import MIB

# Groups of the same devices that are complete one after another are joined until they bring this many bytes:
# a smaller sum is mostly latency.
MIN_SUM_BYTES = MIB


@dataclass(frozen=True)
class ParameterBlock:
    """Trained parameters that are always used together: a key, a block of it, and the bytes of their
    gradients, unsplit.
    """

    key: str
    block: int
    num_bytes: int


# (MetaOp name, index of the op in it) -> the trained parameters that the op uses, neighbouring glue included.
ParameterUses = Mapping[tuple[str, int], Sequence[ParameterBlock]]


def planned_parameters(plan: Plan) -> dict[tuple[str, int], tuple[ParameterBlock, ...]]:
    """Which parameters each op trains, as far as the plan knows: one block an op, its glue's parameters
    included.

    A runtime that knows the parameters themselves gives `link` its own.
    """
    uses: dict[tuple[str, int], tuple[ParameterBlock, ...]] = {}
    for metaop in plan.metaops:
        for op in range(metaop.num_ops):
            num_bytes = round(op_param_bytes(metaop, op) * metaop.trainable_fraction)
            block = ParameterBlock(*parameter_block(metaop, op), num_bytes)
            uses[metaop.name, op] = (block,) if num_bytes else ()
    return uses


def parameter_groups(
    slices: tuple[Slice, ...], order: tuple[int, ...], uses: ParameterUses
) -> tuple[ParameterGroup, ...]:
    """Group all used parameters by the devices that hold them and by when their gradients are complete.

    Groups come in the order in which they are complete: by the backward pass of the first slice, in `order`,
    that uses them.
    """
    position = {index: place for place, index in enumerate(order)}
    size: dict[tuple[str, int], int] = {}
    users: dict[tuple[str, int], list[int]] = {}
    for index in order:
        piece = slices[index]
        for op in range(*piece.ops):
            for block in uses[piece.metaop, op]:
                name = (block.key, block.block)
                size[name] = max(size.get(name, 0), block.num_bytes)
                using = users.setdefault(name, [])
                if not using or using[-1] != index:  # a block repeated inside a slice counts once
                    using.append(index)

    together: dict[
        tuple[int, ...], list[tuple[str, int]]
    ] = {}  # by users: the same devices and the same moment
    for name, indices in users.items():
        together.setdefault(tuple(indices), []).append(name)
    parts: list[_Part] = []
    for same_users, names in together.items():
        num_bytes = sum(size[name] for name in names)
        for fragment, devices in _fragment_holders([slices[index] for index in same_users]):
            first_use, share = position[same_users[0]], -(-num_bytes // fragment[1])
            parts.append(_Part(first_use, devices, fragment, tuple(names), share, frozenset(same_users)))
    parts.sort(key=lambda part: (-part.first_use, part.devices, part.fragment))
    return tuple(
        ParameterGroup(
            index, part.devices, part.blocks, part.num_bytes, tuple(sorted(part.slices)), part.fragment
        )
        for index, part in enumerate(_join_small(parts))
    )


@dataclass(frozen=True)
class _Part:
    """A group in the making; `first_use`: position in the order of the first slice that uses it."""

    first_use: int
    devices: tuple[int, ...]
    fragment: tuple[int, int]
    blocks: tuple[tuple[str, int], ...]
    num_bytes: int
    slices: frozenset[int]


def _fragment_holders(users: list[Slice]) -> list[tuple[tuple[int, int], tuple[int, ...]]]:
    """Who holds each of the finest common fragments of parameters that these slices use: [((i, n), devices
    ascending)].
    """
    count = lcm(*(piece.tp for piece in users))
    holders: list[set[int]] = [set() for _ in range(count)]
    for piece in users:
        width = count // piece.tp
        for shard in range(piece.tp):
            for fragment in range(shard * width, (shard + 1) * width):
                holders[fragment].update(piece.devices[shard :: piece.tp])
    return [((fragment, count), tuple(sorted(devices))) for fragment, devices in enumerate(holders)]


def _join_small(parts: list[_Part]) -> list[_Part]:
    """Join each part that is too small with the next ones of the same devices; it then waits for the last of
    them.
    """
    joined: list[_Part] = []
    waiting: dict[tuple[tuple[int, ...], tuple[int, int]], _Part] = {}
    for part in parts:
        key = (part.devices, part.fragment)
        earlier = waiting.pop(key, None)
        if earlier is not None:
            part = replace(
                part,
                blocks=earlier.blocks + part.blocks,
                num_bytes=earlier.num_bytes + part.num_bytes,
                slices=earlier.slices | part.slices,
            )
        if part.num_bytes < MIN_SUM_BYTES:
            waiting[key] = part
        else:
            joined.append(part)
    joined.extend(waiting.values())
    joined.sort(key=lambda part: (-part.first_use, part.devices, part.fragment))
    return joined
