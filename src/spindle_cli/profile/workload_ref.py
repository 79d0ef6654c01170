"""Which workload a profile and a plan are for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from spindle_cli.files.artifact import Model
from spindle_cli.workload.settings.lengths import TaskLengths

if TYPE_CHECKING:
    from spindle_cli.workload.graph import WorkloadGraph


class WorkloadRef(Model):
    """Which workload: its name, the fingerprint of its MetaGraph, and how to load it again.

    `source`: a workload file or function. `lengths`: by task, of those whose batches have several shapes,
    what was seen of them, and which were traced, measured and planned for.
    """

    name: str
    fingerprint: str
    source: str
    lengths: dict[str, TaskLengths] = Field(default_factory=dict)

    @classmethod
    def of(cls, graph: WorkloadGraph, source: str) -> WorkloadRef:
        """Refer to a workload that was loaded from `source`."""
        return cls(
            name=graph.workload.name, fingerprint=graph.fingerprint, source=source, lengths=graph.lengths
        )

    @property
    def length_lines(self) -> tuple[str, ...]:
        """What was planned for, for people."""
        return tuple(lengths.line(task) for task, lengths in self.lengths.items())
