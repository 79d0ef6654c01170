"""Making a plan: from a profile and a cluster to the plan file's content."""

from __future__ import annotations

from spindle_cli.cluster import Cluster
from spindle_cli.costs.memory import device_memory
from spindle_cli.plan.assemble import exact_slices, make_plan_file
from spindle_cli.plan.bound import lower_bound
from spindle_cli.plan.problem import make_problem
from spindle_cli.plan.strategies.sequential import sequential
from spindle_cli.plan.types import Plan, Predicted, StrategyName
from spindle_cli.profile.types import Profile


def make_plan(
    profile: Profile, cluster: Cluster, strategy: StrategyName = "spindle", effort: int = 1
) -> Plan:
    """Plan a profiled workload for a cluster.

    Args:
        strategy: how the devices are shared out.
        effort: more of it searches longer and never gives a worse plan.

    Raises:
        NoPlanError: no valid allocation, or nothing fits the devices' memory.
    """
    problem = make_problem(profile, cluster)
    bound = lower_bound(problem)
    pieces = sequential(problem)
    devices = [tuple(range(piece.point.num_devices)) for piece in pieces]
    slices = exact_slices(problem, pieces, devices)
    memory = device_memory(profile.metaops, slices, problem.num_devices, profile.optimizer_state_per_param)
    compute_s = max(piece.end_s for piece in slices)
    predicted = Predicted(
        iteration_s=compute_s,
        compute_s=compute_s,
        lower_bound_s=bound.lower_bound_s,
        peak_memory_bytes=tuple(device.total_bytes for device in memory),
    )
    return make_plan_file(problem, strategy, slices, predicted)
