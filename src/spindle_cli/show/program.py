"""The document of `spindle show --rank R --json`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.program.communicators import communicator_memory
from spindle_cli.program.text import format_action
from spindle_cli.program.types import Program


class CommunicatorView(Model):
    """A communicator of a rank: what actions name as `on INDEX`. `memory_bytes`: of the rank's device.
    `senders`: of messages, whose go over it.
    """

    index: int
    purpose: str
    devices: tuple[int, ...]
    memory_bytes: int
    senders: tuple[int, ...] = ()


class RankReport(Artifact):
    """One rank's program: its actions in their text form, in order, and its communicators."""

    KIND: ClassVar[str] = "rank-program"

    schema_: Annotated[Literal["spindle.rank-program/1"], Field(alias="schema")] = "spindle.rank-program/1"
    rank: int
    actions: tuple[str, ...]
    communicators: tuple[CommunicatorView, ...] = ()

    @classmethod
    def of(cls, program: Program, rank: int) -> RankReport:
        """The program of a rank that the plan has."""
        taken = communicator_memory(program, rank)
        own = tuple(
            CommunicatorView(
                index=index,
                purpose=str(program.communicators[index].purpose),
                devices=program.communicators[index].ranks,
                memory_bytes=num_bytes,
                senders=program.communicators[index].senders,
            )
            for index, num_bytes in taken.items()
        )
        actions = tuple(map(format_action, program.actions[rank]))
        return cls(rank=rank, actions=actions, communicators=own)
