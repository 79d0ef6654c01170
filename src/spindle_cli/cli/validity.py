"""What a command asks of a plan that someone may have edited: enough to do its work, and a warning otherwise.

`spindle check` lists all that is wrong; `launch` and `verify` take no plan that breaks any rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spindle_cli.cli import output
from spindle_cli.errors import InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from spindle_cli.check.types import Violation
    from spindle_cli.plan.types import Plan

# Slices of MetaOps or on devices that do not exist have no place in a picture or in a chain of slices.
CANNOT_DRAW = frozenset({"unknown-metaop", "unknown-device"})
# What else leaves a device without a program, or with one that does not come to its end; or an op without a
# time, as where devices of several types, or nodes, hold one share of it.
CANNOT_LINK = CANNOT_DRAW | {
    "ops-range",
    "parameter-blocks",
    "types",
    "coverage",
    "allocation",
    "rows",
    "device-twice",
    "order",
    "producer",
    "tensor-parallel",
}


def of_tasks(plan: Plan, tasks: str | None) -> Plan:
    """The plan of the steps that run just these tasks; of all tasks if None, with a note that there are
    others.

    Raises:
        UsageError: no step runs just these.
    """
    if tasks is None:
        if plan.task_sets:
            output.note(f"of a step that runs all tasks; --tasks shows others: {_listed(plan)}")
        return plan
    wanted = {name.strip() for name in tasks.split(",")}
    for names, set_plan in plan.set_plans.items():
        if set(names) == wanted:
            return set_plan
    planned_sets = _listed(plan) or "none, as every step runs all tasks"
    raise UsageError(f"--tasks {tasks}: the plan has nothing for steps of just these; it has {planned_sets}")


def steps_of(plan: Plan, tasks: str | None) -> Plan:
    """The plan of the steps that run just these tasks; if None, of the set of tasks whose steps take most of
    the time of all, with a note that there are others.

    Raises:
        UsageError: no step runs just these.
    """
    if tasks is not None or not plan.task_sets:
        return of_tasks(plan, tasks)
    most = max(plan.task_sets, key=lambda task_set: task_set.share * task_set.predicted.iteration_s)
    share = most.share * most.predicted.iteration_s / plan.mean_iteration_s
    output.note(
        f"of steps that run {', '.join(most.tasks)}, {share:.0%} of the time of all steps; --tasks shows "
        f"others: {_listed(plan)}"
    )
    return plan.set_plans[most.tasks]


def _listed(plan: Plan) -> str:
    return "; ".join(",".join(task_set.tasks) for task_set in plan.task_sets)


def require(possible: bool, path: Path, violations: Sequence[Violation]) -> None:
    """Refuse a plan that is not `possible`, with its first violation.

    Raises:
        InputError: it is not.
    """
    if not possible:
        raise InputError(
            f"{path}: the plan is not valid: {violations[0]}",
            hint="`spindle check` lists every violation; put them right, or make the plan again.",
        )


def require_without(rules: frozenset[str], path: Path, violations: Sequence[Violation]) -> None:
    """Refuse a plan that breaks one of `rules`; warn of one that breaks others.

    Raises:
        InputError: it breaks one of them; names the first.
    """
    broken = [violation for violation in violations if violation.rule in rules]
    require(not broken, path, broken)
    if violations:
        count = "1 violation" if len(violations) == 1 else f"{len(violations)} violations"
        output.note(f"warning: {path}: {count}; `spindle check` lists them")
