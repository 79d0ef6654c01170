"""What `spindle export` is asked for, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact

PeftPart = Literal["adapters", "merged"]
DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportOptions:
    """What of a run's model is written, and how.

    Attributes:
        task: this task alone, its names without the task's.
        module: of the task's module, this one alone, its names without that of the module.
        peft: of a PEFT model: its adapters alone, or the model as it was before, the adapters merged into it.
        like: a path of the workload file's `init_from`: what was taken from there, under its names there.
        shard_bytes: the most in one file of a folder; None: one file, or where a folder is written anyway
            `DEFAULT_SHARD_BYTES`.
        workload: where the workload is, if not where the run found it.
        averaged: the moving average of the weights in place of these; what has none as it is.
    """

    task: str | None = None
    module: str | None = None
    peft: PeftPart | None = None
    like: str | None = None
    shard_bytes: int | None = None
    workload: str | None = None
    averaged: bool = False

    @property
    def is_folder(self) -> bool:
        """Whether a folder is written, as Hugging Face's `save_pretrained` does."""
        return not (self.shard_bytes is None and self.peft is None and self.like is None)


class Exported(Artifact):
    """The document of `spindle export --json`.

    Attributes:
        file: The file, or the folder, that was written.
        files: Files in the folder.
        run_dir: The run's folder.
        step: Step of the checkpoint.
        tasks: Tasks that are in it.
        tensors: How many tensors.
        num_bytes: Their bytes.
        skipped: Newer checkpoints that are damaged, for people.
    """

    KIND: ClassVar[str] = "exported"

    schema_: Annotated[Literal["spindle.exported/1"], Field(alias="schema")] = "spindle.exported/1"
    file: str
    files: tuple[str, ...] = ()
    run_dir: str
    step: int
    tasks: tuple[str, ...]
    tensors: int
    num_bytes: int
    skipped: tuple[str, ...] = ()
