"""When nothing fits: which device lacks how much, what takes it, and the smallest changes that would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spindle_cli.account.device_memory import DeviceMemory
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import MAX_MEMORY_GIB, Cluster, NodeGroup
from spindle_cli.files.sharding import ShardingOf
from spindle_cli.plan.best.request import PlanRequest
from spindle_cli.plan.best.sharding import shardings_to_try
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.cutting.on_all import on_all_devices
from spindle_cli.plan.placing.placement import BALANCED, WEIGHTS
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.schedule import Candidate
from spindle_cli.plan.search.evaluate import best_placed
from spindle_cli.plan.search.memory_fallback import largest_fallback
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.strategies.baselines import optimus, sequential
from spindle_cli.plan.strategies.spindle import spindle
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile
from spindle_cli.units import GIB, format_bytes


@dataclass(frozen=True)
class Change:
    """A change to the inputs, in words, and the inputs with it."""

    words: str
    profile: Profile
    cluster: Cluster


def no_plan_as_requested(profile: Profile, cluster: Cluster, request: PlanRequest) -> NoPlanError:
    """What to raise where nothing that is asked for fits, with the way out."""
    said: list[str] = []
    if request.micro_batches:
        counts = request.micro_batches.items()
        said.append("these micro-batches: " + ", ".join(f"{task} in {count}" for task, count in counts))
    if request.sharding:
        levels = request.sharding.items()
        said.append("this sharding: " + ", ".join(f"{level} of {key}" for key, level in levels))
    if not said and cluster.is_mixed:
        others = ", in micro-batches or with parameters shared out" if request.gives_up else ""
        return NoPlanError(
            f"no plan fits the memory of {cluster.name!r}, neither with every op recomputed nor with layers "
            f"split{others}",
            hint="Plan for more devices, or for devices with more memory.",
        )
    if not said:
        return no_fit(profile, cluster)
    way_out = None
    if request.sharding and not cluster.is_mixed:
        way_out = way_out_by_sharding(profile, cluster)
    return NoPlanError(
        f"no plan fits {cluster.name!r} with {' and '.join(said)}",
        hint=f"It would fit with {way_out}."
        if way_out is not None
        else "Plan without --micro-batches and --shard: what memory asks for is found, or what is missing.",
    )


def no_fit(profile: Profile, cluster: Cluster) -> NoPlanError:
    """The error for a workload that fits the cluster in no way: also not with tensor parallelism or
    recomputation.
    """
    device, need = _least_overflow(profile, cluster)
    capacity, memory = cluster.fill_bytes[device], cluster.memory_bytes[device]
    of_which = "" if capacity == memory else f" (of {format_bytes(memory)}, some are left free)"
    taken = ", ".join(f"{what} {format_bytes(size)}" for what, size in need.parts.items() if size)
    fitting = [change.words for change in _smallest_that_fit(profile, cluster)]
    return NoPlanError(
        f"no plan fits {cluster.name!r}: in the one that comes closest, device {device} needs "
        f"{format_bytes(need.total_bytes)} and has {format_bytes(capacity)}{of_which}, "
        f"{format_bytes(need.total_bytes - capacity)} too little ({taken})",
        hint="Tried, and each would fit by itself: " + "; ".join(fitting) + "."
        if fitting
        else "Tried in vain: 8 times the devices, 1/8 of the batch, 8 times the memory, layers split by 8.",
    )


def _least_overflow(profile: Profile, cluster: Cluster) -> tuple[int, DeviceMemory]:
    """The fullest device, of the plan whose fullest device lacks least, with all activations recomputed.

    Raises:
        NoPlanError: sizes that no device of any memory holds.
    """
    roomy = cluster.with_ample_memory()
    overflows: list[tuple[int, int, DeviceMemory]] = []
    for fallback in (MemoryFallback(), largest_fallback(profile)):
        problem = make_problem(profile, roomy, fallback)
        for candidate in _candidates(problem):
            evaluated = best_placed(problem, candidate, (BALANCED,), 0)
            if evaluated is None:
                continue
            over = [
                (need.total_bytes - capacity, device)
                for device, (need, capacity) in enumerate(
                    zip(evaluated.memory, cluster.fill_bytes, strict=True)
                )
            ]
            excess, device = max(over)
            overflows.append((excess, device, evaluated.memory[device]))
    if not overflows:
        raise NoPlanError(
            f"no plan fits {cluster.name!r}: with the sizes that the profile gives, a device would need more "
            f"than {MAX_MEMORY_GIB} GiB",
            hint="Correct param_bytes_per_op, activation_bytes_per_op and output_bytes in the profile.",
        )
    _, device, need = min(overflows, key=lambda item: item[:2])
    return device, need


def _candidates(problem: Problem) -> Iterator[Candidate]:
    yield sequential(problem)
    yield optimus(problem)
    for candidates in spindle(problem, lower_bound(problem), NO_SEARCH):
        yield from candidates[:3]


def _smallest_that_fit(profile: Profile, cluster: Cluster) -> Iterator[Change]:
    """For each kind of change, the smallest after which some plan fits."""
    for kind in (_shared_state, _more_nodes, _smaller_batches, _tensor_parallelism, _more_memory):
        for change in kind(profile, cluster):
            if fits(change.profile, change.cluster):
                yield change
                break


def fits(profile: Profile, cluster: Cluster) -> bool:
    """Whether some plan fits without giving up anything, or with all activations recomputed.

    Raises:
        NoPlanError: sizes that no device of any memory holds.
    """
    for fallback in (MemoryFallback(), largest_fallback(profile)):
        try:
            problem = make_problem(profile, cluster, fallback)
        except NoPlanError:  # the change itself needs more devices than there are
            return False
        if any(
            best_placed(problem, candidate, (*WEIGHTS[:1], BALANCED), 0) for candidate in _candidates(problem)
        ):
            return True
    return any(fits_shared_out(profile, cluster, sharding) for sharding in shardings_to_try(profile, cluster))


def fits_shared_out(profile: Profile, cluster: Cluster, sharding: ShardingOf) -> bool:
    """Whether a plan that shares parameters out so fits, without giving up anything else, or with all
    activations recomputed.
    """
    for recompute in ({}, largest_fallback(profile).recompute):
        try:
            shared_out = on_all_devices(profile.sharded(sharding), cluster)
            problem = make_problem(shared_out, cluster, MemoryFallback(recompute=recompute))
        except NoPlanError:
            return False
        if best_placed(problem, sequential(problem), (BALANCED,), 0):
            return True
    return False


def way_out_by_sharding(profile: Profile, cluster: Cluster) -> str | None:
    """The options of `spindle plan` by which parameters could be shared out so that a plan fits."""
    for sharding in shardings_to_try(profile, cluster):
        if fits_shared_out(profile, cluster, sharding):
            return " ".join(f"--shard {key}={level}" for key, level in sharding.items())
    return None


def _shared_state(profile: Profile, cluster: Cluster) -> Iterator[Change]:
    """Parameters and gradients are shared out where the optimizer's state is."""
    if not profile.optimizer_state_sharded and cluster.num_devices > 1:
        shared = profile.model_copy(update={"optimizer_state_sharded": True})
        yield Change("`shard_optimizer: true` under `train`, profiled again", shared, cluster)


