"""The plan file of the best plan that was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from spindle_cli.account.device_memory import MEMORY_FORMULA, DeviceMemory, host_memory
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.assemble import make_plan_file
from spindle_cli.plan.best.find import PlanResult, require_above
from spindle_cli.plan.bound.any_cut import AnyCut
from spindle_cli.plan.search.evaluate import EvaluatedCandidate
from spindle_cli.plan.types import BOUNDS_OF_ANY_CUT, Plan, Predicted, StrategyName
from spindle_cli.profile.mixed.seen import assumption
from spindle_cli.profile.types import Profile
from spindle_cli.units import format_seconds

AT_ONCE = (
    "Sums and gathers go over all devices at once: memory has no room for the communicators that going by "
    "nodes takes."
)


@dataclass(frozen=True)
class Bounds:
    """Bounds of all schedules: seconds for whole batches, and those for batches cut in any way."""

    lower_s: float
    any_cut: AnyCut


def plan_of(
    profile: Profile, cluster: Cluster, strategy: StrategyName, result: PlanResult, bounds: Bounds
) -> Plan:
    """The plan file of what was found.

    Args:
        strategy: that was asked for.

    Raises:
        BelowBoundError: a bug of the planner.
    """
    require_above(bounds.any_cut.lower_bound_s, result.best.prediction.compute_s, result.best.strategy)
    slices = result.best.slices if result.cut is None else result.cut.folded(result.best.slices)
    counts = None if result.cut is None else result.cut.counts
    assumed, doubts = _assumed(result.best, bounds)
    predicted = _predicted(result.best, cluster, bounds, assumed)
    notes = (*_notes(profile, cluster, strategy, result), *doubts)
    return make_plan_file(
        profile,
        cluster,
        strategy,
        slices,
        predicted,
        notes,
        counts,
        result.sharding,
        sums_by_node=result.best.sums_by_node,
    )


def _notes(profile: Profile, cluster: Cluster, strategy: StrategyName, result: PlanResult) -> tuple[str, ...]:
    notes = [assumption(profile, cluster), result.note]
    if result.best.strategy != strategy:
        notes.append(f"No better plan was found than {result.best.strategy}'s, so this is it.")
    if not result.best.sums_by_node:
        notes.append(AT_ONCE)
    return tuple(note for note in notes if note is not None)


def _assumed(best: EvaluatedCandidate, bounds: Bounds) -> tuple[dict[str, float], tuple[str, ...]]:
    """The bounds with memory and with links, by their keys, and notes of those that are left out.

    What ops take is the profile's, and a schedule shorter than that contradicts itself. What has to fit and
    to be sent is assumed on top, and a plan is none the worse where that does not hold.
    """
    bounds_by_key, notes = {}, []
    for name, bound_s, seconds in (
        ("lower_bound_with_memory_s", bounds.any_cut.with_memory_s, best.prediction.compute_s),
        ("lower_bound_with_links_s", bounds.any_cut.with_links_s, best.prediction.iteration_s),
    ):
        if seconds >= bound_s:
            bounds_by_key[name] = bound_s
        else:
            notes.append(
                f"The lower bound {BOUNDS_OF_ANY_CUT[name]}, {format_seconds(bound_s)}, is left out: this "
                f"plan takes {format_seconds(seconds)}. The plan is valid; what the bound assumes does not "
                "hold here. Please report it."
            )
    return bounds_by_key, tuple(notes)


def _predicted(
    best: EvaluatedCandidate, cluster: Cluster, bounds: Bounds, assumed: Mapping[str, float]
) -> Predicted:
    return Predicted(
        **asdict(best.prediction),
        lower_bound_s=bounds.lower_s,
        lower_bound_any_s=bounds.any_cut.lower_bound_s,
        **assumed,
        peak_memory_bytes=tuple(device.total_bytes for device in best.memory),
        host_memory_bytes=_host_memory(best.memory, cluster),
        memory_formula=MEMORY_FORMULA,
    )


def _host_memory(memory: Sequence[DeviceMemory], cluster: Cluster) -> tuple[int, ...]:
    """Return the host memory that activations take on each node; empty where none are moved there."""
    by_node = host_memory(memory, cluster)
    return by_node if any(by_node) else ()
