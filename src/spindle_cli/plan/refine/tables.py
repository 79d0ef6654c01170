"""A planning problem as arrays of numbers, and a plan of it, for compiled loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise, product
from math import gcd, inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spindle_cli.account.device.parts import Keeping, Part, UsesCache, in_blocks
from spindle_cli.costs.beyond_curve import Again, hidden_on, spread_over
from spindle_cli.costs.links import messages_bytes, transfer_s
from spindle_cli.costs.memory import ALLOCATOR_SHARE, UNCOUNTED_SHARE, inner_bytes
from spindle_cli.costs.parameters import Block, blocks_of, optimizer_bytes
from spindle_cli.costs.shares import OpSeconds, share_on_type, times_of
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.plan.cutting.allocations import allocations, degrees_of
from spindle_cli.plan.problem import Point, Problem, make_point, possible_points, with_again
from spindle_cli.plan.search.memory_fallback import selects
from spindle_cli.plan.slices import Slice, rows_of
from spindle_cli.profile.types import MetaOpProfile
from spindle_cli.units import GB

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# An array of records, whose fields compiled code reads by name; numpy's types do not tell them apart.
Records = Any
# Devices, degree of tensor parallelism, devices of each type, and where unequal shares end.
Shape = tuple[int, int, tuple[int, ...], tuple[int, ...]]
# What an option's ops run again, and whether activations of as many of them as hide are moved to host memory
# instead; in the order of `keeping` in the tables.
KEEPING = tuple((again, moves) for moves in (False, True) for again in Again)
NO_MOVING = len(Again)

_INT, _FLOAT = np.int64, np.float64
# Of a MetaOp: its ops, and the first of them in all; its first option, where those go by how they keep
# activations, then by devices; a number that is the same for those that hang together; where its inputs
# begin, who takes its output, and where its sums over shares begin; bytes of a whole batch, behind the last
# op and behind each other. One more row ends all lists.
METAOP = np.dtype(
    [
        *((name, _INT) for name in ("num_ops", "op_from", "option_from", "part", "input_from", "taker_from")),
        ("sum_from", _INT),
        *((name, _FLOAT) for name in ("output_bytes", "inner_bytes")),
    ]
)
# An allocation of a MetaOp with how its ops keep activations (a place in `KEEPING`): a number that is the
# same for equal allocations of the MetaOp; where its types begin in `of_types`, and its shares in `ends`;
# seconds of one op, those of its backward pass that run forward again, and those of its sums over shares that
# these have in them; and the share of its ops whose activations are moved to host memory.
OPTION = np.dtype(
    [
        *((name, _INT) for name in ("devices", "dp", "tp", "keeping", "allocation", "type_from", "end_from")),
        *((name, _FLOAT) for name in ("forward_s", "backward_s", "again_s", "sums_s", "moved")),
    ]
)
# Of an option on one type of device: how many devices; where its ops begin in `op_bytes`; the largest share's
# part of the batch; and seconds of one op of it by itself, with nothing that runs again.
OF_TYPE = np.dtype(
    [
        *((name, _INT) for name in ("devices", "bytes_from")),
        *((name, _FLOAT) for name in ("part", "forward_s", "backward_s")),
    ]
)
# What each op of a MetaOp sums, or gathers, over the shares of its batch: bytes of each; how many of them in
# a forward pass, and in a backward pass.
BATCH_SUM = np.dtype(
    [("is_gather", _INT), *((name, _FLOAT) for name in ("num_bytes", "forward", "backward"))]
)
# Another MetaOp, and whether each op takes what the edge carries.
EDGE = np.dtype([("metaop", _INT), ("of_every", _INT)])
# Of an op on one device of an option: kept from forward to backward; the most of its forward pass; the most
# of its backward pass beyond what it keeps. Where its activations are moved: the same of what it keeps and of
# its backward pass; bytes that are copied, those that they take in host memory, and seconds of a copy.
OP_BYTES = np.dtype(
    [
        (name, _FLOAT)
        for name in ("kept", "forward", "backward", "left", "plain_backward", "moved", "in_host", "copy_s")
    ]
)
# Of an op: where the blocks of its parameters begin, and bytes of a batch's fields.
OP = np.dtype([("block_from", _INT), ("field_bytes", _FLOAT)])
# A block of parameters that an op uses: bytes as this op has them, trained ones and all, and of the
# optimizer's state; and where a run of them ends in `used`, in which ops use one block after the other and as
# much of each.
USED = np.dtype(
    [
        *((name, _INT) for name in ("block", "run_end")),
        *((name, _FLOAT) for name in ("trained", "lasting", "state")),
    ]
)
# A block as a whole: its trained bytes, all, and those of the optimizer's state; whether tensor parallelism
# splits it, whether all ops that use it have as much of it, and how many ops use it.
BLOCK = np.dtype(
    [
        *((name, _FLOAT) for name in ("trained", "lasting", "state")),
        *((name, _INT) for name in ("is_split", "is_alike", "users")),
    ]
)
# Its node, the digit of that in numbers of `among`, and how many network cards it has; its own card in all,
# and whether others have the same; its type, and which of that type's devices it is; bytes for tensors and
# communicators, and those of its node for activations that are moved there.
DEVICE = np.dtype(
    [
        *((name, _INT) for name in ("node", "kind", "cards", "card", "shares_card", "type", "place")),
        *((name, _FLOAT) for name in ("capacity", "in_host")),
    ]
)
# The slowest links among devices of some nodes: inside of one, and between two; numbers of links.
AMONG = np.dtype([("near", _INT), ("far", _INT)])
# What is the same everywhere: how many types of device there are, and how many of `KEEPING`; the fewest
# network cards of a node; how many times as much as tensors take is taken for them; what messages take with
# one more device of the node, and with other nodes; bytes of gradients for each byte of parameters; seconds
# of the optimizer for each byte that it updates; batches of a step; whether devices share the optimizer's
# state; whether all ops that use a block have as much of it.
COMMON = np.dtype(
    [
        *((name, _INT) for name in ("types", "keepings", "cards", "batches", "is_sharded", "are_alike")),
        *((name, _FLOAT) for name in ("filled", "peer_bytes", "outside_bytes", "width", "step_s")),
    ]
)
# By links nodes may be of up to so many kinds: `among` has a row for each set of them.
MOST_KINDS = 6
# By how much more devices on several types may cost than the cheapest allocation that is as fast.
SLACK = 0.15


class Tables(NamedTuple):
    """What does not change in a search.

    Attributes:
        metaops: [M + 1] `METAOP`.
        inputs, takers: `EDGE`, of each MetaOp in turn.
        batch_sums: `BATCH_SUM` of each MetaOp in turn.
        options: [O] `OPTION`.
        of_types: `OF_TYPE` of each option on each type in turn.
        ends: where in the batch shares of options end, from 0.0 to 1.0.
        op_bytes: `OP_BYTES` of ops of MetaOps, for each size of share, degree and way of keeping in turn.
        ops: [G + 1] `OP`, of each MetaOp in turn.
        used: `USED` of each op in turn.
        blocks: [B] `BLOCK`.
        devices: [N] `DEVICE`.
        by_type: [N] numbers of devices, type after type; `type_from`: [T + 1] where each type begins.
        among: `AMONG` of sets of nodes: in a number to the base three, for each kind a digit for none, one or
            several.
        knots: [L, 2, K] of each link sizes of messages, and bytes a second; `latencies_s`: [L].
        common: [1] `COMMON`.
    """

    metaops: Records
    inputs: Records
    takers: Records
    batch_sums: Records
    options: Records
    of_types: Records
    ends: Floats
    op_bytes: Records
    ops: Records
    used: Records
    blocks: Records
    devices: Records
    by_type: Ints
    type_from: Ints
    among: Records
    knots: Floats
    latencies_s: Floats
    common: Records


class Option(NamedTuple):
    """An allocation of a MetaOp with how its ops keep activations. `moved`: the share of them whose
    activations are in host memory.
    """

    metaop: MetaOpProfile
    point: Point
    again: Again
    moved: float
    allocation: int

    def on(self, devices: tuple[int, ...], ops: tuple[int, int] | None = None) -> Slice:
        """Return a slice of ops [first, last), all if None, on as many devices as the allocation takes, that
        has no times yet.
        """
        metaop, point, again, moved, _ = self
        first, last = ops or (0, metaop.num_ops)
        return Slice.model_construct(
            metaop=metaop.name,
            ops=(first, last),
            devices=devices,
            dp=point.dp,
            tp=point.tp,
            rows=point.rows,
            start_s=0.0,
            end_s=0.0,
            recompute=again is not Again.NOTHING,
            selective=again is Again.SELECTIVE,
            offload=spread_over(first, last, moved),
        )

    @property
    def keeping(self) -> int:
        """A place in `KEEPING`."""
        return KEEPING.index((self.again, self.moved > 0))


def tables_of(problem: Problem, options: Sequence[Sequence[Option]]) -> Tables | None:
    """The tables of a problem; None of what they cannot say: nodes of more kinds than `MOST_KINDS`,
    processors that send and receive themselves, what is gathered or summed within passes,
    unequal ranges, experts.

    Args:
        options: `options_of` the problem.
    """
    profile, cluster = problem.profile, problem.cluster
    has_others = (
        cluster.talks_by != "nccl"
        or bool(profile.sharding)
        or bool(profile.shard_weights)
        or any(metaop.num_experts or metaop.gathered for metaop in profile.metaops)
    )
    kinds = _kinds_of_nodes(cluster)
    if has_others or max(kinds) >= MOST_KINDS:
        return None
    metaops, inputs, takers = _metaops(problem, [len(of_metaop) for of_metaop in options])
    ops, used, blocks = _parameters(problem)
    option_rows, of_types, ends, op_bytes = _options(
        [option for of_metaop in options for option in of_metaop], cluster
    )
    by_type = sorted(
        range(cluster.num_devices), key=lambda device: cluster.types.index(cluster.type_of[device])
    )
    among, links = _links(cluster, kinds)
    return Tables(
        metaops=metaops,
        inputs=inputs,
        takers=takers,
        batch_sums=_batch_sums(profile.metaops),
        options=option_rows,
        of_types=of_types,
        ends=ends,
        op_bytes=op_bytes,
        ops=ops,
        used=used,
        blocks=blocks,
        devices=_devices(cluster, kinds, by_type),
        by_type=np.array(by_type),
        type_from=np.array(_begins(problem.devices_of_types)),
        among=among,
        knots=_knots(links),
        latencies_s=np.array([link.latency_s for link in links]),
        common=_common(problem, bool(blocks["is_alike"].all())),
    )


def _metaops(problem: Problem, num_options: Sequence[int]) -> tuple[Records, Records, Records]:
    """MetaOps, their inputs, and who takes what they make; `num_options`: how many options each has."""
    metaops = problem.profile.metaops
    inputs, takers = _inputs_and_takers(metaops)
    rows = zip(
        [*(metaop.num_ops for metaop in metaops), 0],
        _begins(metaop.num_ops for metaop in metaops),
        _begins(num_options),
        [*(problem.part_of[metaop.name] for metaop in metaops), -1],
        _begins(map(len, inputs)),
        _begins(map(len, takers)),
        _begins(len(metaop.batch_sums) for metaop in metaops),
        [*(float(metaop.output_bytes) for metaop in metaops), 0.0],
        [*(float(inner_bytes(metaop)) for metaop in metaops), 0.0],
        strict=True,
    )
    edges = [np.array([edge for edges_of in lists for edge in edges_of], EDGE) for lists in (inputs, takers)]
    return np.array(list(rows), METAOP), edges[0], edges[1]


def _inputs_and_takers(
    metaops: Sequence[MetaOpProfile],
) -> tuple[list[list[tuple[int, bool]]], list[list[tuple[int, bool]]]]:
    """The numbers of the MetaOps that each takes in, and of those that take what it makes, with whether each
    of the taker's ops does.
    """
    index = {metaop.name: number for number, metaop in enumerate(metaops)}
    inputs: list[list[tuple[int, bool]]] = [[] for _ in metaops]
    takers: list[list[tuple[int, bool]]] = [[] for _ in metaops]
    for number, metaop in enumerate(metaops):
        for name in metaop.inputs:
            of_every = name in metaop.inputs_of_every_op
            inputs[number].append((index[name], of_every))
            takers[index[name]].append((number, of_every))
    return inputs, takers


def options_of(problem: Problem, slices: Sequence[Slice]) -> list[list[Option]]:
    """List the options of each MetaOp, by how they keep activations, then by devices.

    Args:
        slices: whose allocations are among them.
    """
    used: dict[str, dict[Shape, Point]] = {}
    for slice_ in slices:
        point = replace(problem.point_of(keeping_all(slice_)), rows=slice_.rows)
        used.setdefault(slice_.metaop, {})[shape_of(point)] = point
    options = []
    for metaop in problem.profile.metaops:
        points = sorted(_points(metaop, problem.cluster, used.get(metaop.name, {})), key=shape_of)
        hidden = [_hidden_share(point, metaop, problem.cluster) for point in points]
        options.append(
            [
                Option(
                    metaop, with_again(point, metaop, again), again, moves * hidden[allocation], allocation
                )
                for again, moves in KEEPING
                for allocation, point in enumerate(points)
                if again is not Again.SELECTIVE or (selects(metaop) and point.tp == 1)
                if not moves or hidden[allocation] > 0
            ]
        )
    return options


def _hidden_share(point: Point, metaop: MetaOpProfile, cluster: Cluster) -> float:
    """Share of the ops on an allocation whose copies to host memory hide (`hidden_on`)."""
    if not cluster.knows_host_links:
        return 0.0
    links = [
        cluster.host_link_of_type[kind]
        for kind, count in zip(cluster.types, point.of_types, strict=True)
        for _ in range(count // point.tp)
    ]
    slice_ = Option(metaop, point, Again.NOTHING, 0.0, 0).on(tuple(range(point.num_devices)))
    return hidden_on(slice_, metaop, OpSeconds(point.forward_s, point.backward_s), links)


def _samples_of(point: Point, metaop: MetaOpProfile) -> list[int]:
    """List the samples of each share."""
    rows = point.rows or [share * metaop.batch_size // point.dp for share in range(point.dp + 1)]
    return [end - begin for begin, end in pairwise(rows)]


def _largest_of_types(
    point: Point, samples: Sequence[int], cluster: Cluster
) -> Iterator[tuple[str, int, int]]:
    """Give for each type how many devices an allocation has of it, and the samples of their largest share."""
    share = 0
    for kind, count in zip(cluster.types, point.of_types, strict=True):
        type_samples = samples[share : share + count // point.tp]
        share += len(type_samples)
        yield kind, count, max(type_samples, default=0)


def shape_of(point: Point) -> Shape:
    """What tells an allocation of a MetaOp from others."""
    return point.num_devices, point.tp, point.of_types, point.rows or ()


def keeping_all(slice_: Slice) -> Slice:
    """A copy of a slice that recomputes nothing and moves no activations to host memory."""
    return slice_.model_copy(update={"recompute": False, "selective": False, "offload": ()})


def _points(metaop: MetaOpProfile, cluster: Cluster, used: dict[Shape, Point]) -> Iterable[Point]:
    """Allocations of ops that recompute nothing, of every degree of tensor parallelism; on several types also
    those that are used.
    """
    if not cluster.is_mixed:
        return [
            replace(make_point(point, metaop), rows=rows_of(metaop.batch_size, point.dp))
            for point in possible_points(metaop, cluster)
        ]
    points: dict[Point, None] = {}
    for least_tp in degrees_of(metaop, cluster):
        try:
            points |= dict.fromkeys(allocations(metaop, cluster, least_tp))
        except NoPlanError:  # an allocation of this degree needs more devices than there are
            continue
    worth_having = {shape_of(point): point for point in _worth_having(list(points))}
    return (used | worth_having).values()


def _worth_having(points: Sequence[Point]) -> Iterator[Point]:
    """Give those on one type of device, and those on several that none as fast beats by more than `SLACK`, by
    prices of the types' seconds: what an op takes at least of each by itself.
    """
    on_one = [point for point in points if _is_on_one_type(point)]
    alone_s = [
        min((point.num_devices * point.op_s for point in on_one if point.of_types[number]), default=inf)
        for number in range(len(points[0].of_types))
    ]
    least = inf
    for point in sorted(points, key=lambda point: point.op_s):
        worth = point.op_s * sum(
            count / seconds for count, seconds in zip(point.of_types, alone_s, strict=True)
        )
        if _is_on_one_type(point) or worth <= (1 + SLACK) * least:
            yield point
        least = min(least, worth)


def _is_on_one_type(point: Point) -> bool:
    """Tell whether all devices of an allocation are of one type."""
    return sum(map(bool, point.of_types)) == 1


def _batch_sums(metaops: Sequence[MetaOpProfile]) -> Records:
    rows = [
        (batch_sum.kind == "gather", batch_sum.num_bytes, batch_sum.forward, batch_sum.backward)
        for metaop in metaops
        for batch_sum in metaop.batch_sums
    ]
    return np.array(rows, BATCH_SUM)


def _options(options: Sequence[Option], cluster: Cluster) -> tuple[Records, Records, Floats, Records]:
    """Options, what they have of each type, where their shares end, and bytes of their ops."""
    uses_cache = UsesCache()
    rows: list[tuple[float, ...]] = []
    of_types: list[tuple[float, ...]] = []
    ends: list[float] = []
    end_from: dict[tuple[int, ...], int] = {}
    op_bytes: list[tuple[float, ...]] = []
    bytes_from: dict[tuple[str, float, int, int, Link | None], int] = {}
    for option in options:
        metaop, point, _, _, allocation = option
        samples = _samples_of(point, metaop)
        cuts = tuple(accumulate(samples, initial=0))
        # Equal parts of other batches are the same cuts.
        divisor = gcd(*cuts)
        parts = tuple(end // divisor for end in cuts)
        if parts not in end_from:
            end_from[parts] = len(ends)
            ends += (end / metaop.batch_size for end in cuts)
        shape = point.num_devices, point.dp, point.tp, option.keeping, allocation
        places = len(cluster.types) * len(rows), end_from[parts]
        again_s = point.again * point.forward_s
        times_s = point.forward_s, point.backward_s, again_s, _sums_s(option, cluster)
        rows.append((*shape, *places, *times_s, option.moved))
        for kind, count, largest in _largest_of_types(point, samples, cluster):
            if not count:
                of_types.append((0, 0, 0.0, 0.0, 0.0))
                continue
            link = cluster.host_link_of_type[kind] if option.moved else None
            key = metaop.name, largest, point.tp, option.keeping, link
            if key not in bytes_from:
                bytes_from[key] = len(op_bytes)
                op_bytes += _bytes_of_ops(option, metaop.batch_size / largest, link, uses_cache)
            share_op = share_on_type(metaop, kind, largest, point.tp) if cluster.is_mixed else None
            share_s = (point.forward_s, point.backward_s - again_s) if share_op is None else share_op[:2]
            of_types.append((count, bytes_from[key], largest / metaop.batch_size, *share_s))
    return (
        np.array(rows, OPTION),
        np.array(of_types, OF_TYPE),
        np.array(ends),
        np.array(op_bytes, OP_BYTES),
    )


def _sums_s(option: Option, cluster: Cluster) -> float:
    """Seconds of an op's sums over shares that its curve or shares have in them."""
    if not option.metaop.batch_sums:
        return 0.0
    devices: list[int] = []
    for kind, count in zip(cluster.types, option.point.of_types, strict=True):
        devices += [device for device, device_type in enumerate(cluster.type_of) if device_type == kind][
            :count
        ]
    op = times_of(option.metaop, option.on(tuple(devices)), cluster)
    assert op is not None, "options are of shares that are known"
    return op.communication_s


