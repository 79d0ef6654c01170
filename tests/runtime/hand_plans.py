"""Plans for a traced workload from placements alone, in the order in which they run."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from helpers.plans import SELECTIVE, cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.activations import slice_edges
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.groups import replica_groups_among
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.sets.restrict import restricted
from spindle_cli.plan.slices import equal_rows
from spindle_cli.plan.types import Plan, PlannedSet, Predicted, Slice, Wave
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.checking.matrices import Matrices
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, ShareTime, WorkloadRef
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import MetaOp, WorkloadGraph

# (MetaOp, ops, devices), and the degree of tensor parallelism where it is not 1
Placement = tuple[str, tuple[int, int], tuple[int, ...]] | tuple[str, tuple[int, int], tuple[int, ...], int]

_DEGREES = (2, 4)  # of tensor parallelism that every MetaOp has points for


def place(
    graph: WorkloadGraph,
    num_devices: int,
    placements: Sequence[Placement],
    recompute: Collection[str] = (),
    *,
    selective: bool = False,
    offload: bool = False,
) -> Plan:
    """A valid plan that runs these placements as early as devices and inputs allow; every op takes 1 s.

    `recompute`: the MetaOps that keep no activations; with `selective` they keep what takes longest, and run
    a quarter again. `offload`: of these every other op moves them to host
    memory instead, of the others all.
    """
    metaops = {metaop.name: _profile_of(metaop, graph) for metaop in graph.metaops}
    if selective:
        metaops |= {name: metaops[name].model_copy(update=SELECTIVE) for name in recompute}
    free_s = [0.0] * num_devices
    ended_s: dict[str, float] = {}
    slices = []
    for name, ops, devices, *degree in placements:
        ready_s = max((ended_s[name] for name in metaops[name].inputs), default=0.0)
        start_s = max(ready_s, ended_s.get(name, 0.0), *(free_s[device] for device in devices))
        tp = degree[0] if degree else 1
        again = name in recompute
        piece = slice_of(
            metaops[name], ops, devices, start_s, recompute=again, selective=selective and again, tp=tp
        )
        if offload:
            every = range(*ops, 2)
            moved = tuple((op, op + 1) for op in every) if piece.recompute else (ops,)
            piece = piece.model_copy(update={"offload": moved})
        ended_s[name] = piece.end_s
        for device in devices:
            free_s[device] = piece.end_s
        slices.append(piece)
    slices.sort(key=lambda piece: piece.start_s)
    plan = plan_of(profile_of(*metaops.values()), cluster_of(num_devices), [(piece,) for piece in slices])
    return plan.model_copy(
        update={
            "workload": WorkloadRef(
                name="toy", fingerprint=graph.fingerprint, source="by hand", lengths=graph.lengths
            )
        }
    )


def with_sets(plan: Plan, sets: Mapping[tuple[str, ...], Plan | None]) -> Plan:
    """A plan with plans for sets of tasks, each as frequent as the others: those given, or what is left of it
    for their tasks. What devices hold is worked out for all of them together.
    """
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    made = []
    for tasks, own in sets.items():
        slices = _left_for(plan, tasks) if own is None else own.slices
        end_s = max(piece.last_s for piece in slices)
        predicted = plan.predicted.model_copy(update={"compute_s": end_s, "iteration_s": end_s})
        waves = [
            Wave(index=index, start_s=piece.start_s, end_s=piece.end_s, slices=(piece,))
            for index, piece in enumerate(slices)
        ]
        made.append(PlannedSet(tasks=tasks, share=1 / len(sets), predicted=predicted, waves=tuple(waves)))
    whole = Plan(**{**fields, "task_sets": tuple(made)})
    fitted = [
        each.model_copy(update={"predicted": _with_memory(own)})
        for each, own in zip(made, whole.set_plans.values(), strict=True)
    ]
    return Plan(**{**fields, "predicted": _with_memory(whole), "task_sets": tuple(fitted)})


def _left_for(plan: Plan, tasks: Sequence[str]) -> Sequence[Slice]:
    """What a plan runs for some of its tasks, as early as may be."""
    left = restricted(plan.slices, tasks, plan.by_name)
    if plan.schema_ == "spindle.plan/1":
        return left
    waves = [
        Wave(index=index, start_s=piece.start_s, end_s=piece.end_s, slices=(piece,))
        for index, piece in enumerate(left)
    ]
    return passes_apart(Plan.model_construct(**{**dict(plan), "waves": tuple(waves)}), 0).slices


def passes_apart(plan: Plan, seed: int) -> Plan:
    """The same slices with their passes in any order that gives each what it takes."""
    draw = random.Random(seed)
    before = {(index, False): set[tuple[int, bool]]() for index in range(len(plan.slices))}
    before |= {(index, True): {(index, False)} for index in range(len(plan.slices))}
    for edge in slice_edges(plan):
        before[edge.consumer, False].add((edge.producer, False))
        before[edge.producer, True].add((edge.consumer, True))
    free_s = [0.0] * plan.cluster.num_devices
    times: dict[tuple[int, bool], tuple[float, float]] = {}
    while len(times) < len(before):
        ready = [each for each, others in before.items() if each not in times and others <= times.keys()]
        chosen = draw.choice(ready)
        piece = plan.slices[chosen[0]]
        start_s = max([times[each][1] for each in before[chosen]] + [free_s[d] for d in piece.devices])
        forward_s = 1.0 / 3 * piece.num_ops
        again_s = forward_s if piece.recompute else 0.0
        times[chosen] = start_s, start_s + (2 * forward_s + again_s if chosen[1] else forward_s)
        free_s = [times[chosen][1] if d in piece.devices else free for d, free in enumerate(free_s)]
    slices = []
    for index, piece in enumerate(plan.slices):
        (start_s, end_s), backward_s = times[index, False], times[index, True]
        apart = {"backward_start_s": backward_s[0], "backward_end_s": backward_s[1]}
        slices.append(piece.model_copy(update={"start_s": start_s, "end_s": end_s, **apart}))
    slices.sort(key=lambda piece: piece.start_s)
    waves = tuple(
        Wave(index=index, start_s=piece.start_s, end_s=piece.end_s, slices=(piece,))
        for index, piece in enumerate(slices)
    )
    end_s = max(piece.last_s for piece in slices)
    predicted = plan.predicted.model_copy(update={"compute_s": end_s, "iteration_s": end_s})
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    made = {"schema_": "spindle.plan/2", "predicted": predicted, "waves": waves}
    whole = Plan(**{**fields, **made})
    return whole.model_copy(update={"predicted": _with_memory(whole)})


def in_micro_batches(plan: Plan, counts: Mapping[str, int], seed: int, *, uneven: bool = False) -> Plan:
    """The same slices for each of a task's micro-batches, with as many shares as divide it, on the devices of
    the whole one in another order; their passes in any order that gives each what it takes. `uneven`: also
    those of whole batches, as far as they have several shares, and in shares of any size.
    """
    draw = random.Random(seed)
    slices: list[Slice] = []
    used: dict[str, set[tuple[int, int]]] = {}
    for piece in plan.slices:
        metaop = plan.by_name[piece.metaop]
        count = counts.get(metaop.task, 1)
        if count == 1 and not (uneven and piece.dp > 1):
            slices.append(piece)
            continue
        size = metaop.batch_size // count
        for number in range(count):
            dp = max(n for n in range(1, piece.dp + 1) if size % n == 0 or (uneven and n < size))
            shares = [piece.devices[share * piece.tp :][: piece.tp] for share in range(piece.dp)]
            devices = [device for share in draw.sample(shares, dp) for device in share]
            rows = (0, *sorted(draw.sample(range(1, size), dp - 1)), size) if uneven else equal_rows(size, dp)
            update = {"dp": dp, "devices": tuple(devices), "micro_batch": number, "micro_batches": count}
            slices.append(piece.model_copy(update=update | {"rows": rows if uneven else None}))
            used.setdefault(metaop.name, set()).add((max(b - a for a, b in pairwise(rows)), piece.tp))
    times = {"forward_s": 1 / 3, "backward_s": 2 / 3, "source": "measured"}
    metaops = tuple(
        metaop.model_copy(
            update={
                "shares": tuple(
                    ShareTime(samples=samples, tp=tp, **times)
                    for samples, tp in sorted(used.get(metaop.name, ()))
                )
            }
        )
        for metaop in plan.metaops
    )
    waves = tuple(
        Wave(index=index, start_s=piece.start_s, end_s=piece.end_s, slices=(piece,))
        for index, piece in enumerate(slices)
    )
    update = {"metaops": metaops, "micro_batches": dict(counts), "waves": waves}
    return passes_apart(Plan.model_construct(**{**dict(plan), **update}), seed)


def slow_between_nodes(num_devices: int) -> Cluster:
    """Two nodes with so slow a link between them that nothing inside of one matters."""
    cluster = cluster_of(num_devices, devices_per_node=num_devices // 2)
    inter = Link(latency_us=1, bandwidth_gb_per_s=1e-6)
    return cluster.changed(
        links=Links(intra_node=Link(latency_us=0, bandwidth_gb_per_s=100), inter_node=inter)
    )


def shared_out(plan: Plan, sharding: Sharding, *, everywhere: bool = False) -> Plan:
    """The same plan, of version 2, with all parameters shared out so whose slices run on the same devices, or
    on those of several replica groups; `everywhere`: with all, whether that is a plan or not.
    """
    devices: dict[str, set[frozenset[int]]] = {}
    for piece in plan.slices:
        key = plan.by_name[piece.metaop].parameters or piece.metaop
        devices.setdefault(key, set()).add(frozenset(piece.devices))
    keys = [
        key
        for key, found in devices.items()
        if everywhere
        or len(found) == 1
        or (sharding.is_fetched and len(replica_groups_among(list(found))) > 1)
    ]
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    more = {"optimizer_state_sharded": True, "sharding": dict.fromkeys(keys, sharding)}
    made = Plan(**{**fields, **more})
    return made.model_copy(update={"predicted": _with_memory(made)})


def weighted(plan: Plan, weights: tuple[int, ...]) -> Plan:
    """The same plan, in which devices have parts of what they share out in proportion to these."""
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    made = Plan(**{**fields, "optimizer_state_sharded": True, "shard_weights": weights})
    return made.model_copy(update={"predicted": _with_memory(made)})


def gathering(plan: Plan, graph: WorkloadGraph, train: TrainSettings) -> Plan:
    """The same plan with the gradients of all matrices gathered that can gain by it."""
    matrices = Matrices.find(graph, train)
    metaops = []
    for metaop in plan.metaops:
        of_graph = graph.by_name[metaop.name]
        ops = [graph.tasks[metaop.task].ops[index] for index in of_graph.ops]
        gathered = matrices.of_ops(metaop.task, ops, lambda _: None)
        metaops.append(metaop.model_copy(update={"gathered": gathered}))
    assert any(metaop.gathered for metaop in metaops), "the case is of such matrices"
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    made = Plan(**{**fields, "metaops": tuple(metaops), "accumulate": train.accumulate})
    return made.model_copy(update={"predicted": _with_memory(made)})


def with_experts(plan: Plan, count: int) -> Plan:
    """The same plan, in which ops that are split have so many experts."""
    split = {piece.metaop for piece in plan.slices if piece.tp > 1}
    return plan.model_copy(
        update={
            "metaops": tuple(
                metaop.model_copy(update={"num_experts": count if metaop.name in split else 0})
                for metaop in plan.metaops
            )
        }
    )


def on_types(plan: Plan, types: Sequence[str]) -> Plan:
    """The same plan on as many devices of each of several types, which are equally fast."""
    size = plan.cluster.num_devices // len(types)
    nodes = tuple(NodeGroup(count=1, devices=size, device=device, memory_gib=4.0) for device in types)
    metaops = tuple(
        metaop.model_copy(
            update={
                key: tuple(
                    entry.model_copy(update={"device": device})
                    for device in types
                    for entry in getattr(metaop, key)
                )
                for key in ("curve", "shares")
            }
        )
        for metaop in plan.metaops
    )
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    cluster = plan.cluster.changed(nodes=nodes)
    made = Plan(**{**fields, "cluster": cluster, "metaops": metaops, "optimizer_state_sharded": True})
    return made.model_copy(update={"predicted": _with_memory(made)})


def _with_memory(plan: Plan) -> Predicted:
    needs = device_memory(plan.metaops, plan.slices, plan.cluster, plan, turn=plan.turn)
    peaks = tuple(need.total_bytes for need in needs)
    return plan.predicted.model_copy(update={"peak_memory_bytes": peaks})


def whole(graph: WorkloadGraph, devices: tuple[int, ...]) -> list[Placement]:
    """Every MetaOp on all of the devices, coupled ones on the first."""
    return [
        (metaop.name, (0, len(metaop.ops)), devices[:1] if metaop.coupled else devices)
        for metaop in graph.metaops
    ]


def _profile_of(metaop: MetaOp, graph: WorkloadGraph) -> MetaOpProfile:
    batch_size = graph.tasks[metaop.task].task.batch_size
    ops = [graph.tasks[metaop.task].ops[index] for index in metaop.ops]
    sums = (BatchSum(num_bytes=72, forward=1, backward=1),) if any(op.talks for op in ops) else ()
    found = metaop_of(
        metaop.name,
        len(metaop.ops),
        {dp: 1.0 for dp in range(1, batch_size + 1) if batch_size % dp == 0},
        batch_size=batch_size,
        inputs=metaop.inputs,
        inputs_of_every_op=metaop.inputs_of_every_op,
        parameters=metaop.parameters,
        parameter_blocks=metaop.parameter_blocks,
    )
    split = tuple(
        CurvePoint(
            num_devices=tp * point.dp,
            dp=point.dp,
            tp=tp,
            forward_s=1 / 3,
            backward_s=2 / 3,
            source="measured",
        )
        for tp in _DEGREES
        for point in found.curve
    )
    curve = sorted((*found.curve, *split), key=lambda point: (point.num_devices, point.tp))
    return found.model_copy(update={"curve": tuple(curve), "batch_sums": sums})
