"""A planning problem as arrays of numbers, and a plan of it, for compiled loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spindle_cli.account.device.account import ALLOCATOR_SHARE, UNCOUNTED_SHARE
from spindle_cli.account.device.parts import KnownUses, Part
from spindle_cli.costs.links import messages_bytes
from spindle_cli.costs.memory import inner_bytes
from spindle_cli.costs.parameters import Block, blocks_of, optimizer_bytes
from spindle_cli.costs.recompute_and_offload import Again
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.problem import Problem, make_point, possible_points
from spindle_cli.plan.search.memory_fallback import selects
from spindle_cli.plan.slices import Slice
from spindle_cli.profile.types import CurvePoint, MetaOpProfile
from spindle_cli.units import GB

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# An array of records, whose fields compiled code reads by name; numpy's types do not tell them apart.
Records = Any
# How an option keeps activations, in the order of `again` in the tables.
KEEPING = (Again.NOTHING, Again.SELECTIVE, Again.ALL)

_INT, _FLOAT = np.int64, np.float64
# Of a MetaOp: its ops, and the first of them in all; its first option, where those go by recomputation, then
# by devices; a number that is the same for those that hang together; where its inputs begin, and who takes
# its output; bytes of a whole batch, behind the last op and behind each other. One more row ends all lists.
METAOP = np.dtype(
    [
        *((name, _INT) for name in ("num_ops", "op_from", "option_from", "part", "input_from", "taker_from")),
        *((name, _FLOAT) for name in ("output_bytes", "inner_bytes")),
    ]
)
# An allocation of a MetaOp with what its ops recompute (a place in `KEEPING`): seconds of one op, and where
# its ops begin in `op_bytes`.
OPTION = np.dtype(
    [
        *((name, _INT) for name in ("devices", "dp", "tp", "again", "bytes_from")),
        *((name, _FLOAT) for name in ("forward_s", "backward_s")),
    ]
)
# Another MetaOp, and whether each op takes what the edge carries.
EDGE = np.dtype([("metaop", _INT), ("of_every", _INT)])
# Of an op of an option on one device: kept from forward to backward; the most of its forward pass; the most
# of its backward pass beyond what it keeps.
OP_BYTES = np.dtype([(name, _FLOAT) for name in ("kept", "forward", "backward")])
# Of an op: where the blocks of its parameters begin, and bytes of a batch's fields.
OP = np.dtype([("block_from", _INT), ("field_bytes", _FLOAT)])
# A block of parameters that an op uses: bytes as this op has them, trained ones and all, and of the
# optimizer's state.
USED = np.dtype([("block", _INT), *((name, _FLOAT) for name in ("trained", "lasting", "state"))])
# A block as a whole: its trained bytes, all, and those of the optimizer's state; whether tensor parallelism
# splits it, and whether all ops that use it have as much of it.
BLOCK = np.dtype(
    [*((name, _FLOAT) for name in ("trained", "lasting", "state")), ("is_split", _INT), ("is_alike", _INT)]
)
# Its node, its network card in all, and bytes for tensors and communicators.
DEVICE = np.dtype([("node", _INT), ("card", _INT), ("capacity", _FLOAT)])
# What is the same everywhere: network cards of a node; latencies inside of nodes and between them; how many
# times as much as tensors take is taken for them; what messages take with one more device of the node, and
# with other nodes; bytes of gradients for each byte of parameters; seconds of the optimizer for each byte
# that it updates; batches of a step; whether devices share the optimizer's state.
COMMON = np.dtype(
    [
        *((name, _INT) for name in ("cards", "batches", "is_sharded")),
        *((name, _FLOAT) for name in ("near_s", "far_s", "filled", "peer_bytes", "outside_bytes")),
        *((name, _FLOAT) for name in ("width", "step_s")),
    ]
)


class Tables(NamedTuple):
    """What does not change in a search.

    Attributes:
        metaops: [M + 1] `METAOP`.
        inputs, takers: `EDGE`, of each MetaOp in turn.
        options: [O] `OPTION`.
        op_bytes: `OP_BYTES` of each op of each option.
        ops: [G + 1] `OP`, of each MetaOp in turn.
        used: `USED` of each op in turn.
        blocks: [B] `BLOCK`.
        devices: [N] `DEVICE`.
        knots: [2, 2, K] sizes of messages, and bytes a second, inside of nodes and between them.
        common: [1] `COMMON`.
    """

    metaops: Records
    inputs: Records
    takers: Records
    options: Records
    op_bytes: Records
    ops: Records
    used: Records
    blocks: Records
    devices: Records
    knots: Floats
    common: Records


class Option(NamedTuple):
    """An allocation of a MetaOp with what its ops recompute."""

    metaop: MetaOpProfile
    point: CurvePoint
    again: Again


def tables_of(problem: Problem) -> Tables | None:
    """The tables of a problem; None of what they cannot say: devices or links of several kinds, processors
    that send and receive themselves, sets of tasks, what is gathered or summed within passes, unequal
    ranges, experts.
    """
    profile, cluster = problem.profile, problem.cluster
    metaops = profile.metaops
    has_others = (
        cluster.is_mixed
        or not cluster.has_one_kind_of_nodes
        or not cluster.has_one_kind_of_links
        or cluster.talks_by != "nccl"
        or not problem.orders_passes
        or bool(profile.sharding)
        or bool(profile.shard_weights)
        or any(metaop.num_experts or metaop.gathered or metaop.batch_sums for metaop in metaops)
    )
    if has_others:
        return None
    options = options_of(problem)
    flat = [option for own in options for option in own]
    index = {metaop.name: number for number, metaop in enumerate(metaops)}
    inputs: list[list[tuple[int, bool]]] = [[] for _ in metaops]
    takers: list[list[tuple[int, bool]]] = [[] for _ in metaops]
    for number, metaop in enumerate(metaops):
        for name in metaop.inputs:
            of_every = name in metaop.inputs_of_every_op
            inputs[number].append((index[name], of_every))
            takers[index[name]].append((number, of_every))
    rows = zip(
        [*(metaop.num_ops for metaop in metaops), 0],
        _begins(metaop.num_ops for metaop in metaops),
        _begins(map(len, options)),
        [*(problem.part_of[metaop.name] for metaop in metaops), -1],
        _begins(map(len, inputs)),
        _begins(map(len, takers)),
        [*(float(metaop.output_bytes) for metaop in metaops), 0.0],
        [*(float(inner_bytes(metaop)) for metaop in metaops), 0.0],
        strict=True,
    )
    ops, used, blocks = _parameters(problem)
    return Tables(
        metaops=np.array(list(rows), METAOP),
        inputs=np.array([edge for own in inputs for edge in own], EDGE),
        takers=np.array([edge for own in takers for edge in own], EDGE),
        options=_options(flat),
        op_bytes=_op_bytes(flat),
        ops=ops,
        used=used,
        blocks=blocks,
        devices=_devices(cluster),
        knots=_knots(cluster),
        common=_common(problem),
    )


def options_of(problem: Problem) -> list[list[Option]]:
    """Of each MetaOp, by recomputation, then by devices and seconds."""
    found = []
    for metaop in problem.profile.metaops:
        points = sorted(
            possible_points(metaop, problem.cluster), key=lambda point: (point.num_devices, point.tp)
        )
        found.append(
            [
                Option(metaop, point, again)
                for again in KEEPING
                for point in points
                if again is not Again.SELECTIVE or (selects(metaop) and point.tp == 1)
            ]
        )
    return found


def _options(options: Sequence[Option]) -> Records:
    begins = _begins(option.metaop.num_ops for option in options)
    rows = []
    for (metaop, curve_point, again), begin in zip(options, begins, strict=False):
        point = make_point(curve_point, metaop, again)
        shape = point.num_devices, point.dp, point.tp, KEEPING.index(again), begin
        rows.append((*shape, point.forward_s, point.backward_s))
    return np.array(rows, OPTION)


def _op_bytes(options: Sequence[Option]) -> Records:
    known = KnownUses()
    return np.array([row for option in options for row in _bytes_of_ops(option, known)], OP_BYTES)


def _bytes_of_ops(option: Option, known: KnownUses) -> Iterator[tuple[float, float, float]]:
    """Of each op: kept, the most forward, and the most backward beyond what is kept."""
    metaop, point, again = option
    piece = Slice.model_construct(
        metaop=metaop.name,
        ops=(0, metaop.num_ops),
        devices=tuple(range(point.num_devices)),
        dp=point.dp,
        tp=point.tp,
        start_s=0.0,
        end_s=0.0,
        recompute=again is not Again.NOTHING,
        selective=again is Again.SELECTIVE,
    )
    part = Part(0, piece, {metaop.name: metaop}, point.dp, (), is_handed_on=True, known=known)
    keeping = part.keeping[0]
    for count, needs in part.needs:
        running = needs.backward
        if again is not Again.NOTHING:
            running = part.while_recomputed(needs, keeping, running)
        for _ in range(count):
            yield part.kept_of(needs, keeping), needs.forward, running


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
    used = np.array([row for own in of_ops for row in own], USED)
    # Where ops have more or less of the same parameters, most is summed.
    blocks = [
        (*max(amounts), block[2], len(amounts) == 1)
        for block, amounts in zip(number_of, of_blocks, strict=True)
    ]
    return ops, used, np.array(blocks, BLOCK)


def _devices(cluster: Cluster) -> Records:
    number_of = {card: number for number, card in enumerate(dict.fromkeys(cluster.card_of))}
    cards = [number_of[card] for card in cluster.card_of]
    return np.array(list(zip(cluster.node_of, cards, cluster.usable_bytes, strict=True)), DEVICE)


def _knots(cluster: Cluster) -> Floats:
    """Sizes of messages with the links' bandwidths."""
    curves = [
        [(size, speed * GB) for size, speed in link.curve or ((1.0, link.bandwidth_gb_per_s),)]
        for link in (cluster.links.intra_node, cluster.links.inter_node)
    ]
    length = max(map(len, curves))
    padded = [curve + curve[-1:] * (length - len(curve)) for curve in curves]
    return np.ascontiguousarray(np.array(padded, np.float64).transpose(0, 2, 1))


def _common(problem: Problem) -> Records:
    profile, cluster = problem.profile, problem.cluster
    held_up = profile.calibration.held_up if profile.calibration else 0.0
    row = (
        min(cluster.cards_of_node),
        profile.accumulate,
        profile.optimizer_state_sharded,
        cluster.links.intra_node.latency_s,
        cluster.links.inter_node.latency_s,
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
