"""Parameter groups: which parameters are summed together, over which devices, when each sum can start, and
how it is made.

A group is summed and gathered in ranges of equal or unequal sizes, padded or each by itself, inside of nodes
and then between them, or as a sum of all of it (`with_ways`). The gradient of a matrix may be gathered as
what it is made of (`gathered_matrices`): a holder's share is all that it looks up or maps of the matrix in a
step, and shares are padded to the largest, so that one gather of a fixed size does for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import ceil, inf, lcm
from operator import attrgetter
from typing import NamedTuple

from spindle_cli.account.types import ParameterGroup
from spindle_cli.costs.links import (
    Spread,
    by_node_s,
    per_node,
    spread_all_gather_s,
    spread_all_reduce_s,
)
from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.parameters import BlockUse, MatrixGradient, Summing, blocks_of, is_padded
from spindle_cli.costs.shares import cuts_by_share
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.profile.types import Matrix, MetaOp
from spindle_cli.units import GIB, KIB, MIB

# Sizes of a sum to choose from, each twice the one before, and one that takes its links' full bandwidth.
LEAST_SUM_BYTES, MOST_SUM_BYTES = 64 * KIB, 64 * MIB
LARGE_SUM_BYTES = GIB


# Ends the key of what tensor parallelism leaves whole.
WHOLE = " (whole)"
# Ends the key of what is not trained.
FROZEN = " (frozen)"


class ParameterBlock(NamedTuple):
    """Parameters that are always used together: a key, a block of it, and their bytes, unsplit. Trained ones,
    or others where devices share these out.

    `split`: whether tensor parallelism gives each device of a group its part of them; else all hold them
    whole. `sharding`: what the devices that hold them share out, the same wherever the block is used.
    `is_gathered`: of one matrix whose gradient is made of what its devices gather.
    """

    key: str
    block: int
    num_bytes: int
    split: bool = True
    sharding: Sharding = Sharding.OPTIMIZER
    is_trained: bool = True
    is_gathered: bool = False


# (MetaOp name, index of the op in it) -> the parameters that the op uses and trains, or that are shared out,
# neighbouring glue included.
ParameterUses = Mapping[tuple[str, int], Sequence[ParameterBlock]]


def planned_parameters(
    metaops: Iterable[MetaOp], sharding: ShardingOf
) -> dict[tuple[str, int], tuple[ParameterBlock, ...]]:
    """Which parameters each op trains, and which others are shared out, as far as a profile or a plan knows:
    a block an op, and one of what tensor parallelism leaves whole, its glue's parameters included.

    A runtime that knows the parameters themselves gives `link` its own.
    """
    return {
        (metaop.name, op): tuple(
            block for use in blocks_of(metaop, op) for block in _planned_blocks(use, sharding)
        )
        for metaop in metaops
        for op in range(metaop.num_ops)
    }


def _planned_blocks(use: BlockUse, sharding: ShardingOf) -> Iterator[ParameterBlock]:
    """Give the trained parameters of a block, and those that are not trained where they are shared out."""
    key, number, is_split = use.block
    if use.is_gathered:
        yield ParameterBlock(key, number, round(use.num_bytes), False, Sharding.NONE, is_gathered=True)
        return
    level = use.level(sharding)
    name = key if is_split else f"{key}{WHOLE}"
    is_split = is_split and not use.is_whole
    if num_bytes := round(use.trained_bytes):
        yield ParameterBlock(name, number, num_bytes, is_split, level)
    if level.is_fetched and (num_bytes := round(use.frozen_bytes)):
        yield ParameterBlock(f"{name}{FROZEN}", number, num_bytes, is_split, level, is_trained=False)


def parameter_groups(
    slices: Sequence[SliceShape],
    order: Sequence[int],
    uses: ParameterUses,
    cluster: Cluster,
    gradient_bytes_per_param: float,
    run_in: Sequence[frozenset[int]] | None = None,
) -> tuple[ParameterGroup, ...]:
    """Group all used parameters by the devices that hold them and by when their gradients are complete.

    Groups come in the order in which they are complete: in the backward pass of the first slice, in `order`,
    that uses them, from its last op to its first. What is complete one after the other on the same devices is
    summed together until it is worth a sum (`sum_bytes`); but what is summed in each pass, op by op. What is
    to be shared out stays whole where some of its devices run some of the slices alone that others run, too;
    of what is not trained there is no group then.

    Args:
        order: of all slices, the last one that runs backward first.
        gradient_bytes_per_param: bytes of gradients that are summed for each byte of parameters.
        run_in: where the slices are of several plans that run in turn, the plans that run each slice's task:
            only what the same plans add to is summed together.
    """
    position = {index: place for place, index in enumerate(order)}
    holders = _Holders(slices, cluster)
    parts: list[_Part] = []
    for (users, sharding, last_ops, is_trained, matrix), names in _used_alike(slices, order, uses).items():
        first, first_op, _ = users[0]
        num_bytes = sum(names.values())
        first_ops = {index: op for index, op, _ in users}
        for fragment in holders.of(tuple((index, is_split) for index, _, is_split in users)):
            share = -(-num_bytes // fragment.count)
            when = (-position[first], -first_op)
            plans = _plans_of(first_ops, run_in)
            replica_groups = _replica_groups(fragment, users, slices) if sharding.is_by_pass else ()
            may = (
                not sharding.is_by_pass
                or len(replica_groups) == 1
                or (len(replica_groups) > 1 and sharding.is_fetched)
            )
            if not (may or is_trained):
                continue
            shared_out = (sharding, dict(last_ops)) if may else _ALONE
            part = _Part(when, fragment, list(names), share, dict(first_ops), plans, *shared_out, is_trained)
            part.replica_groups = replica_groups if may and len(replica_groups) > 1 else ()
            part.is_alone = matrix is not None
            parts.append(part)
    parts.sort(key=_when)
    width = gradient_bytes_per_param
    return tuple(part.group(index, width) for index, part in enumerate(_join_small(parts, width)))


def _replica_groups(
    fragment: _Fragment, users: Iterable[_User], slices: Sequence[SliceShape]
) -> tuple[tuple[int, ...], ...]:
    """The replica groups among the devices that hold some parameters. A replica group runs the same slices
    that use them, so that it can gather and sum together in each of their passes; there are none where any
    slice runs on some devices of a replica group only, or on one alone.
    """
    return replica_groups_among(
        [frozenset(fragment.devices).intersection(slices[index].devices) for index, *_ in users]
    )


def replica_groups_among(run_on: Sequence[Set[int]]) -> tuple[tuple[int, ...], ...]:
    """Sets of devices that have none in common, each ascending, by their first ones; none where any have
    some in common and are not the same, or one has no two devices.

    Args:
        run_on: the devices of each slice that uses some parameters, as far as they hold these.
    """
    replica_groups = sorted({tuple(sorted(devices)) for devices in run_on})
    num_devices = len(set().union(*replica_groups))
    is_apart = sum(map(len, replica_groups)) == num_devices and all(
        len(replica_group) > 1 for replica_group in replica_groups
    )
    return tuple(replica_groups) if is_apart else ()


def _plans_of(slices: Iterable[int], run_in: Sequence[frozenset[int]] | None) -> frozenset[int]:
    """The plans that run any of some slices' tasks."""
    return frozenset() if run_in is None else frozenset[int]().union(*(run_in[index] for index in slices))


