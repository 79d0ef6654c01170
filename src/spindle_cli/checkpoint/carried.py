"""What a workload takes over from a checkpoint that another one left, and whether it can."""

from __future__ import annotations

from pathlib import Path

from spindle_cli.checkpoint.carry_over import CarryOver, saved_names, with_aliases
from spindle_cli.checkpoint.index import AVERAGE_KEY, Checkpoint, optimizer_keys
from spindle_cli.errors import InputError
from spindle_cli.training.optimizing.groups import OptimizerGroups
from spindle_cli.training.optimizing.optimizer import state_keys
from spindle_cli.workload.graph import ParameterTable, WorkloadGraph
from spindle_cli.workload.settings.updates import OptimizerChoice


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


def require_same_optimizer(
    checkpoint: Checkpoint, carried: CarryOver, groups: OptimizerGroups, where: Path
) -> None:
    """Refuse another optimizer than the one whose state was saved, and one that keeps more, for any parameter
    that is taken over.

    Args:
        groups: the optimizer settings of each trained parameter now.

    Raises:
        InputError: it is another, or keeps what was not saved.
        WorkloadError: it cannot be made.
    """
    has_state = any(set(keys) - {AVERAGE_KEY} for keys in optimizer_keys(checkpoint.tensors).values())
    compared: set[tuple[str, str]] = set()
    for name, saved_as in carried.kept.items():
        before = checkpoint.choice_of(saved_as)
        if name not in groups.of or before is None:
            continue
        now = groups.choice_of(name)
        pair = repr(before), repr(now)
        if pair not in compared:
            compared.add(pair)
            _require_same(before, now, name, where, has_state=has_state)


def _require_same(
    before: OptimizerChoice, now: OptimizerChoice, name: str, where: Path, *, has_state: bool
) -> None:
    of = "" if before.name is None and now.name is None else f" for {name}"
    if now.optimizer != before.optimizer:
        raise InputError(
            f"{where}: the run was trained with {before.key} = {before.optimizer!r}{of}, "
            f"but the workload now says {now.optimizer!r}, which cannot take over its state",
            hint=f"Put {before.optimizer} back (lr and schedule may be others), or start a new run.",
        )
    missing = sorted(state_keys(now) - state_keys(before))
    if missing and has_state:
        raise InputError(
            f"{where}: with optimizer_args={now.arguments!r} {now.optimizer} keeps "
            f"{', '.join(missing)} of each parameter{of}, which was not saved: the run had "
            f"optimizer_args={before.arguments!r}",
            hint="Put optimizer_args back, or start anew.",
        )
