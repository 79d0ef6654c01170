"""What a profile predicts of a plan that has been run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from spindle_cli.calibrate.links import with_slower_links
from spindle_cli.plan.best.again import predicted_by
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.types import Plan
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import MetaOpProfile, Profile

NO_TIMES: Mapping[str, float] = MappingProxyType({})


def predicted_again(plan: Plan, profile: Profile, link_times: Mapping[str, float] = NO_TIMES) -> Prediction:
    """Return the iteration of a plan's slices on their devices by the times of another profile of its
    workload, over the plan's links. Of one of several plans that run in turn, devices hold what they use in
    any.

    Args:
        link_times: how many times as long messages take as by the plan's links, by kind of link.
    """
    if link_times:
        plan = plan.model_copy(update={"cluster": with_slower_links(plan.cluster, link_times)})
    seen = seen_on(profile, plan.cluster)
    if plan.joint is not None:
        seen = seen.of_tasks(dict.fromkeys(metaop.task for metaop in plan.metaops))
    return predicted_by(seen.with_metaops([_gathering_as(metaop, plan) for metaop in seen.metaops]), plan)


def _gathering_as(metaop: MetaOpProfile, plan: Plan) -> MetaOpProfile:
    """Return a MetaOp of which rows or factors are gathered as the plan says."""
    gathered = plan.by_name[metaop.name].gathered
    return metaop if metaop.gathered == gathered else metaop.model_copy(update={"gathered": gathered})