def _more_nodes(profile: Profile, cluster: Cluster) -> Iterator[Change]:
    last = cluster.nodes[-1]
    total = len(cluster.node_sizes)
    for times in (2, 3, 4, 6, 8):
        count = last.count + (times - 1) * total
        grown = _with_nodes(cluster, (*cluster.nodes[:-1], last.model_copy(update={"count": count})))
        yield Change(f"{grown.num_devices} devices instead of {cluster.num_devices}", profile, grown)


def _more_memory(profile: Profile, cluster: Cluster) -> Iterator[Change]:
    for times in (1.25, 1.5, 2, 3, 4, 6, 8):
        gib = max(cluster.memory_bytes) * times / GIB
        yield Change(f"devices of {gib:.3g} GiB", profile, _with_memory(cluster, times))


def _smaller_batches(profile: Profile, cluster: Cluster) -> Iterator[Change]:
    for divisor in (2, 4, 8):
        metaops = [_with_batch(metaop, divisor) for metaop in profile.metaops]
        if all(metaops):
            smaller = _with_metaops(profile, tuple(metaop for metaop in metaops if metaop is not None))
            yield Change(f"1/{divisor} of every batch", smaller, cluster)


def _tensor_parallelism(profile: Profile, cluster: Cluster) -> Iterator[Change]:
    if any(point.tp > 1 for metaop in profile.metaops for point in metaop.curve):
        return  # what the curves have has been tried
    for tp in (2, 4, 8):
        metaops = tuple(_with_tp(metaop, tp) for metaop in profile.metaops)
        yield Change(
            f"layers profiled with tensor parallelism of {tp}", _with_metaops(profile, metaops), cluster
        )


def _with_batch(metaop: MetaOpProfile, divisor: int) -> MetaOpProfile | None:
    """The MetaOp on a smaller batch, as far as memory goes; None if the batch does not divide."""
    if metaop.batch_size % divisor:
        return None
    batch_size = metaop.batch_size // divisor
    curve = tuple(point for point in metaop.curve if batch_size % point.dp == 0)
    inner = metaop.inner_output_bytes
    return metaop.model_copy(
        update={
            "batch_size": batch_size,
            "curve": curve,
            "activation_bytes_per_op": metaop.activation_bytes_per_op // divisor,
            "memory": tuple(entry.rebatched(1 / divisor) for entry in metaop.memory),
            "field_bytes": {op: size // divisor for op, size in metaop.field_bytes.items()},
            "output_bytes": metaop.output_bytes // divisor,
            "inner_output_bytes": None if inner is None else inner // divisor,
        }
    )


def _with_tp(metaop: MetaOpProfile, tp: int) -> MetaOpProfile:
    """The MetaOp split `tp` ways, as far as memory goes; ops without parameters stay whole."""
    if not metaop.param_bytes_per_op:
        return metaop
    curve = tuple(
        CurvePoint(
            num_devices=point.num_devices * tp,
            dp=point.dp,
            tp=tp,
            forward_s=point.forward_s / tp,
            backward_s=point.backward_s / tp,
            source=point.source,
        )
        for point in metaop.curve
    )
    return metaop.model_copy(update={"curve": curve})


def _with_memory(cluster: Cluster, times: float) -> Cluster:
    return _with_nodes(
        cluster,
        tuple(group.model_copy(update={"memory_gib": group.memory_gib * times}) for group in cluster.nodes),
    )


def _with_nodes(cluster: Cluster, nodes: tuple[NodeGroup, ...]) -> Cluster:
    return cluster.changed(nodes=nodes)


def _with_metaops(profile: Profile, metaops: tuple[MetaOpProfile, ...]) -> Profile:
    return Profile.model_construct(**{**dict(profile), "metaops": metaops})
