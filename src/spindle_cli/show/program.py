"""The document of `spindle show --rank R --json`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact
from spindle_cli.program.text import format_action
from spindle_cli.program.types import Program


class RankReport(Artifact):
    """One rank's program: its actions in their text form, in order."""

    KIND: ClassVar[str] = "rank-program"

    schema_: Annotated[Literal["spindle.rank-program/1"], Field(alias="schema")] = "spindle.rank-program/1"
    rank: int
    actions: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, rank: int) -> RankReport:
        """The program of a rank that the plan has."""
        return cls(rank=rank, actions=tuple(map(format_action, program.actions[rank])))
