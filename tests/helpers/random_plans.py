"""Random valid plans: random MetaGraphs, cut into slices on varying devices with varying dp and tp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from hypothesis import strategies as st

from spindle_cli.account.activations import edges_between
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.plan.sets.restrict import restricted
from spindle_cli.plan.slices import equal_rows
from spindle_cli.plan.types import Plan, PlanMetaOp, PlannedSet, Predicted, ProfileRef, Slice, Wave
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.types import CurvePoint, ShareTime, WorkloadRef

_BATCHES = (4, 6, 8, 12)
_OP_S = 0.25  # forward and backward of an op together, on any devices: the schedule stays easy to make


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """1 to 8 devices on 1 to 3 equal nodes."""
    nodes, per_node = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 2), (2, 3), (3, 2), (2, 4)]))
    return Cluster(
        name="random",
        nodes=(NodeGroup(count=nodes, devices=per_node, device="a800-80gb", memory_gib=80),),
        links=Links(
            intra_node=Link(latency_us=8, bandwidth_gb_per_s=160),
            inter_node=Link(latency_us=14, bandwidth_gb_per_s=46),
        ),
    )


@st.composite
def metagraphs(draw: st.DrawFn) -> tuple[PlanMetaOp, ...]:
    """1 to 5 MetaOps of one task; some share parameters, some take an input at every op."""
    batch_size = draw(st.sampled_from(_BATCHES))
    metaops: list[PlanMetaOp] = []
    for index in range(draw(st.integers(1, 5))):
        earlier = [metaop.name for metaop in metaops]
        inputs = draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3)) if earlier else []
        metaops.append(
            PlanMetaOp(
                name=f"task/part{index}",
                task="task",
                num_ops=draw(st.integers(1, 4)),
                batch_size=batch_size,
                inputs=tuple(inputs),
                inputs_of_every_op=tuple(name for name in inputs if draw(st.booleans())),
                parameters=draw(st.sampled_from([None, "shared", "other"])),
                param_bytes_per_op=draw(st.sampled_from([0, 400_000, 4_000_000])),
                trainable_fraction=draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
                activation_bytes_per_op=batch_size * 1000,
                output_bytes=batch_size * 500,
                inner_output_bytes=draw(st.sampled_from([None, batch_size * 1000])),
                batch_sums=draw(
                    st.sampled_from([(), (), (BatchSum(num_bytes=1032, forward=2, backward=2),)])
                ),
            )
        )
    return tuple(metaops)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan that passes `check`, each slice a wave of its own; of one task, all forward and then backward,
    or of one or two with passes in any order.
    """
    cluster = draw(clusters())
    if draw(st.booleans()):
        tasks = draw(st.sampled_from([("a",), ("a", "b")]))
        metaops = tuple(_of_task(each, task) for task in tasks for each in draw(metagraphs()))
        slices, metaops = draw(placed(cluster, metaops))
        slices, metaops, counts = draw(cut_anew(cluster, slices, metaops))
        plan = plan_on(cluster, metaops, draw(passes_apart(cluster, metaops, slices)), counts)
    else:
        slices, metaops = draw(placed(cluster, draw(metagraphs())))
        plan = plan_on(cluster, metaops, slices)
    return plan.model_copy(update=draw(trainings()))


@st.composite
def cut_anew(
    draw: st.DrawFn, cluster: Cluster, slices: Sequence[Slice], metaops: Sequence[PlanMetaOp]
) -> tuple[list[Slice], tuple[PlanMetaOp, ...], dict[str, int]]:
    """The same with some tasks cut into 2 or 3 micro-batches, and some slices into shares that need not be
    equal, each on devices of its own; and how many micro-batches they are.
    """
    counts: dict[str, int] = {}
    for task in dict.fromkeys(metaop.task for metaop in metaops):
        own = [metaop for metaop in metaops if metaop.task == task]
        possible = [count for count in (2, 3) if own[0].batch_size % count == 0]
        if draw(st.booleans()) and possible and not any(metaop.batch_sums for metaop in own):
            counts[task] = draw(st.sampled_from(possible))
    by_name = {metaop.name: metaop for metaop in metaops}
    found: list[Slice] = []
    used: dict[str, set[tuple[int, int]]] = {}
    for piece in slices:
        metaop = by_name[piece.metaop]
        count = counts.get(metaop.task, 1)
        by_rows = draw(st.booleans())
        if count == 1 and not by_rows:
            found.append(piece)
            continue
        size = metaop.batch_size // count
        for number in range(count):
            possible = _degrees(size, cluster, any_number=by_rows)
            dp, tp = draw(
                st.sampled_from([each for each in possible if each[1] == 1 or not metaop.batch_sums])
            )
            rows = draw(_offsets(size, dp)) if by_rows else equal_rows(size, dp)
            if count == 1 and rows == equal_rows(size, dp):  # of which the curve may know nothing
                found.append(piece)
                continue
            order = draw(st.permutations(range(cluster.num_devices)))
            devices = _groups_in_nodes(order, dp, tp, cluster)
            update = {"dp": dp, "tp": tp, "devices": devices, "micro_batch": number, "micro_batches": count}
            found.append(piece.model_copy(update=update | {"rows": rows if by_rows else None}))
            used.setdefault(metaop.name, set()).add((max(b - a for a, b in pairwise(rows)), tp))
    times = {"forward_s": _OP_S / 4, "backward_s": 3 * _OP_S / 4, "source": "estimated"}
    timed = tuple(
        metaop.model_copy(
            update={
                "shares": tuple(
                    ShareTime(samples=samples, tp=tp, **times)
                    for samples, tp in sorted(used.get(metaop.name, ()))
                )
            }
        )
        for metaop in metaops
    )
    return found, timed, counts