def _bytes_of_ops(
    option: Option, shares: float, link: Link | None, uses_cache: UsesCache
) -> Iterator[tuple[float, ...]]:
    """Give `OP_BYTES` of each op on a device with a share of which the batch has so many. `link`: over which
    activations are moved.
    """
    metaop, point, again, *_ = option
    slice_ = option._replace(moved=0.0).on(tuple(range(point.num_devices)))
    part = Part(0, slice_, {metaop.name: metaop}, shares, (), is_handed_on=True, uses_cache=uses_cache)
    keeping = part.keeping[0]
    for count, needs in part.needs:
        running = needs.backward
        if again is not Again.NOTHING:
            running = part.while_recomputed(needs, keeping, running)
        row = [part.kept_of(needs, keeping), needs.forward, running]
        if link is not None:
            row += part.kept_of(needs, Keeping.OUTPUTS), needs.backward, needs.kept
            row += in_blocks(needs.kept), transfer_s(round(needs.kept), link)
        for _ in range(count):
            yield (*row, *[0.0] * (len(OP_BYTES.names or ()) - len(row)))


def _parameters(problem: Problem) -> tuple[Records, Records, Records]:
    """Ops, what each uses, and the blocks of all."""
    number_of: dict[Block, int] = {}
    of_blocks: list[set[tuple[float, float, float]]] = []
    of_ops: list[list[tuple[int, float, float, float]]] = []
    fields: list[float] = []
    for metaop in problem.profile.metaops:
        kept = optimizer_bytes(metaop, problem.profile)
        state = kept.state_per_param + kept.whole_state_per_param
        for op in range(metaop.num_ops):
            fields.append(metaop.field_bytes.get(op, 0))
            of_ops.append([])
            for use in blocks_of(metaop, op):
                number = number_of.setdefault(use.block, len(number_of))
                if number == len(of_blocks):
                    of_blocks.append(set())
                num_bytes = (use.trained_bytes, use.num_bytes, use.trained_bytes * state)
                of_blocks[number].add(num_bytes)
                of_ops[-1].append((number, *num_bytes))
    ops = np.array(list(zip(_begins(map(len, of_ops)), [*fields, 0.0], strict=True)), OP)
    rows = list(chain.from_iterable(of_ops))
    users = Counter(number for number, *_ in rows)
    # Where ops have more or less of the same parameters, most is summed.
    blocks = [
        (*max(amounts), block[2], len(amounts) == 1, users[number])
        for number, (block, amounts) in enumerate(zip(number_of, of_blocks, strict=True))
    ]
    ends = _ends_of_runs(rows, [block[2] for block in number_of])
    used = np.array([(row[0], end, *row[1:]) for row, end in zip(rows, ends, strict=True)], USED)
    return ops, used, np.array(blocks, BLOCK)


