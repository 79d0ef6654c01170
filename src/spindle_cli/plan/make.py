"""Making a plan: from a profile and a cluster to the plan file's content.

problem.py    index the MetaGraph, cut the curves to the cluster
bound.py      the linear program over the whole graph: lower bound and allocation
strategies/   drafts: schedules without devices
judge.py      placement, memory, predicted iteration; the best draft wins
assemble.py   the plan
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spindle_cli.cluster import Cluster
from spindle_cli.plan.assemble import make_plan_file
from spindle_cli.plan.bound import Bound, lower_bound
from spindle_cli.plan.judge import Judged, best_of, judge
from spindle_cli.plan.no_fit import no_fit
from spindle_cli.plan.problem import Problem, Thrift, make_problem
from spindle_cli.plan.schedule import Draft
from spindle_cli.plan.strategies.distmm import distmm
from spindle_cli.plan.strategies.optimus import optimus
from spindle_cli.plan.strategies.sequential import sequential
from spindle_cli.plan.strategies.spindle import spindle
from spindle_cli.plan.thrift import describe, thrifty_problems
from spindle_cli.plan.types import Plan, Predicted, StrategyName
from spindle_cli.profile.types import Profile

DEFAULT_EFFORT = 1
# Where memory asks for thrift, so many ways to save it are planned and the best one kept.
THRIFTS_COMPARED = 3
BASELINES: Mapping[StrategyName, Callable[[Problem], Draft]] = {
    "sequential": sequential,
    "distmm": distmm,
    "optimus": optimus,
}


def make_plan(
    profile: Profile, cluster: Cluster, strategy: StrategyName = "spindle", effort: int = DEFAULT_EFFORT
) -> Plan:
    """Plan a profiled workload for a cluster. Same inputs, same plan.

    Args:
        strategy: how the devices are shared out.
        effort: 0 or more; more of it searches longer and never gives a worse plan.

    Raises:
        NoPlanError: no valid allocation, or nothing fits the devices' memory.
    """
    problem = make_problem(profile, cluster)
    bound = lower_bound(problem)
    notes: list[str] = []
    best = best_judged(problem, bound, strategy, effort)
    if best is None:
        problem, best, note = _with_thrift(profile, cluster, strategy, effort)
        notes.append(note)
    name = best.placed.draft.name
    if name != strategy:
        notes.append(f"No better plan was found than {name}'s, so this is it.")
    predicted = Predicted(
        iteration_s=best.prediction.iteration_s,
        compute_s=best.prediction.compute_s,
        lower_bound_s=min(bound.lower_bound_s, best.prediction.compute_s),
        peak_memory_bytes=tuple(device.total_bytes for device in best.memory),
        transfer_s=best.prediction.transfer_s,
        gradient_sum_s=best.prediction.gradient_sum_s,
    )
    return make_plan_file(problem, strategy, best.slices, predicted, tuple(notes))


def best_judged(problem: Problem, bound: Bound, strategy: StrategyName, effort: int) -> Judged | None:
    """The best plan that fits; None if none does. `spindle` considers the other strategies' plans too."""
    found: list[Judged] = []

    def consider(judged: Judged | None) -> None:
        if judged is not None:
            found.append(judged)

    for name, baseline in BASELINES.items():
        if strategy in (name, "spindle"):
            consider(judge(problem, baseline(problem)))
    if strategy == "spindle":
        for number, drafts in enumerate(spindle(problem, bound, effort)):
            consider(best_of(problem, drafts))
            if number == 1 and not found:
                break  # none of the baselines and of a whole search fits: a longer search will not help
    return min(found, key=Judged.rank, default=None)  # of equals the first: a baseline


def _with_thrift(
    profile: Profile, cluster: Cluster, strategy: StrategyName, effort: int
) -> tuple[Problem, Judged, str]:
    """The best plan of those that give up speed for memory.

    Raises:
        NoPlanError: none fits.
    """
    found: list[tuple[Judged, Thrift, Problem, Bound]] = []
    for thrift, problem, bound in thrifty_problems(profile, cluster):
        if len(found) == THRIFTS_COMPARED or any(
            judged.prediction.iteration_s <= bound.lower_bound_s for judged, *_ in found
        ):
            break
        best = best_judged(problem, bound, strategy, effort=0)
        if best is not None:
            found.append((best, thrift, problem, bound))
    if not found:
        raise no_fit(profile, cluster)
    best, thrift, problem, bound = min(found, key=lambda item: item[0].rank())
    return problem, best_judged(problem, bound, strategy, effort) or best, describe(thrift)