@st.composite
def _offsets(draw: st.DrawFn, size: int, dp: int) -> tuple[int, ...]:
    """Of `dp` shares of so many samples, as different as can be."""
    inner = st.lists(st.integers(1, max(1, size - 1)), min_size=dp - 1, max_size=dp - 1, unique=True)
    return (0, *sorted(draw(inner)), size)


@st.composite
def passes_apart(
    draw: st.DrawFn, cluster: Cluster, metaops: Sequence[PlanMetaOp], slices: Sequence[Slice]
) -> list[Slice]:
    """The same slices in order of start, their passes in any order that gives each what it takes."""
    before = {(index, False): set[tuple[int, bool]]() for index in range(len(slices))}
    before |= {(index, True): {(index, False)} for index in range(len(slices))}
    for edge in edges_between(slices, {metaop.name: metaop for metaop in metaops}):
        before[edge.consumer, False].add((edge.producer, False))
        before[edge.producer, True].add((edge.consumer, True))
    free_s = [0.0] * cluster.num_devices
    times: dict[tuple[int, bool], tuple[float, float]] = {}
    while len(times) < len(before):
        ready = [each for each, others in before.items() if each not in times and others <= times.keys()]
        chosen = draw(st.sampled_from(ready))
        piece = slices[chosen[0]]
        ended_s = [times[other][1] for other in before[chosen]]
        start_s = max([*ended_s, *(free_s[device] for device in piece.devices)])
        end_s = start_s + piece.num_ops * _OP_S * (0.75 if chosen[1] else 0.25)
        times[chosen] = start_s, end_s
        for device in piece.devices:
            free_s[device] = end_s
    found = [
        piece.model_copy(
            update={
                "start_s": times[index, False][0],
                "end_s": times[index, False][1],
                "backward_start_s": times[index, True][0],
                "backward_end_s": times[index, True][1],
            }
        )
        for index, piece in enumerate(slices)
    ]
    return sorted(found, key=lambda piece: piece.start_s)


@st.composite
def placed(
    draw: st.DrawFn, cluster: Cluster, metaops: Sequence[PlanMetaOp]
) -> tuple[list[Slice], tuple[PlanMetaOp, ...]]:
    """Slices of some MetaOps in order of start, and the MetaOps with the points that these use besides."""
    free_s = [0.0] * cluster.num_devices
    ended_s: dict[str, float] = {}
    slices: list[Slice] = []
    known: list[PlanMetaOp] = []
    for metaop in metaops:
        degrees = {(point.dp, point.tp) for point in metaop.curve}
        ready_s = max((ended_s[name] for name in metaop.inputs), default=0.0)
        first = 0
        while first < metaop.num_ops:
            last = draw(st.integers(first + 1, metaop.num_ops))
            possible = _degrees(metaop.batch_size, cluster)
            if metaop.batch_sums:
                possible = [(dp, tp) for dp, tp in possible if tp == 1]
            dp, tp = draw(st.sampled_from(possible))
            order = draw(st.permutations(range(cluster.num_devices)))
            devices = _groups_in_nodes(order, dp, tp, cluster)
            start_s = max(ready_s, *(free_s[device] for device in devices))
            ready_s = start_s + (last - first) * _OP_S
            for device in devices:
                free_s[device] = ready_s
            slices.append(
                Slice(
                    metaop=metaop.name,
                    ops=(first, last),
                    devices=devices,
                    dp=dp,
                    tp=tp,
                    start_s=start_s,
                    end_s=ready_s,
                )
            )
            degrees.add((dp, tp))
            first = last
        ended_s[metaop.name] = ready_s
        known.append(metaop.model_copy(update={"curve": _curve(degrees)}))
    return sorted(slices, key=lambda piece: piece.start_s), tuple(known)


