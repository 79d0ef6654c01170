"""Plans that the planner makes: once for all tests that look at the same one."""

from __future__ import annotations

from functools import cache

from spindle_cli.files.artifact import to_json
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, StrategyName
from spindle_cli.profile.types import Profile


def made_plan(profile: Profile, cluster: Cluster, strategy: StrategyName = "spindle") -> Plan:
    """What `make_plan` makes; for tests that ask nothing of the planner itself."""
    return _made(to_json(profile), to_json(cluster), strategy)


@cache
def _made(profile: str, cluster: str, strategy: StrategyName) -> Plan:
    return make_plan(Profile.model_validate_json(profile), Cluster.model_validate_json(cluster), strategy)
