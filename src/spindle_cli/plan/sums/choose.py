"""Which matrices' gradients a plan gathers as rows or factors, by what each way takes on its devices.

The rule is a closed form (`costs/parameters.py`): on the devices that hold a matrix, and for
all tokens that their shares have in a step, each way takes so many seconds. What it says of a plan that sums
all gradients as they are is planned for once more, and kept where the iteration is predicted to be faster.

A gathered matrix is whole on all its devices, which all step it: tensor parallelism does not split it, and
its optimizer state is not shared out. So devices of several types, which round differently, sum it as it is;
so do those of a plan that shares out gradients or parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from spindle_cli.account.groups import GatheredMatrix, gathered_matrices
from spindle_cli.costs.flops import arithmetic_of, peak_flops_per_s
from spindle_cli.costs.links import Spread, per_node, spread_collective_s
from spindle_cli.costs.parameters import Summing, fastest, seconds_by_way
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.again import predicted_by
from spindle_cli.plan.problem import WORTH
from spindle_cli.plan.types import Plan, PlanMetaOp, Sums, bounds_of_any_cut
from spindle_cli.profile.types import Matrix, MetaOpProfile, Profile

# What the plan's own slices have to gain before it is planned once more, which takes as long again.
SHOWS = WORTH / 2
# How many matrices a note names.
_NAMED = 3


def with_sums(plan: Plan, profile: Profile, way: Sums, make: Callable[[Profile], Plan]) -> Plan:
    """The plan, or one that gathers what gains by it, or what is asked for.

    Args:
        plan: of the profile, with all gradients summed as they are.
        way: that is asked for; not 'dense'.
        make: plans a profile whose MetaOps say what is gathered.

    Raises:
        NoPlanError: what is asked for cannot be gathered here, or not within the devices' memory.
    """
    possible = _possible(plan, profile)
    if way != "auto":
        return _gathered_as(
            way, {name for name, matrix in possible.items() if matrix.way == way}, plan, profile, make
        )
    speeds = {name: _flops_per_s(name, plan, profile) for name in possible}
    saved_s = _saved_s(possible, speeds, plan)
    gains = {name for name, seconds in saved_s.items() if seconds > 0}
    if not gains or sum(saved_s[name] for name in gains) < WORTH * plan.predicted.iteration_s:
        return plan
    gathering = profile.with_metaops([_with_gathered(metaop, gains, speeds) for metaop in profile.metaops])
    if predicted_by(gathering, plan).iteration_s > (1 - SHOWS) * plan.predicted.iteration_s:
        return plan
    try:
        made = _made(gains, plan, profile, make)
    except NoPlanError:  # what is stepped whole does not fit, or nothing may be split that has to be
        return plan
    is_faster = made.mean_iteration_s < (1 - WORTH) * plan.mean_iteration_s
    return made if is_faster else plan


def _gathered_as(
    way: Sums, names: Collection[str], plan: Plan, profile: Profile, make: Callable[[Profile], Plan]
) -> Plan:
    """The plan that gathers these as asked.

    Raises:
        NoPlanError: there are none, or what then has to be held whole does not fit.
    """
    if not names:
        raise NoPlanError(
            f"--sums {way}: no gradient can be gathered as {way} here ({_why_none(way, plan, profile)})",
            hint="Leave it out, or say `--sums dense`.",
        )
    try:
        return _made(names, plan, profile, make)
    except NoPlanError as error:
        raise NoPlanError(
            f"--sums {way}: with {len(names)} matrices gathered as {way}, which all devices that hold them "
            f"step whole: {error.message}",
            hint="Leave it out: what does not fit so may fit with gradients that are summed as they are.",
        ) from error


def _why_none(way: str, plan: Plan, profile: Profile) -> str:
    """What keeps a plan from gathering anything in a way."""
    if not any(matrix.way == way for metaop in profile.metaops for matrix in metaop.matrices):
        return "the profile names no matrix of which less would be moved than by a sum"
    if any(level.is_by_pass for level in plan.sharding.values()):
        return "the plan shares out gradients or parameters"
    return (
        "each such matrix is on one device, on devices that round differently, or split by tensor parallelism"
    )


def _made(names: Collection[str], plan: Plan, profile: Profile, make: Callable[[Profile], Plan]) -> Plan:
    """The plan that gathers these.

    Raises:
        NoPlanError: none fits, or it would hold them where they cannot be gathered.
    """
    speeds = {name: _flops_per_s(name, plan, profile) for name in names}
    made = make(_gathering(profile, names, speeds))
    if not _is_sound(made):
        raise NoPlanError("the plan puts them on devices that round differently, or shares them out")
    note = describe(made)
    if not note:
        raise NoPlanError("only a plan with each of them on one device fits")
    # Bounds are of all schedules, also of those that split what is gathered here.
    bounds = {"lower_bound_s": plan.predicted.lower_bound_s, **bounds_of_any_cut(plan.predicted)}
    predicted = made.predicted.model_copy(update=bounds)
    return made.model_copy(update={"predicted": predicted, "notes": (*made.notes, note)})


def _possible(plan: Plan, profile: Profile) -> dict[str, GatheredMatrix]:
    """By name, the matrices that the devices of a plan may gather."""
    if any(level.is_by_pass for level in plan.sharding.values()):
        return {}
    matrices = {metaop.name: metaop.matrices for metaop in profile.metaops}
    split = {
        matrix.parameter
        for slice_ in plan.slices
        for matrix in matrices[slice_.metaop]
        if slice_.tp > 1 and slice_.ops[0] <= matrix.op < slice_.ops[1]
    }
    gathered = gathered_matrices(plan.slices, plan.by_name, plan.accumulate, matrices)
    return {
        name: matrix
        for name, matrix in gathered.items()
        if name not in split and len(matrix.devices) > 1 and _are_alike(matrix.devices, plan.cluster)
    }


def describe(made: Plan) -> str:
    """What a plan says of what it gathers; '' if each such matrix is on one device alone."""
    names: dict[str, list[str]] = {}
    for name, matrix in gathered_matrices(made.slices, made.by_name, made.accumulate).items():
        if len(matrix.devices) > 1:
            names.setdefault(matrix.way, []).append(name)
    told = [f"{_listed(of_way)} as {way}" for way, of_way in sorted(names.items(), reverse=True)]
    return f"Gradients are gathered, not summed, of {', and of '.join(told)}." if told else ""


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _is_sound(made: Plan) -> bool:
    """Whether what a plan gathers may be gathered by the devices that it has given it."""
    gathered = gathered_matrices(made.slices, made.by_name, made.accumulate)
    may_gather = all(_are_alike(matrix.devices, made.cluster) for matrix in gathered.values())
    return may_gather and not any(level.is_by_pass for level in made.sharding.values())


def _are_alike(devices: Sequence[int], cluster: Cluster) -> bool:
    """Whether devices round alike, so that copies which each updates stay the same."""
    return cluster.is_cpu or len({cluster.type_of[device] for device in devices}) == 1


def _saved_s(
    gathered: Mapping[str, GatheredMatrix], speeds: Mapping[str, float | None], plan: Plan
) -> dict[str, float]:
    """Seconds by which the fastest way of each matrix is faster than its sum."""
    saved: dict[str, float] = {}
    for name, matrix in gathered.items():
        spread = per_node(matrix.devices, plan.cluster)
        seconds = seconds_by_way(
            matrix.gradient(plan.gradient_bytes_per_param),
            (matrix.way,),
            partial(_collective_s, spread=spread, cluster=plan.cluster),
            len(matrix.devices),
            speeds[name],
        )
        saved[name] = seconds[Summing.DENSE] - seconds[fastest(seconds)]
    return saved


def _collective_s(num_bytes: float, rounds: int, *, spread: Spread, cluster: Cluster) -> float:
    return spread_collective_s(num_bytes, spread, rounds, cluster)


def _flops_per_s(parameter: str, plan: Plan, profile: Profile) -> float | None:
    """What the slowest of a matrix's devices multiply with: as the forward passes of its ops do, else at the
    published peak; None: neither is known.
    """
    users = [metaop for metaop in plan.metaops if _has(profile.by_name[metaop.name].matrices, parameter)]
    reached = [speed for metaop in users for speed in _reached(metaop)]
    if reached:
        return min(reached)
    arithmetic = arithmetic_of(profile.environment)
    peaks = (
        [peak_flops_per_s(device_type, arithmetic) for device_type in plan.cluster.types]
        if arithmetic
        else []
    )
    published = [peak for peak in peaks if peak is not None]
    return min(published) if published and len(published) == len(peaks) else None


def _has(matrices: Collection[Matrix], parameter: str) -> bool:
    return any(matrix.parameter == parameter for matrix in matrices)


def _reached(metaop: PlanMetaOp) -> list[float]:
    """Operations in a second that forward passes of an op reach, on the shares that a plan has of it."""
    if not metaop.flops_per_op:
        return []
    by_point = [
        metaop.flops_per_op / point.num_devices / point.forward_s for point in metaop.curve if point.forward_s
    ]
    by_share = [
        metaop.flops_per_op * share.samples / metaop.batch_size / share.tp / share.forward_s
        for share in metaop.shares
        if share.forward_s
    ]
    return by_point + by_share


def _gathering(profile: Profile, names: Collection[str], speeds: Mapping[str, float | None]) -> Profile:
    """The profile with MetaOps that gather these matrices, and are not split by tensor parallelism."""
    metaops = [_unsplit(_with_gathered(metaop, names, speeds)) for metaop in profile.metaops]
    return profile.with_metaops(metaops).of_file(profile.sha256())


def _with_gathered(
    metaop: MetaOpProfile, names: Collection[str], speeds: Mapping[str, float | None]
) -> MetaOpProfile:
    gathered = tuple(
        matrix.model_copy(
            update={"flops_per_s": speeds[matrix.parameter] if matrix.way == "factors" else None}
        )
        for matrix in metaop.matrices
        if matrix.parameter in names
    )
    return metaop.model_copy(update={"gathered": gathered}) if gathered else metaop


def _unsplit(metaop: MetaOpProfile) -> MetaOpProfile:
    if not metaop.gathered:
        return metaop
    curve = tuple(point for point in metaop.curve if point.tp == 1)
    shares = tuple(share for share in metaop.shares if share.tp == 1)
    return metaop.model_copy(update={"curve": curve, "shares": shares})
