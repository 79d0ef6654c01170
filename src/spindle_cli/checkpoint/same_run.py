"""Whether a run may go on from a checkpoint: with the tasks, the train settings and the optimizer groups that
it began with. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from spindle_cli.checkpoint.files import require_same_workload
from spindle_cli.checkpoint.index import Checkpoint
from spindle_cli.errors import InputError
from spindle_cli.workload.file import TrainSettings

# What may be another when a run goes on: it does not change what is trained.
_MAY_DIFFER = ("steps", "decay_steps", "shard_optimizer", "compile", "callbacks", "eval_every", "loader")


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
