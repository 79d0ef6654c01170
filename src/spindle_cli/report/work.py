"""What the whole cluster computes over time and what its devices hold, of the plan and of `sequential`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spindle_cli.costs.peaks import arithmetic_of, peak_flops_per_s
from spindle_cli.plan.types import Plan, StrategyName
from spindle_cli.profile.types import Profile
from spindle_cli.report.flops import flops_over_time, step_flops
from spindle_cli.report.runs import equal_runs
from spindle_cli.report.types import ClusterWork, HeldRange
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.types import Simulation

BESIDE: StrategyName = "sequential"


def work_views(
    simulation: Simulation, profile: Profile | None, others: Mapping[StrategyName, Plan]
) -> Iterator[ClusterWork]:
    """View the work of the simulated plan, and behind it that of `sequential`'s where it is among the other
    strategies' plans.

    `profile`: says in which arithmetic the devices' peak is.
    """
    yield _view(simulation, profile, is_this=True)
    beside = others.get(BESIDE)
    if beside is not None:
        yield _view(simulate(beside), profile, is_this=False)


def _view(simulation: Simulation, profile: Profile | None, *, is_this: bool) -> ClusterWork:
    plan, steps, flops = simulation.plan, flops_over_time(simulation), step_flops(simulation.plan)
    mean = None if flops is None or not simulation.step_s else flops / simulation.step_s
    arithmetic = None if profile is None else arithmetic_of(profile.environment)
    peak = None if arithmetic is None else peak_flops_per_s(plan.cluster.device_type, arithmetic)
    held = [[step.num_bytes for step in own] for own in simulation.memory]
    return ClusterWork(
        strategy=plan.strategy,
        is_this=is_this,
        step_s=simulation.step_s,
        flops_per_s=None if steps is None else tuple((step.at_s, step.flops_per_s) for step in steps),
        mean_flops_per_s=mean,
        peak_share=None if mean is None or peak is None else mean / (peak * plan.cluster.num_devices),
        memory=tuple(
            HeldRange(run=run, least_bytes=least, most_bytes=most)
            for run, (least, most) in equal_runs([(min(own), max(own)) for own in held])
        ),
    )
