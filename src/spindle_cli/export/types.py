"""What `spindle export` reports."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact


class Exported(Artifact):
    """The document of `spindle export --json`. `step`: of the checkpoint; `skipped`: newer ones that are
    damaged, for people.
    """

    KIND: ClassVar[str] = "exported"

    schema_: Annotated[Literal["spindle.exported/1"], Field(alias="schema")] = "spindle.exported/1"
    file: str
    run_dir: str
    step: int
    tasks: tuple[str, ...]
    tensors: int
    num_bytes: int
    skipped: tuple[str, ...] = ()
