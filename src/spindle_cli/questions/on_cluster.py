"""A strategy's plan on one cluster as a row of an answer: what is predicted of it, and what it takes."""

from __future__ import annotations

from pydantic import Field

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import Profile
from spindle_cli.questions.spending import Spending, spending_of


class OnCluster(Spending):
    """A plan's prediction on some devices (`Plan.of_steps`), and what an iteration takes of them.

    Attributes:
        num_devices: How many devices.
        of_types: How many of each type, where the question is about several.
        iteration_s: Seconds of an iteration.
        lower_bound_s: Seconds that no schedule can be shorter than.
        peak_memory_bytes: Bytes that the fullest device holds.
        failure: Why there is no plan; the figures are then null.
    """

    num_devices: int
    of_types: dict[str, int] = Field(default_factory=dict)
    iteration_s: float | None = None
    lower_bound_s: float | None = None
    peak_memory_bytes: int | None = None
    failure: str | None = None


def on_cluster(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    price_per_device_hour: float | None = None,
    *,
    tell_types: bool,
) -> OnCluster:
    """Plan, and read the plan's figures; too few devices are part of the answer.

    Args:
        price_per_device_hour: of every device, instead of what the cluster says of its groups.
        tell_types: fill `of_types`.
    """
    of_types = dict(cluster.num_of_type) if tell_types else {}
    try:
        plan = make_plan(profile, cluster, strategy)
    except NoPlanError as error:
        return OnCluster(num_devices=cluster.num_devices, of_types=of_types, failure=error.message)
    predicted = plan.of_steps
    return OnCluster(
        num_devices=cluster.num_devices,
        of_types=of_types,
        iteration_s=predicted.iteration_s,
        lower_bound_s=predicted.lower_bound_s,
        peak_memory_bytes=max(predicted.peak_memory_bytes),
        **dict(spending_of(plan, price_per_device_hour)),
    )
