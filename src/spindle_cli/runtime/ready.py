"""What a worker does before it takes its device and meets the others: read the plan, load its part of the
workload, and fork the processes that will load its node's batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from spindle_cli.check.run import check_plan
from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest
from spindle_cli.plan.types import Plan
from spindle_cli.process.environment import WorkerEnvironment, without_ranks
from spindle_cli.runtime.loading.start import Readers
from spindle_cli.runtime.part.localise import LoadedPart, load_rank
from spindle_cli.workload.one_process import show_one_process


@dataclass(frozen=True)
class Ready:
    """A worker's plan, its part of the workload, and the loading processes of its node, whose first rank has
    them.
    """

    plan: Plan
    part: LoadedPart
    readers: Readers


def make_ready(request: RunRequest, environment: WorkerEnvironment) -> Ready:
    """Make a worker ready, among those that train one model. Code that is not ours sees one process.

    Raises:
        InputError: the plan is invalid, or does not belong to the workload or to this number of workers.
        WorkloadError: the workload cannot be built, traced or read.
    """
    plan = Plan.read(request.plan)
    require_runnable(plan, request, environment.world_size)
    show_one_process()
    with without_ranks():
        part = load_rank(request, plan, environment.rank)
        is_first = environment.local_rank == 0
        readers = Readers(part.workload.graph.workload, part.train, is_first=is_first, forget=part.forget)
    return Ready(plan, part, readers)


def require_runnable(plan: Plan, request: RunRequest, world_size: int) -> None:
    """Refuse a plan that breaks its rules, is for other devices, or needs what workers cannot do.

    Raises:
        InputError: with the place in the plan.
    """
    violations = check_plan(plan)
    if violations:
        raise InputError(f"{request.plan}: the plan is not valid: {violations[0]}", hint="Make it again.")
    if plan.cluster.num_devices != world_size:
        raise InputError(
            f"{request.plan}: the plan is for {plan.cluster.num_devices} devices, "
            f"but {world_size} workers were started",
            hint="Start it with `spindle launch`, which starts one worker per device.",
        )