def sum_bytes(devices: Sequence[int], cluster: Cluster) -> int:
    """Bytes from which a sum over these devices is worth its latency: the least that moves at half the speed
    of a large one, from 64 KiB to 64 MiB.
    """
    return _worth_a_sum(per_node(devices, cluster), cluster)


def _worth_a_sum(spread: Spread, cluster: Cluster) -> int:
    num_bytes = LEAST_SUM_BYTES
    if spread.num_devices < 2:
        return num_bytes
    large_s_per_byte = spread_all_reduce_s(LARGE_SUM_BYTES, spread, cluster) / LARGE_SUM_BYTES
    while num_bytes < MOST_SUM_BYTES:
        if spread_all_reduce_s(num_bytes, spread, cluster) <= 2 * num_bytes * large_s_per_byte:
            break
        num_bytes *= 2
    return num_bytes


# A slice that uses some parameters: its index, the first of its ops that does, whether it has parts of them.
_User = tuple[int, int, bool]
# Who uses some parameters, what is shared out of them, where they are gathered or summed in each pass also
# the last op of each slice that uses them, whether they are trained, and of what is gathered its name.
_Alike = tuple[tuple[_User, ...], Sharding, tuple[tuple[int, int], ...], bool, str | None]
_ALONE: tuple[Sharding, dict[int, int]] = (Sharding.OPTIMIZER, {})  # not shared out pass by pass


