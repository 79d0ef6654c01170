"""A run's checkpoints as files: which are whole, and which are kept. No torch.

`<run>/checkpoints/step-NNNNNN/` holds a shard per worker, `rank-NNNNN.safetensors`, and the index (index.py),
which says what is in which; weights that are not trained are in one file beside these folders. A folder is
written beside its place and renamed, so that one with this name is whole unless something has damaged it
since.

Tensors have the names of names.py; a shard has all of one or boxes of it, by keys from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spindle_cli.checkpoint.damage import damage
from spindle_cli.checkpoint.index import Checkpoint, read_index
from spindle_cli.errors import InputError
from spindle_cli.files.run_files import CHECKPOINTS_DIR, model_path


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest whole checkpoint of a run. `skipped`: newer ones that are not, each with why, for people."""

    folder: Path
    checkpoint: Checkpoint
    skipped: tuple[str, ...]


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return model_path(run_dir, step).parent


def find_checkpoint(run_dir: Path, *, step: int | None = None, reads_all: bool = False) -> FoundCheckpoint:
    """The newest checkpoint that is whole.

    Args:
        run_dir: the run's folder.
        step: take the one after this step, and no other.
        reads_all: compare every shard's checksum too, not only its size.

    Raises:
        InputError: there is none, or no such folder; says what is wrong with those that are there.
    """
    require_folder(run_dir)
    skipped: dict[str, list[str]] = {}  # what is wrong -> where: with what all of them share, once
    for number, folder in reversed(_folders(run_dir)):
        if step is not None and number != step:
            continue
        try:
            checkpoint = read_index(folder)
        except InputError as error:
            skipped.setdefault(error.message, []).append(folder.name)
            continue
        problem = (
            damage(folder, checkpoint, reads_all=reads_all)
            if checkpoint.step == number
            else f"its index is of step {checkpoint.step}"
        )
        if problem is None:
            return FoundCheckpoint(folder, checkpoint, _said(skipped))
        skipped.setdefault(problem, []).append(folder.name)
    raise InputError(
        "\n  ".join((f"{run_dir}: there is no checkpoint to go on from", *_said(skipped))),
        hint="Start the run anew; with --checkpoint-every it saves one every so many steps.",
    )


def require_folder(run_dir: Path) -> None:
    """Refuse what is no folder, where a run is to be.

    Raises:
        InputError: it is none.
    """
    if not run_dir.is_dir():
        what = "a file, not the folder of a run" if run_dir.exists() else "there is no such folder"
        raise InputError(f"{run_dir}: {what}", hint="Name the folder of a run, such as runs/<workload>-1.")


def _said(skipped: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    return tuple(f"{', '.join(names)} cannot be used: {problem}" for problem, names in skipped.items())


def require_steps_left(found: FoundCheckpoint, total_steps: int) -> None:
    """Refuse to go on from a checkpoint at or behind the run's end.

    Raises:
        InputError: it is.
    """
    if found.checkpoint.step >= total_steps:
        raise InputError(
            f"{found.folder}: the run has done {found.checkpoint.step} steps already, "
            f"and is to end after {total_steps}",
            hint="Give the number of steps at which it is to end with --steps.",
        )


def require_same_workload(checkpoint: Checkpoint, fingerprint: str, where: Path) -> None:
    """Refuse to resume a run with another workload.

    Raises:
        InputError: it is another.
    """
    if checkpoint.fingerprint not in (None, fingerprint):
        raise InputError(
            f"{where}: the run has other tasks than the plan: its workload was {checkpoint.fingerprint}, "
            f"the plan's is {fingerprint}",
            hint="Begin a run in a folder of its own with --from, which takes over what both have.",
        )


def locate_checkpoint(path: Path) -> tuple[Path, int | None]:
    """A run's folder, or that of one of its checkpoints, as the run's folder and a step; None: the newest."""
    number = path.name.removeprefix("step-")
    if path.parent.name == CHECKPOINTS_DIR and number.isdecimal():
        return path.parent.parent, int(number)
    return path, None


def forget_old(run_dir: Path, newest_step: int, keep: int, *, own: Collection[int], began: int) -> None:
    """Delete what is older than the last `keep` whole checkpoints up to `newest_step`.

    Args:
        newest_step: of the one that was just saved, which always stays.
        own: steps after which this run has saved since it was started: these are whole.
        began: the step that it went on from then. What lies behind it and is not its own is damaged, or of an
            attempt that was given up, and keeps nothing else from staying.

    Raises:
        OSError: one cannot be deleted.
    """
    until = [(step, folder) for step, folder in reversed(_folders(run_dir)) if step <= newest_step]
    kept = 0
    for step, folder in until:
        if kept >= keep:
            shutil.rmtree(folder)
        elif step in own or step == newest_step or (step <= began and _is_whole(folder)):
            kept += 1


def _is_whole(folder: Path) -> bool:
    """By its index and its files' sizes."""
    try:
        return damage(folder, read_index(folder), reads_all=False) is None
    except InputError:
        return False


def _folders(run_dir: Path) -> list[tuple[int, Path]]:
    """Every checkpoint's folder, by step, whole or not."""
    found = [
        (int(number), folder)
        for folder in (run_dir / CHECKPOINTS_DIR).glob("step-*")
        if (number := folder.name.removeprefix("step-")).isdecimal()
    ]
    return sorted(found)
