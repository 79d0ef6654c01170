"""The weights that a run does not train: one file for all of its checkpoints, which give its checksum. Those
that an operator may move by itself are in every checkpoint instead.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.checkpoint.index import (
    FROZEN_FILE,
    Checkpoint,
    FrozenFile,
    SavedTensor,
    model_key,
    read_index,
)
from spindle_cli.errors import InputError
from spindle_cli.files.run_files import CHECKPOINTS_DIR
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.saving.save import Whole, save_tensors


@dataclass(frozen=True)
class FrozenWeights:
    """What a checkpoint says of the file, and of the tensors in it. `file`: None where nothing is frozen."""

    file: FrozenFile | None
    tensors: dict[str, SavedTensor]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> FrozenWeights:
        """Return what a checkpoint that was written says of its frozen weights."""
        keys = () if checkpoint.frozen is None else checkpoint.frozen.keys
        return cls(checkpoint.frozen, {key: checkpoint.tensors[key] for key in keys})


def frozen_names(model: LocalModel) -> list[str]:
    """Canonical names of the parameters that some op uses, and none trains or may move."""
    table, moving = model.table, moving_names(model)
    return [
        name
        for name in model.cuts.by_name
        if table.users[name] and not table.is_trainable(name) and name not in moving
    ]


def moving_names(model: LocalModel) -> set[str]:
    """Canonical names of those that none trains, and that an op which is not split uses: it may change them,
    as one does that moves a teacher or a codebook. Ops that are split are known not to. And of those that are
    moving averages of trained ones.
    """
    table, tasks = model.table, model.graph.tasks
    whole = {(name, op.index) for name, task in tasks.items() for op in task.ops if op.coupled}
    by_operators = {
        name for name in model.cuts.by_name if not table.is_trainable(name) and whole & {*table.users[name]}
    }
    return by_operators | averages(model)


def averages(model: LocalModel) -> set[str]:
    """Canonical names of the moving averages of trained parameters."""
    return {slow for average in model.graph.following for slow, _ in average.pairs}


def moved_here(model: LocalModel) -> set[str]:
    """Those of `moving_names` that this rank moves: others may have them as they began."""
    used = {
        name
        for local in model.slices.values()
        for op in local.wired.ops
        if op.coupled
        for name in model.table.of_op(local.wired.task.task.name, op.parameters)
    }
    return (used & moving_names(model)) | averages(model)


def find_frozen(run_dir: Path, began: int, model: LocalModel, whole: Whole) -> FrozenWeights:
    """The file of the checkpoint that the run has gone on from, or else a new one. Collective.

    Args:
        began: the step of that checkpoint; 0: there is none of this run.
        whole: makes those whole that are shared out.

    Returns:
        On rank 0, what its checkpoints say of it; elsewhere nothing.

    Raises:
        InputError: the file cannot be written; or that checkpoint's has what an operator may have moved.
    """
    names = frozen_names(model)
    if not names:
        return FrozenWeights(None, {})
    frozen = None
    if began and dist.get_rank() == 0:
        frozen = FrozenWeights.of(read_index(checkpoint_folder(run_dir, began)))
    kept_keys = [None if frozen is None or frozen.file is None else set(frozen.file.keys)]
    dist.broadcast_object_list(kept_keys, group=host_group())
    if kept_keys[0] is not None:
        _check_unmoved(kept_keys[0], model)
        return frozen or FrozenWeights(None, {})
    path = run_dir / CHECKPOINTS_DIR / Path(FROZEN_FILE).name
    held = {key: value for key, value in model.parameters.items() if not value.requires_grad}
    digest = hashlib.sha256()
    specs = save_tensors(path, names, held, model_key, digest, whole)
    if dist.get_rank() != 0:
        return FrozenWeights(None, {})
    tensors = {
        key: SavedTensor(shape=spec.shape, dtype=str(spec.dtype).removeprefix("torch."))
        for key, spec in specs.items()
    }
    num_bytes = path.stat().st_size
    return FrozenWeights(
        FrozenFile(num_bytes=num_bytes, keys=tuple(tensors), sha256=digest.hexdigest()), tensors
    )


def _check_unmoved(keys: set[str], model: LocalModel) -> None:
    """A run that began when this was not known has them as they began, whatever it has trained since."""
    stale = next((name for name in sorted(moving_names(model)) if model_key(name) in keys), None)
    if stale is not None:
        raise InputError(
            f"the run's checkpoints do not have {stale!r} as an operator has moved it",
            hint="Begin a new run: `spindle launch --from` takes over what this one has trained.",
        )