@dataclass(slots=True)
class _BlockUsers:
    """The slices that use a block of parameters, and how.

    Attributes:
        num_bytes: the most that any op uses of it.
        by_slice: of each slice that uses it, by its index.
        sharding: what its devices share out.
        last_ops: of each slice the last op that uses it, where it is gathered or summed in each pass.
    """

    num_bytes: int = 0
    by_slice: dict[int, _User] = field(default_factory=dict)
    sharding: Sharding = Sharding.OPTIMIZER
    last_ops: dict[int, int] = field(default_factory=dict)
    is_trained: bool = True
    is_gathered: bool = False

    def add(self, index: int, op: int, block: ParameterBlock) -> None:
        """Note that an op of a slice uses the block."""
        self.num_bytes = max(self.num_bytes, block.num_bytes)
        self.is_trained = self.is_trained and block.is_trained
        self.is_gathered = self.is_gathered or block.is_gathered
        self.sharding = block.sharding
        if block.sharding.is_by_pass:
            self.last_ops[index] = op
        _, first_op, is_split = self.by_slice.get(index, (index, op, True))
        self.by_slice[index] = index, first_op, is_split and block.split

    def how(self, key: str) -> _Alike:
        """How the block with this key is used: what is the same of those that are summed together."""
        users, last_ops = tuple(self.by_slice.values()), tuple(self.last_ops.items())
        return users, self.sharding, last_ops, self.is_trained, key if self.is_gathered else None


def _used_alike(
    slices: Sequence[SliceShape], order: Sequence[int], uses: ParameterUses
) -> dict[_Alike, dict[tuple[str, int], int]]:
    """Parameters that the same ops are the first to use, in the same way, with their bytes."""
    users: dict[tuple[str, int], _BlockUsers] = {}
    for index in order:
        slice_ = slices[index]
        for op in range(*slice_.ops):
            for block in uses[slice_.metaop, op]:
                name = block.key, block.block
                of_block = users.get(name)
                if of_block is None:
                    of_block = users[name] = _BlockUsers()
                of_block.add(index, op, block)
    alike: dict[_Alike, dict[tuple[str, int], int]] = {}
    for name, of_block in users.items():
        alike.setdefault(of_block.how(name[0]), {})[name] = of_block.num_bytes
    return alike


@dataclass(frozen=True, eq=False)
class _Fragment:
    """The `index`-th of `count` equal parts of some parameters, and who holds it; one object for each.

    `worth`: bytes from which a sum over them is worth its latency.
    """

    index: int
    count: int
    devices: tuple[int, ...]
    worth: int