def _ends_of_runs(rows: Sequence[tuple[int, float, float, float]], is_split: Sequence[bool]) -> list[int]:
    """Return where the run of each row ends: blocks one after the other, all split or none, and as many bytes
    of each.

    Args:
        rows: number and bytes of the blocks that ops use in turn.
        is_split: of each block, whether tensor parallelism splits it.
    """
    ends = [len(rows)] * len(rows)
    for at in range(len(rows) - 2, -1, -1):
        (block, *num_bytes), (following, *following_bytes) = rows[at], rows[at + 1]
        goes_on = following == block + 1 and is_split[following] == is_split[block]
        ends[at] = ends[at + 1] if goes_on and following_bytes == num_bytes else at + 1
    return ends


def _kinds_of_nodes(cluster: Cluster) -> list[int]:
    """Number the nodes so that those with equal links have the same number."""
    if cluster.has_one_kind_of_links:
        return [0] * len(cluster.node_sizes)
    return [number for number, group in enumerate(cluster.nodes) for _ in range(group.count)]


def _devices(cluster: Cluster, kinds: Sequence[int], by_type: Sequence[int]) -> Records:
    first_of: dict[tuple[int, int], int] = {}
    for device, card in enumerate(cluster.card_of):
        first_of.setdefault(card, device)
    devices_of = Counter(cluster.card_of)
    place_of: dict[int, int] = {}
    seen = Counter[str]()
    for device in by_type:
        place_of[device] = seen[cluster.type_of[device]]
        seen[cluster.type_of[device]] += 1
    rows = [
        (
            node,
            3 ** kinds[node],
            cluster.cards_of_node[node],
            first_of[cluster.card_of[device]],
            devices_of[cluster.card_of[device]] > 1,
            cluster.types.index(cluster.type_of[device]),
            place_of[device],
            cluster.usable_bytes[device],
            inf if (limit := cluster.host_memory_bytes[node]) is None else limit,
        )
        for device, node in enumerate(cluster.node_of)
    ]
    return np.array(rows, DEVICE)


