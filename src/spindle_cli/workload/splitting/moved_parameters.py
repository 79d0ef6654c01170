"""Parameters that nothing trains, and an operator moves in its forward: a teacher, a codebook.

In one process whoever uses such a parameter afterwards sees it moved. Here each device has a copy, and the
operator moves that of its own device alone.
"""

from __future__ import annotations

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.parameters import ParameterTable
from spindle_cli.workload.splitting.shared_statistics import changed_names


def refuse_shared_moves(graph: WorkloadGraph) -> None:
    """Refuse an operator that moves a parameter which another op uses as well.

    Of an operator that is known to change one parameter all are taken to move that nothing trains.

    Raises:
        WorkloadError: with the operator and the other user.
    """
    table = ParameterTable.of(graph)
    for task in graph.tasks.values():
        for op in task.ops:
            if not changed_names(op, op.parameters):
                continue
            for name in table.of_op(task.task.name, op.parameters):
                others = [user for user in table.users[name] if user != (task.task.name, op.index)]
                if not others or table.is_trainable(name):
                    continue
                task_name, index = others[0]
                user = graph.tasks[task_name].ops[index].target or "glue"
                raise WorkloadError(
                    f"task {task.task.name!r}: the forward of {op.target or 'glue'!r} "
                    f"changes parameters that are not trained, {name!r} among them, "
                    f"and {user!r} of task {task_name!r} uses it too, maybe on another device, which would "
                    "not see it changed",
                    hint="Let one operator, called once, do both: move them and compute with them.",
                )