@dataclass(slots=True)
class _Part:
    """A group in the making.

    Attributes:
        when: it is complete, ascending in the order of the backward pass: less its first slice's position in
            the order, less the first op there.
        num_bytes: of its parameters.
        first_ops: of each slice that adds to it, the first op that does.
        plans: that add to it, where there are several.
        sharding, last_ops, is_trained, replica_groups: see `ParameterGroup`; last ops by slice.
        is_alone: whether nothing is summed with it.
    """

    when: tuple[int, int]
    fragment: _Fragment
    blocks: list[tuple[str, int]]
    num_bytes: int
    first_ops: dict[int, int]
    plans: frozenset[int]
    sharding: Sharding = Sharding.OPTIMIZER
    last_ops: dict[int, int] = field(default_factory=dict)
    is_trained: bool = True
    is_alone: bool = False
    replica_groups: tuple[tuple[int, ...], ...] = ()

    def join(self, later: _Part) -> None:
        """Add what is complete later."""
        self.when = later.when
        self.blocks += later.blocks
        self.num_bytes += later.num_bytes
        for index, op in later.first_ops.items():
            self.first_ops[index] = min(op, self.first_ops.get(index, op))

    def group(self, index: int, width: float) -> ParameterGroup:
        """The finished group; `width`: bytes of gradients for each of parameters."""
        slices = tuple(sorted(self.first_ops))
        return ParameterGroup(
            index=index,
            devices=self.fragment.devices,
            blocks=tuple(self.blocks),
            num_bytes=round(width * self.num_bytes) if self.is_trained else 0,
            parameter_bytes=self.num_bytes,
            slices=slices,
            first_ops=tuple(self.first_ops[slice_] for slice_ in slices),
            fragment=(self.fragment.index, self.fragment.count),
            last_ops=tuple(self.last_ops[slice_] for slice_ in slices) if self.last_ops else (),
            sharding=self.sharding,
            replica_groups=self.replica_groups,
            is_trained=self.is_trained,
        )


_when = attrgetter("when")


