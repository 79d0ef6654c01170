"""Making a plan: from a profile and a cluster to the plan file's content.

problem.py    index the MetaGraph, cut the curves to the cluster
bound.py      the linear program over the whole graph: lower bound and allocation
strategies/   drafts: schedules without devices
judge.py      placement, memory, predicted iteration; the best draft wins
assemble.py   the plan
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from spindle_cli.account.device_memory import MEMORY_FORMULA
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.assemble import make_plan_file
from spindle_cli.plan.bound.bound import Bound, lower_bound
from spindle_cli.plan.no_fit import no_fit
from spindle_cli.plan.problem import Problem, make_problem
from spindle_cli.plan.same_device import assumption
from spindle_cli.plan.schedule import Draft
from spindle_cli.plan.search.judge import Judged, best_of, judge
from spindle_cli.plan.search.memory_fallback import STEPS, TightProblem, describe, recomputing, splits
from spindle_cli.plan.search.passes_apart import with_passes_apart
from spindle_cli.plan.search.spread import spread_out
from spindle_cli.plan.sets.choose import with_sets
from spindle_cli.plan.strategies.component_lanes import component_lanes
from spindle_cli.plan.strategies.distmm import distmm
from spindle_cli.plan.strategies.optimus import optimus
from spindle_cli.plan.strategies.sequential import sequential
from spindle_cli.plan.strategies.spindle import NO_SEARCH, spindle
from spindle_cli.plan.types import Plan, Predicted, StrategyName
from spindle_cli.profile.types import Profile

DEFAULT_EFFORT = 1
# Where memory asks for a fallback, so many ways to split layers are planned and the best one kept.
SPLITS_COMPARED = 3
MORE_STEPS = (1, 2, 4)
BASELINES: Mapping[StrategyName, Callable[[Problem], Draft]] = {
    "sequential": sequential,
    "distmm": distmm,
    "optimus": optimus,
}


class BelowBoundError(Exception):
    """A schedule that is shorter than the lower bound."""


def make_plan(
    profile: Profile, cluster: Cluster, strategy: StrategyName = "spindle", effort: int = DEFAULT_EFFORT
) -> Plan:
    """Plan a profiled workload for a cluster, with each set of its tasks that steps run. Same inputs, same
    plan.

    Args:
        strategy: how the devices are shared out.
        effort: 0 or more; more of it searches longer and never gives a worse plan.

    Raises:
        NoPlanError: no valid allocation, or nothing fits the devices' memory.
        BelowBoundError: a bug of the planner.
    """
    plan = plan_of_all(profile, cluster, strategy, effort)
    if not profile.task_sets:
        return plan
    return with_sets(plan, profile, lambda some: plan_of_all(some, cluster, strategy, effort))


def plan_of_all(profile: Profile, cluster: Cluster, strategy: StrategyName, effort: int) -> Plan:
    """The plan of a step that runs all tasks; the arguments, and what is raised, are those of `make_plan`."""
    problem = make_problem(profile, cluster)
    bound = lower_bound(problem)
    assumed = assumption(profile, cluster)
    notes = [] if assumed is None else [assumed]
    best, all_fit = best_judged(problem, bound, strategy, effort)
    if best is None or not all_fit:
        tight = _with_fallback(profile, cluster, strategy, effort)
        if tight is None and best is None:
            raise no_fit(profile, cluster)
        if tight is not None and (best is None or tight[0].rank() < best.rank()):
            best, problem, note = tight
            notes.append(note)
    assert best is not None, "one of them is"
    require_above(bound.lower_bound_s, best)
    best = with_passes_apart(problem, best)
    name = best.strategy
    if name != strategy:
        notes.append(f"No better plan was found than {name}'s, so this is it.")
    predicted = Predicted(
        iteration_s=best.prediction.iteration_s,
        compute_s=best.prediction.compute_s,
        lower_bound_s=bound.lower_bound_s,
        peak_memory_bytes=tuple(device.total_bytes for device in best.memory),
        memory_formula=MEMORY_FORMULA,
        transfer_s=best.prediction.transfer_s,
        processor_s=best.prediction.processor_s,
        gradient_sum_s=best.prediction.gradient_sum_s,
        optimizer_s=best.prediction.optimizer_s,
    )
    return make_plan_file(problem, strategy, best.slices, predicted, tuple(notes))


def require_above(lower_bound_s: float, best: Judged) -> None:
    """Stop where a schedule ends before the bound that no schedule can end before: one of both is wrong.

    Without tolerance: the bound is lowered by what floats can be off, and durations are rounded up.

    Raises:
        BelowBoundError: this is a bug of ours.
    """
    compute_s = best.prediction.compute_s
    if compute_s < lower_bound_s:
        raise BelowBoundError(
            f"the schedule of {best.strategy} ends at {compute_s:.9g} s, before the lower bound of "
            f"every schedule, {lower_bound_s:.9g} s"
        )


def best_judged(
    problem: Problem, bound: Bound, strategy: StrategyName, effort: int
) -> tuple[Judged | None, bool]:
    """The best plan that fits, or None; and whether memory stood in no draft's way.

    `spindle` considers the other strategies' plans too.
    """
    found: list[list[Judged | None]] = []
    for name, baseline in BASELINES.items():
        if strategy in (name, "spindle"):
            found.append([judge(problem, baseline(problem))])
    if strategy == "spindle":
        for number, drafts in enumerate(spindle(problem, bound, effort)):
            found.append(best_of(problem, drafts, with_care=effort != NO_SEARCH))
            if number == 1 and not any(found[-1]):
                break  # nothing of a whole search fits: a longer one will not help
    all_fit = all(judged is not None and not judged.is_apart for each in found for judged in each)
    if strategy == "spindle" and effort != NO_SEARCH:
        found.append([judge(problem, draft) for draft in component_lanes(problem)])
    spread = [spread_out(problem, best) for each in found if (best := _least(each)) is not None]
    return _least(spread), all_fit  # of equals the first: a baseline


def _least(found: Iterable[Judged | None]) -> Judged | None:
    return min((judged for judged in found if judged is not None), key=Judged.rank, default=None)


def _with_fallback(
    profile: Profile, cluster: Cluster, strategy: StrategyName, effort: int
) -> tuple[Judged, Problem, str] | None:
    """The best plan of those that give up speed for memory, with what it says of that; None if none fits."""
    found: list[TightPlan] = []
    for split in splits(profile, cluster):
        fastest_s = min((plan.judged.prediction.iteration_s for plan in found), default=inf)
        if len(found) == SPLITS_COMPARED or split.bound.lower_bound_s >= fastest_s:
            break
        least = _least_recomputing(split, strategy)
        if least is not None:
            found.append(least)
    if not found:
        return None
    best = min(found, key=lambda plan: plan.judged.rank())
    # Plans that spread memory less evenly fit only with some more recomputation, and may be faster
    # nevertheless.
    found += [plan for step in MORE_STEPS if (plan := _recomputing(best.tight, best.step + step, strategy))]
    best = min(found, key=lambda plan: plan.judged.rank())
    tight = best.tight
    searched, _ = best_judged(tight.problem, tight.bound, strategy, effort)
    return searched or best.judged, tight.problem, describe(tight.fallback)


@dataclass(frozen=True)
class TightPlan:
    """The best plan of a quick search under some memory fallback, at a step of recomputation."""

    judged: Judged
    tight: TightProblem
    step: int


def _recomputing(split: TightProblem, step: int, strategy: StrategyName) -> TightPlan | None:
    if step > STEPS:
        return None
    tight = recomputing(split, step)
    if tight is None:
        return None
    judged, _ = best_judged(tight.problem, tight.bound, strategy, NO_SEARCH)
    return None if judged is None else TightPlan(judged, tight, step)


def _least_recomputing(split: TightProblem, strategy: StrategyName) -> TightPlan | None:
    """The plan that recomputes least of those that fit, found by halving; None if all of it does not fit."""
    found: TightPlan | None = None
    low, high = (
        (0 if split.fallback.split else 1),
        STEPS,
    )  # without a split, recomputing nothing has been tried
    step = high
    while low <= high:
        fitting = _recomputing(split, step, strategy)
        if fitting is not None:
            found, high = fitting, step - 1
        else:
            low = step + 1
        step = (low + high) // 2
    return found