@st.composite
def plans_with_sets(draw: st.DrawFn) -> Plan:
    """A plan of two tasks, which may share parameters, with plans for some sets of them: what is left of it
    for these tasks, or one of their own.
    """
    cluster = draw(clusters())
    metaops = tuple(_of_task(each, task) for task in ("a", "b") for each in draw(metagraphs()))
    whole, metaops = draw(placed(cluster, metaops))
    chosen = draw(
        st.lists(st.sampled_from([("a",), ("b",), ("a", "b")]), min_size=1, max_size=3, unique=True)
    )
    sets = []
    for tasks in chosen:
        own = [metaop for metaop in metaops if metaop.task in tasks]
        if draw(st.booleans()):
            slices = list(restricted(whole, tasks, {metaop.name: metaop for metaop in metaops}))
        else:
            slices, known = draw(placed(cluster, own))
            metaops = tuple({**{each.name: each for each in metaops}, **{k.name: k for k in known}}.values())
        alone = plan_on(cluster, metaops, slices)
        sets.append(
            PlannedSet(tasks=tasks, share=1 / len(chosen), predicted=alone.predicted, waves=alone.waves)
        )
    plan = plan_on(cluster, metaops, whole)
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    return Plan(**{**fields, "task_sets": tuple(sets), **draw(trainings())})


def _of_task(metaop: PlanMetaOp, task: str) -> PlanMetaOp:
    def renamed(name: str) -> str:
        return f"{task}/{name.partition('/')[2]}"

    inputs = {key: tuple(map(renamed, getattr(metaop, key))) for key in ("inputs", "inputs_of_every_op")}
    return metaop.model_copy(update={"name": renamed(metaop.name), "task": task, **inputs})


@st.composite
def trainings(draw: st.DrawFn) -> dict[str, object]:
    """Numbers of the train settings: of float32 or bfloat16, in steps of 1 to 4 batches."""
    is_wide = draw(st.booleans())
    return {
        "accumulate": draw(st.integers(1, 4)),
        "optimizer_state_sharded": draw(st.booleans()),
        "clips_gradients": draw(st.booleans()),
        "scales_losses": draw(st.booleans()),
        "updates_by_parts": draw(st.booleans()),
        "gradient_bytes_per_param": 2.0 if is_wide else 1.0,
        "update_bytes_per_param": 4.0 if is_wide else 0.0,
        "optimizer_s_per_byte": draw(st.sampled_from([0.0, 1e-9])),
    }


def _degrees(batch_size: int, cluster: Cluster, *, any_number: bool = False) -> list[tuple[int, int]]:
    """(dp, tp) that a batch can be run on; with `any_number` also of shares that are not equal."""
    return [
        (dp, tp)
        for dp in range(1, cluster.num_devices + 1)
        for tp in (1, 2, 4)
        if dp <= sum(size // tp for size in cluster.node_sizes)
        if batch_size % dp == 0 or (any_number and dp <= batch_size)
    ]


def _groups_in_nodes(order: Sequence[int], dp: int, tp: int, cluster: Cluster) -> tuple[int, ...]:
    """`dp` groups of `tp` devices of one node each, in the order in which they are complete."""
    open_groups: dict[int, list[int]] = {}
    chosen: list[int] = []
    for device in order:
        group = open_groups.setdefault(cluster.node_of[device], [])
        group.append(device)
        if len(group) == tp:
            chosen += group
            group.clear()
    return tuple(chosen[: dp * tp])


def _curve(degrees: set[tuple[int, int]]) -> tuple[CurvePoint, ...]:
    points = [
        CurvePoint(
            num_devices=dp * tp,
            dp=dp,
            tp=tp,
            forward_s=_OP_S / 4,
            backward_s=3 * _OP_S / 4,
            source="estimated",
        )
        for dp, tp in degrees
    ]
    return tuple(sorted(points, key=lambda point: (point.num_devices, point.tp)))


def plan_on(
    cluster: Cluster,
    metaops: tuple[PlanMetaOp, ...],
    slices: list[Slice],
    micro_batches: Mapping[str, int] | None = None,
) -> Plan:
    """A plan of these slices, each a wave of its own, that predicts nothing but its end; on several types of
    device, with optimizer state that is shared out.
    """
    end_s = max(piece.last_s for piece in slices)
    apart = any(piece.backward_s is not None for piece in slices)
    return Plan(
        schema_="spindle.plan/2" if apart else "spindle.plan/1",
        strategy="spindle",
        workload=WorkloadRef(name="random", fingerprint="sha256:" + "0" * 64, source="tests:build"),
        profile=ProfileRef(sha256="sha256:" + "0" * 64),
        cluster=cluster,
        optimizer_state_sharded=cluster.is_mixed,
        micro_batches=dict(micro_batches or {}),
        predicted=Predicted(
            iteration_s=end_s,
            compute_s=end_s,
            lower_bound_s=0.0,
            peak_memory_bytes=(0,) * cluster.num_devices,
        ),
        metaops=metaops,
        waves=tuple(
            Wave(index=index, start_s=piece.start_s, end_s=piece.end_s, slices=(piece,))
            for index, piece in enumerate(slices)
        ),
    )
