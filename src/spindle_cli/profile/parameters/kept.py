"""What optimizers keep of the parameters of ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spindle_cli.profile.types import OptimizerBytes
from spindle_cli.workload.graph import Op, TaskGraph
from spindle_cli.workload.optimizing.kept import StateSizes
from spindle_cli.workload.parameters import ParameterTable


@dataclass(frozen=True)
class KeptByOptimizers:
    """What optimizers keep of the parameters of ops."""

    sizes: StateSizes
    table: ParameterTable

    def by(self, task: TaskGraph, ops: Sequence[Op]) -> OptimizerBytes | None:
        """What the optimizer keeps for the parameters of a task's ops, each counted once."""
        names = {self.table.names[task.task.name, dotted] for op in ops for dotted in op.parameters}
        kept = self.sizes.of((name, self.table.parameters[name]) for name in sorted(names))
        if kept is None:
            return None
        return OptimizerBytes(
            state_per_param=kept.shared, whole_state_per_param=kept.whole, whole_share=kept.whole_share
        )
