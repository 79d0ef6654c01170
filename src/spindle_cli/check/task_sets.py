"""Rules of a plan's sets of tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spindle_cli.check.structure import names_and_ranges
from spindle_cli.check.types import Violation
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.workload.settings.types import faults_of_sets


def sound(plan: Plan) -> Iterator[Violation]:
    """The sets are of tasks that there are, and make up all steps; what changes buffers runs on the same
    devices in all of them.
    """
    tasks = {metaop.task for metaop in plan.metaops}
    for fault in faults_of_sets(plan.task_sets, tasks):
        where = _place(fault.tasks) if fault.tasks else "task_sets"
        yield Violation(rule="task-sets", where=where, value=fault.value, expected=fault.expected)
    changing = [metaop.name for metaop in plan.metaops if metaop.changes_buffers]
    for task_set in plan.task_sets:
        slices = [slice_ for wave in task_set.waves for slice_ in wave.slices]
        for name in changing:
            places, whole_places = _places_of(name, slices), _places_of(name, plan.slices)
            if places and places != whole_places:
                yield Violation(
                    rule="buffers",
                    where=_place(task_set.tasks),
                    value=f"{name} changes buffers, and runs on other devices than in the plan of all tasks",
                    expected="the same, as they keep them",
                )


def parts_exist(plan: Plan) -> Iterator[Violation]:
    """Slices of the sets name MetaOps, ops and devices that exist: memory of any set rests on all of them."""
    for task_set in plan.task_sets:
        for violation in names_and_ranges(plan, task_set.waves):
            yield located_in(task_set.tasks, violation)


def located_in(tasks: Iterable[str], violation: Violation) -> Violation:
    """A violation of a set's plan, with whose it is."""
    return violation.model_copy(update={"where": f"{_place(tasks)}, {violation.where}"})


def _place(tasks: Iterable[str]) -> str:
    return f"task_sets, {' + '.join(tasks)}"


def _places_of(metaop: str, slices: Iterable[Slice]) -> set[object]:
    return {(slice_.ops, slice_.devices, slice_.dp) for slice_ in slices if slice_.metaop == metaop}