def _links(cluster: Cluster, kinds: Sequence[int]) -> tuple[Records, list[Link]]:
    """The slowest links among each set of nodes, and these links."""
    nodes_of = [
        [node for node, kind in enumerate(kinds) if kind == number] for number in range(max(kinds) + 1)
    ]
    links: dict[Link, int] = {}
    among = []
    for digits in product(range(3), repeat=len(nodes_of)):
        # The first kind has the lowest digit.
        some = [
            node for digit, nodes in zip(reversed(digits), nodes_of, strict=True) for node in nodes[:digit]
        ]
        slowest = cluster.links_among(some) if some else cluster.links
        both = slowest.intra_node, slowest.inter_node
        among.append(tuple(links.setdefault(link, len(links)) for link in both))
    return np.array(among, AMONG), list(links)


def _knots(links: Sequence[Link]) -> Floats:
    """Sizes of messages with the links' bandwidths."""
    curves = [
        [(size, speed * GB) for size, speed in link.curve or ((1.0, link.bandwidth_gb_per_s),)]
        for link in links
    ]
    length = max(map(len, curves))
    padded = [curve + curve[-1:] * (length - len(curve)) for curve in curves]
    return np.ascontiguousarray(np.array(padded, np.float64).transpose(0, 2, 1))


def _common(problem: Problem, are_alike: bool) -> Records:
    profile, cluster = problem.profile, problem.cluster
    held_up = profile.calibration.held_up if profile.calibration else 0.0
    row = (
        len(cluster.types),
        len(KEEPING) if cluster.knows_host_links else NO_MOVING,
        min(cluster.cards_of_node),
        profile.accumulate,
        profile.optimizer_state_sharded,
        are_alike,
        # As `Need.at` has it.
        (1 + UNCOUNTED_SHARE) * (1 + (0.0 if cluster.is_cpu else ALLOCATOR_SHARE)),
        messages_bytes(1, outside=False),
        messages_bytes(0, outside=True),
        profile.gradient_bytes_per_param,
        profile.optimizer_s_per_byte * (1 + held_up),
    )
    return np.array([row], COMMON)


def _begins(lengths: Iterable[int]) -> list[int]:
    """Where lists of these lengths begin in one array, and where the last one ends."""
    return list(accumulate(lengths, initial=0))
