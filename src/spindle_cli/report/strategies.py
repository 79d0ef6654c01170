"""Every strategy's plan for the same profile and cluster, beside the one of the report."""

from __future__ import annotations

from typing import get_args

from spindle_cli.errors import NoPlanError
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, StrategyName
from spindle_cli.profile.types import Profile
from spindle_cli.report.types import StrategyView


def strategy_views(plan: Plan, profile: Profile) -> tuple[StrategyView, ...]:
    """Strategies in the contract's order; the plan's own is the plan as it is."""
    return tuple(_view(plan, profile, strategy) for strategy in get_args(StrategyName))


def _view(plan: Plan, profile: Profile, strategy: StrategyName) -> StrategyView:
    if strategy == plan.strategy:
        return StrategyView(strategy=strategy, is_this=True, predicted=plan.predicted)
    try:
        made = make_plan(profile, plan.cluster, strategy)
    except NoPlanError as error:  # said in the report, where it is part of the comparison
        return StrategyView(strategy=strategy, is_this=False, predicted=None, failure=error.message)
    return StrategyView(strategy=strategy, is_this=False, predicted=made.predicted)
