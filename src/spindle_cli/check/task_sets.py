"""Whether a plan has what each step runs that the train settings ask for."""

from __future__ import annotations

from collections.abc import Iterable

from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan
from spindle_cli.workload.settings.sampling import TaskShare


def require_planned(plan: Plan, sets: Iterable[TaskShare], where: str) -> None:
    """Refuse a plan that has none for some steps. `sets`: those that occur. `where`: the plan's file.

    Raises:
        InputError: naming the tasks of a set without a plan.
    """
    planned = [each.tasks for each in plan.task_sets]
    everything = {metaop.task for metaop in plan.metaops}
    for each in sets:
        if each.tasks not in planned and set(each.tasks) != everything:
            has = "; ".join(", ".join(tasks) for tasks in planned) or "all tasks at every step"
            raise InputError(
                f"{where}: some steps run {', '.join(each.tasks)} alone (train.sampling), and the plan has "
                f"nothing for them; it is for {has}",
                hint="Profile and plan again: the profile says which tasks run together.",
            )
