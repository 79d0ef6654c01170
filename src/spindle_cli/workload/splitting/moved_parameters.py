"""Parameters that an operator changes in its forward: a teacher, a codebook, prototypes that it normalises.

In one process whoever uses such a parameter afterwards sees it changed. Here each device has a copy, and the
operator changes that of its own device alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.parameters import ParameterTable


def refuse_shared_moves(tasks: Mapping[str, TaskGraph]) -> None:
    """Refuse an operator that changes a parameter which another op uses as well.

    Raises:
        WorkloadError: with the operator and the other user.
    """
    table = ParameterTable.of_tasks(tasks)
    for task in tasks.values():
        for op in task.ops:
            for own in (name for name in op.changes if name in op.parameters):
                name = table.names[task.task.name, own]
                others = [user for user in table.users[name] if user != (task.task.name, op.index)]
                if not others:
                    continue
                is_trained = table.is_trainable(name)
                task_name, index = others[0]
                user = tasks[task_name].ops[index].target or "glue"
                which = "are trained" if is_trained else "are not trained"
                raise WorkloadError(
                    f"task {task.task.name!r}: the forward of {op.target or 'glue'!r} "
                    f"changes parameters that {which}, {name!r} among them, "
                    f"and {user!r} of task {task_name!r} uses it too, maybe on another device, which would "
                    "not see it changed",
                    hint="Let one operator, called once, do both: change them and compute with them."
                    + (
                        " Or compute with what it would become, without writing it: "
                        "functional.linear(x, functional.normalize(self.weight))."
                        if is_trained
                        else ""
                    ),
                )