class _Holders:
    """Who holds each of the finest common fragments of parameters that some slices use."""

    def __init__(self, slices: Sequence[SliceShape], cluster: Cluster) -> None:
        self._slices = slices
        self._cluster = cluster
        self._found: dict[tuple[tuple[int, bool], ...], list[_Fragment]] = {}
        self._fragments: dict[tuple[int, int, tuple[int, ...]], _Fragment] = {}
        self._worth: dict[Spread, int] = {}

    def of(self, users: tuple[tuple[int, bool], ...]) -> list[_Fragment]:
        """Fragments of parameters of which the slices `users` use parts, or all."""
        if users not in self._found:
            slices = [(self._slices[index], self._slices[index].tp if split else 1) for index, split in users]
            count = lcm(*(parts for _, parts in slices))
            holders: list[set[int]] = [set() for _ in range(count)]
            for slice_, parts in slices:
                width = count // parts
                for fragment in range(count):
                    holders[fragment].update(slice_.devices[fragment // width :: parts])
            self._found[users] = [
                self._fragment(index, count, tuple(sorted(devices))) for index, devices in enumerate(holders)
            ]
        return self._found[users]

    def _fragment(self, index: int, count: int, devices: tuple[int, ...]) -> _Fragment:
        key = (index, count, devices)
        if key not in self._fragments:
            spread = per_node(devices, self._cluster)
            if spread not in self._worth:
                self._worth[spread] = _worth_a_sum(spread, self._cluster)
            self._fragments[key] = _Fragment(index, count, devices, self._worth[spread])
        return self._fragments[key]


def _join_small(parts: Sequence[_Part], width: float) -> list[_Part]:
    """Join each part that is too small with the next ones of the same devices and plans; it then waits for
    the last. What is summed in each pass stays as it is: an op's own is there only while the op runs.
    """
    joined = [part for part in parts if part.sharding.is_by_pass or part.is_alone]
    waiting: dict[tuple[_Fragment, frozenset[int], Sharding], _Part] = {}
    for part in parts:
        if part.sharding.is_by_pass or part.is_alone:
            continue
        alike = (part.fragment, part.plans, part.sharding)
        open_part = waiting.get(alike)
        if open_part is None:
            waiting[alike] = open_part = part
        else:
            open_part.join(part)
        if width * open_part.num_bytes >= part.fragment.worth:
            joined.append(waiting.pop(alike))
    joined.extend(waiting.values())
    joined.sort(key=_when)
    return joined


# By nodes some devices need two communicators more, each with more than half a GiB of every device: their
# sums and gathers have to take so much less of a step together.
_WORTH_S = 0.01


def with_ways(
    groups: Iterable[ParameterGroup],
    weights: Sequence[int],
    cluster: Cluster,
    *,
    sharded: bool,
    by_node: bool = True,
) -> tuple[ParameterGroup, ...]:
    """Groups with the weights of their devices, where these differ, and the fastest way of each collective.

    Args:
        weights: of each device of the cluster; none: all ranges are equal.
        sharded: devices share optimizer state.
        by_node: something may go by nodes.
    """
    chosen = [_with_weights(group, weights, cluster) if weights else group for group in groups]
    if not sharded or cluster.talks_by != "nccl":
        return tuple(chosen)
    of_devices: dict[tuple[int, ...], list[int]] = {}
    for place, group in enumerate(chosen):
        if _has_ways(group):
            of_devices.setdefault(group.devices, []).append(place)
    for devices, places in of_devices.items():
        ways = _Ways(devices, cluster)
        nodes = ways.nodes_worth([chosen[place] for place in places]) if by_node else ()
        for place in places:
            chosen[place] = ways.fastest(chosen[place], nodes)
    return tuple(chosen)


def _with_weights(group: ParameterGroup, weights: Sequence[int], cluster: Cluster) -> ParameterGroup:
    group_weights = tuple(weights[device] for device in group.devices)
    is_whole = group.is_gathered or group.sharding is Sharding.NONE
    if is_whole or len(set(group_weights)) == 1:
        return group
    spread = per_node(group.devices, cluster)
    return replace(
        group,
        weights=group_weights,
        pads_sum=is_padded(group.num_bytes, group_weights, spread, cluster),
        pads_gather=is_padded(group.parameter_bytes, group_weights, spread, cluster),
    )


def _has_ways(group: ParameterGroup) -> bool:
    """Whether it lies whole on all of its devices, and they share out nothing but the optimizer's state, in
    equal ranges.
    """
    return (
        len(group.devices) > 1
        and group.sharding is Sharding.OPTIMIZER
        and group.is_trained
        and not (group.is_gathered or group.weights)
    )


class _Ways:
    """The ways in which groups of the same devices can be summed and gathered, and what each takes."""

    def __init__(self, devices: tuple[int, ...], cluster: Cluster) -> None:
        self._devices, self._cluster = devices, cluster
        self._spread = per_node(devices, cluster)
        self._seconds: dict[int, tuple[float, float, float]] = {}

    def _of(self, num_bytes: int) -> tuple[float, float, float]:
        """Seconds that so many bytes take summed whole, scattered or gathered at once, and by nodes."""
        if num_bytes not in self._seconds:
            at = num_bytes, self._spread, self._cluster
            by_node = by_node_s(*at) if self._spread.goes_by_node else inf
            self._seconds[num_bytes] = spread_all_reduce_s(*at), spread_all_gather_s(*at), by_node
        return self._seconds[num_bytes]

    def nodes_worth(self, groups: Iterable[ParameterGroup]) -> tuple[tuple[int, ...], ...]:
        """The devices by nodes, where that is worth it for all of the groups together; none where it is not.
        Ranges lie in other places then, whichever way each group goes.
        """
        if not self._spread.goes_by_node:
            return ()
        saved_s = 0.0
        for group in groups:
            for whole_s, at_once_s, by_s in map(self._of, (group.num_bytes, group.parameter_bytes)):
                saved_s += min(whole_s, at_once_s) - min(whole_s, by_s)
        if saved_s < _WORTH_S:
            return ()
        by_node: dict[int, list[int]] = {}
        for device in self._devices:
            by_node.setdefault(self._cluster.node_of[device], []).append(device)
        return tuple(map(tuple, by_node.values()))

    def fastest(self, group: ParameterGroup, nodes: tuple[tuple[int, ...], ...]) -> ParameterGroup:
        """A group, with the faster way of its sum and of its gather."""
        is_whole = [
            whole_s < (by_s if nodes else at_once_s)
            for whole_s, at_once_s, by_s in map(self._of, (group.num_bytes, group.parameter_bytes))
        ]
        if not (nodes or any(is_whole)):
            return group
        return replace(group, sums_whole=is_whole[0], gathers_whole=is_whole[1], nodes=nodes)


@dataclass(frozen=True)
class GatheredMatrix:
    """A matrix under a plan.

    Attributes:
        matrix: as one of its ops uses it.
        devices: that hold it, ascending.
        share_tokens: of the largest share.
    """

    matrix: Matrix
    devices: tuple[int, ...]
    share_tokens: int

    @property
    def way(self) -> Summing:
        """How its gradient is summed."""
        return Summing(self.matrix.way)

    def gradient(self, gradient_bytes_per_param: float) -> MatrixGradient:
        """What the cost of each way to sum the gradient depends on."""
        matrix = self.matrix
        width = matrix.num_bytes // (matrix.outputs * matrix.inputs)
        return MatrixGradient(
            matrix.outputs,
            matrix.inputs,
            self.share_tokens * len(self.devices),
            round(width * gradient_bytes_per_param),
            matrix.factor_width,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that each device has in the end of the gather."""
        gradient = self.gradient(1)
        return gradient.rows_bytes if self.way is Summing.ROWS else gradient.factors_bytes

    @property
    def product_s(self) -> float:
        """Seconds by which each device multiplies longer than if it made the gradient of its own share."""
        if self.way is not Summing.FACTORS or self.matrix.flops_per_s is None:
            return 0.0
        return self.gradient(1).extra_flops(len(self.devices)) / self.matrix.flops_per_s

    @property
    def buffer_bytes(self) -> float:
        """Bytes that each device keeps for it: what is gathered, and while the gradient is made of it a
        copy.
        """
        return 2 * self.num_bytes


def gathered_matrices(
    slices: Sequence[SliceShape],
    by_name: Mapping[str, MetaOp],
    accumulate: int,
    matrices_of: Mapping[str, Sequence[Matrix]] | None = None,
) -> dict[str, GatheredMatrix]:
    """All gathered matrices of a plan, by the name of the parameter.

    Args:
        accumulate: batches in a step.
        matrices_of: by MetaOp, which to look at; None: those that are gathered.
    """
    tokens: dict[str, dict[int, int]] = {}
    first: dict[str, Matrix] = {}
    for slice_ in slices:
        metaop = by_name[slice_.metaop]
        matrices = metaop.gathered if matrices_of is None else matrices_of.get(slice_.metaop, ())
        for matrix in matrices:
            if not slice_.ops[0] <= matrix.op < slice_.ops[1]:
                continue
            first.setdefault(matrix.parameter, matrix)
            of_device = tokens.setdefault(matrix.parameter, {})
            for device, count in _tokens(slice_, matrix):
                of_device[device] = of_device.get(device, 0) + count
    return {
        name: GatheredMatrix(
            first[name], tuple(sorted(tokens_of_device)), accumulate * max(tokens_of_device.values())
        )
        for name, tokens_of_device in tokens.items()
    }


def _tokens(slice_: SliceShape, matrix: Matrix) -> Iterator[tuple[int, int]]:
    """Say for each device of a slice how many tokens its share has in a batch."""
    cuts = cuts_by_share(slice_)
    for position, device in enumerate(slice_.devices):
        share = matrix.tokens / cuts[position // slice_.tp] if cuts[position // slice_.tp] else 0.0
        yield device, matrix.fixed_tokens + ceil(share - 1e-9)
