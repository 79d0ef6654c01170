"""How long a worker takes until its first step has ended, stage by stage."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from spindle_cli.files.request import RunRequest
from spindle_cli.files.run_files import StartUp


@dataclass
class StartClock:
    """Notes when each stage of the start ended; see `StartUp` for their names.

    By the wall clock, as it goes on from what the launcher noted.
    """

    request: RunRequest
    _ends: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.request.started_s is not None:
            self._ends["checks"] = self.request.started_s
        self.ends("processes")

    def ends(self, stage: str) -> None:
        """A stage ends now; one that has ended before stays as it was."""
        self._ends.setdefault(stage, time.time())

    def start_up(self) -> StartUp | None:
        """All of it; None where the launcher has not said when it began."""
        before = self.request.begun_s
        if before is None:
            return None
        stages: dict[str, float] = {}
        for stage, end in self._ends.items():
            stages[stage] = max(0.0, end - before)  # a clock that was set back meanwhile
            before = max(before, end)
        return StartUp(first_step_s=sum(stages.values()), stages=stages)
