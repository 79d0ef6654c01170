"""The weights that a run does not train: one file for all of its checkpoints, which give its checksum."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.checkpoint.index import FROZEN_FILE, Checkpoint, FrozenFile, SavedTensor, read_index
from spindle_cli.checkpoint.names import model_key
from spindle_cli.files.run_files import CHECKPOINTS_DIR
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.saving.save import Whole, save_tensors


@dataclass(frozen=True)
class FrozenWeights:
    """What a checkpoint says of the file, and of the tensors in it. `file`: None where nothing is frozen."""

    file: FrozenFile | None
    tensors: dict[str, SavedTensor]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> FrozenWeights:
        """What a checkpoint that was written says."""
        keys = () if checkpoint.frozen is None else checkpoint.frozen.keys
        return cls(checkpoint.frozen, {key: checkpoint.tensors[key] for key in keys})


def frozen_names(model: LocalModel) -> list[str]:
    """Canonical names of the parameters that some op uses and none trains."""
    table = model.table
    return [name for name in model.cuts.by_name if table.users[name] and not table.is_trainable(name)]


def find_frozen(
    run_dir: Path, began: int, model: LocalModel, device: torch.device, whole: Whole
) -> FrozenWeights:
    """The file of the checkpoint that the run has gone on from, or else a new one. Collective.

    Args:
        began: the step of that checkpoint; 0: there is none of this run.
        whole: makes those whole that are shared out.

    Returns:
        On rank 0, what its checkpoints say of it; elsewhere nothing.

    Raises:
        InputError: the file cannot be written.
    """
    names = frozen_names(model)
    if not names:
        return FrozenWeights(None, {})
    known = None
    if began and dist.get_rank() == 0:
        known = FrozenWeights.of(read_index(checkpoint_folder(run_dir, began)))
    is_there = [known is not None and known.file is not None]
    dist.broadcast_object_list(is_there)
    if is_there[0]:
        return known or FrozenWeights(None, {})
    path = run_dir / CHECKPOINTS_DIR / Path(FROZEN_FILE).name
    held = {key: value for key, value in model.parameters.items() if not value.requires_grad}
    digest = hashlib.sha256()
    specs = save_tensors(path, names, held, device, model_key, digest, whole)
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
