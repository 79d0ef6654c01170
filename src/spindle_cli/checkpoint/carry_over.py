"""What a run takes over from a checkpoint, and whether it can: all of it, where it goes on with the tasks,
the train settings and the optimizer groups that it began with; or what another task set has of it, by
the user's own names. No torch, but where a graph or optimizers are given.

A parameter that tasks share has a name in each of them. It is saved under one, with the others as aliases, so
that it is found again whichever of the tasks are still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.checkpoint.files import require_same_workload
from spindle_cli.checkpoint.index import AVERAGE_KEY, Checkpoint, model_names, optimizer_keys
from spindle_cli.errors import InputError
from spindle_cli.workload.file import TrainSettings

if TYPE_CHECKING:
    from spindle_cli.training.optimizing.groups import OptimizerGroups
    from spindle_cli.workload.graph import WorkloadGraph
    from spindle_cli.workload.settings.updates import OptimizerChoice

Names = Mapping[str, Sequence[str]]  # canonical name -> all names of the same tensor, itself among them
# What may be another when a run goes on: it does not change what is trained.
_MAY_DIFFER = ("steps", "decay_steps", "shard_optimizer", "compile", "callbacks", "eval_every", "loader")


@dataclass(frozen=True)
class CarryOver:
    """Names of the workload and of the checkpoint, side by side.

    Attributes:
        kept: name in the workload -> name that it was saved under.
        new: of the workload, what the checkpoint does not have.
        left_out: of the checkpoint, what the workload no longer has.
    """

    kept: Mapping[str, str]
    new: tuple[str, ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, saved: Names, wanted: Names) -> CarryOver:
        """Match what was saved with what the workload wants.

        Where what tasks had apart is one parameter now, it is that of the first of them; what they shared and
        now have apart is copied to each.
        """
        saved_as = {name: canonical for canonical, names in saved.items() for name in names}
        kept: dict[str, str] = {}
        for canonical, names in wanted.items():
            saved_name = next((saved_as[name] for name in names if name in saved_as), None)
            if saved_name is not None:
                kept[canonical] = saved_name
        used = set(kept.values())
        return cls(
            kept,
            tuple(name for name in wanted if name not in kept),
            tuple(name for name in saved if name not in used),
        )


def saved_names(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """All names of every parameter and buffer that a checkpoint has."""
    return with_aliases(model_names(checkpoint.tensors), checkpoint.aliases)


def with_aliases(names: Iterable[str], aliases: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """These names, each with its aliases behind it."""
    return {name: (name, *aliases.get(name, ())) for name in names}


def task_of(name: str, tasks: Iterable[str]) -> str:
    """The task that a name '<task>.<dotted name>' begins with; of several, the longest."""
    fitting = [task for task in tasks if name.startswith(f"{task}.")]
    return max(fitting, key=len, default=name.split(".", 1)[0])


def settings_of_run(train: TrainSettings, dtype: str | None) -> TrainSettings:
    """How a workload is trained by a run that asks for a dtype: it is that of all arithmetic."""
    return train if dtype is None else train.in_full_precision()


def require_same_run(
    checkpoint: Checkpoint,
    fingerprint: str,
    train: TrainSettings,
    groups: Mapping[str, Sequence[str]],
    dtype: str | None,
    where: Path,
) -> None:
    """Refuse to go on with other tasks or train settings than those that the run began with, but for its
    length, where the optimizer's state is, whether layers are compiled, and who loads samples.

    Args:
        fingerprint: of the workload now, and `train`, as `settings_of_run` has them.
        groups: names of the parameters of each optimizer group now.
        dtype: that the run asks for.

    Raises:
        InputError: naming the first that differs.
    """
    require_same_workload(checkpoint, fingerprint, where)
    before = {**checkpoint.train.model_dump(), "dtype": checkpoint.dtype}
    now = {**train.model_dump(), "dtype": dtype}
    for key in now:
        if key not in _MAY_DIFFER and now[key] != before.get(key):
            raise InputError(
                f"{where}: the run was trained with train.{key} = {before.get(key)!r}, "
                f"but the workload now says {now[key]!r}",
                hint="Put the setting back to go on with this run, or begin a new one from it with --from.",
            )
    old, new = checkpoint.train.ramp, train.ramp
    if old is not None and new is not None and old.end != new.end:  # but for it, a run may become longer
        raise InputError(
            f"{where}: the learning rate was to decay until step {old.end}, and now is to until {new.end}",
            hint=f"Say `decay_steps: {old.end}` to go on as it was, or begin a new run from it with --from.",
        )
    _require_same_groups(checkpoint, groups, where)


def _require_same_groups(checkpoint: Checkpoint, groups: Mapping[str, Sequence[str]], where: Path) -> None:
    """The rules are the same, but a function of the user's, or a class's name, may say another thing now."""
    before = {name: group for group, saved in checkpoint.groups.items() for name in saved.parameters}
    now = {name: group for group, names in groups.items() for name in names}
    for name, group in now.items():
        if before.get(name, group) != group:
            raise InputError(
                f"{where}: {name} was trained in optimizer group {before[name]!r}, and is in {group!r} now",
                hint="Put back what train.groups refers to, or begin a new run from this one with --from.",
            )


def carried_over(checkpoint: Checkpoint, graph: WorkloadGraph) -> CarryOver:
    """The parameters, and the buffers that a state_dict would hold, of all that some op uses."""
    from spindle_cli.workload.graph import ParameterTable  # not above: whoever has a graph has torch

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
    from spindle_cli.training.optimizing.optimizer import state_keys  # not above: nothing else needs torch

    missing = sorted(state_keys(now) - state_keys(before))
    if missing and has_state:
        raise InputError(
            f"{where}: with optimizer_args={now.arguments!r} {now.optimizer} keeps "
            f"{', '.join(missing)} of each parameter{of}, which was not saved: the run had "
            f"optimizer_args={before.arguments!r}",
            hint="Put optimizer_args back, or start anew.",
        )
