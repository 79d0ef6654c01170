"""What a workload takes over from a checkpoint that another one left, and whether it can."""

from __future__ import annotations

from pathlib import Path

from spindle_cli.checkpoint.carry_over import CarryOver, saved_names, with_aliases
from spindle_cli.checkpoint.index import Checkpoint
from spindle_cli.checkpoint.names import optimizer_keys
from spindle_cli.errors import InputError
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.parameters import ParameterTable
from spindle_cli.workload.training.optimizer import state_keys


def carried_over(checkpoint: Checkpoint, graph: WorkloadGraph) -> CarryOver:
    """The parameters, and the buffers that a state_dict would hold, of all that some op uses."""
    table = ParameterTable.of(graph)
    persistent = {
        table.names[name, key]
        for name, task in graph.tasks.items()
        for key in task.root.state_dict()
        if (name, key) in table.names
    }
    aliases = table.aliases
    wanted = [name for name, users in table.users.items() if users and name in persistent]
    return CarryOver.of(saved_names(checkpoint), with_aliases(wanted, aliases))


def require_same_optimizer(checkpoint: Checkpoint, train: TrainSettings, where: Path) -> None:
    """Refuse another optimizer than the one whose state was saved, and one that keeps more.

    Raises:
        InputError: it is another, or keeps what was not saved.
        WorkloadError: it cannot be made.
    """
    before = checkpoint.train
    if train.optimizer != before.optimizer:
        raise InputError(
            f"{where}: the run was trained with train.optimizer = {before.optimizer!r}, "
            f"but the workload now says {train.optimizer!r}, which cannot take over its state",
            hint=f"Put {before.optimizer} back (lr and schedule may be others), or start a new run.",
        )
    missing = sorted(state_keys(train) - state_keys(before))
    if missing and optimizer_keys(checkpoint.tensors):
        raise InputError(
            f"{where}: with optimizer_args={train.optimizer_args!r} {train.optimizer} keeps "
            f"{', '.join(missing)} of each parameter, which was not saved: the run had "
            f"optimizer_args={before.optimizer_args!r}",
            hint="Put train.optimizer_args back, or start anew.",
        )
