"""How the samples of a task are loaded: by how many processes, and how far ahead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, model_validator

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Model, require_known_keys
from spindle_cli.files.parsing import shown

Workers = Annotated[int, Field(ge=0, le=1024)]
Prefetch = Annotated[int, Field(ge=1, le=1024)]


class _OnlyKnown(Model):
    """A mapping below `train`, where a key that is passed over would be a setting that is lost."""

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        require_known_keys(data, cls.model_fields)
        return data


class TaskLoader(_OnlyKnown):
    """What one task has otherwise than all others.

    Attributes:
        workers: As in `loader`; absent: the same as there.
        prefetch: As in `loader`; absent: the same as there.
    """

    workers: Workers | None = None
    prefetch: Prefetch | None = None


class LoaderSettings(_OnlyKnown):
    """How samples are loaded, on each node.

    Attributes:
        workers: Processes that load a task's batches; with 0 each device's own process loads what it needs of
            a map-style dataset, in a thread, and a stream is read by one process.
        prefetch: Batches that each of them has ready.
        tasks: What single tasks have otherwise.
    """

    workers: Workers = 0
    prefetch: Prefetch = 2
    tasks: dict[str, TaskLoader] = Field(default_factory=dict)

    def of(self, task: str) -> Loading:
        """A task's."""
        own = self.tasks.get(task, TaskLoader())
        return Loading(
            self.workers if own.workers is None else own.workers,
            self.prefetch if own.prefetch is None else own.prefetch,
        )

    def require_known(self, tasks: Iterable[str], where: str) -> None:
        """Refuse settings of a task that is not there.

        Raises:
            InputError: naming it.
        """
        known = tuple(tasks)
        for name in self.tasks:
            if name not in known:
                raise InputError(
                    f"{where}: train.loader.tasks has {shown(name)}, and the workload has no such task",
                    hint=f"Its tasks are {', '.join(known)}.",
                )


@dataclass(frozen=True)
class Loading:
    """One task's settings, as in `LoaderSettings`."""

    workers: int
    prefetch: int
