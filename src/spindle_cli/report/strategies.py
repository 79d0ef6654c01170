"""Every strategy's plan for the same profile and cluster, beside the one of the report."""

from __future__ import annotations

from collections.abc import Mapping

from spindle_cli.errors import NoPlanError
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, StrategyName, strategies_on
from spindle_cli.profile.types import Profile
from spindle_cli.report.types import StrategyView


def other_plans(plan: Plan, profile: Profile) -> dict[StrategyName, Plan | NoPlanError]:
    """The plans of the strategies that are not the plan's own, in the contract's order; or why there is
    none.
    """
    names = strategies_on(plan.cluster)
    return {name: _made(plan, profile, name) for name in names if name != plan.strategy}


def _made(plan: Plan, profile: Profile, strategy: StrategyName) -> Plan | NoPlanError:
    try:
        return make_plan(profile, plan.cluster, strategy)
    except NoPlanError as error:  # said in the report, where it is part of the comparison
        return error


def strategy_views(plan: Plan, others: Mapping[StrategyName, Plan | NoPlanError]) -> tuple[StrategyView, ...]:
    """Strategies in the contract's order; the plan's own is the plan as it is."""
    names = strategies_on(plan.cluster)
    return tuple(_view(name, plan if name == plan.strategy else others[name], plan) for name in names)


def _view(strategy: StrategyName, made: Plan | NoPlanError, this: Plan) -> StrategyView:
    if isinstance(made, NoPlanError):
        return StrategyView(strategy=strategy, is_this=False, predicted=None, failure=made.message)
    return StrategyView(strategy=strategy, is_this=made is this, predicted=made.predicted)
