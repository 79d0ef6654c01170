"""One worker of a run whose steps are timed: `torchrun ... -m step_times REQUEST.json OUT`.

Rank 0 writes when each step began, in seconds, a line each.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from spindle_cli.files.request import RunRequest
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.runtime import training, worker


def main() -> None:
    """Entry point of a rank."""
    source, out = map(Path, sys.argv[1:])
    environment = WorkerEnvironment.read()
    step, begins = training.Training.step, []

    def noted(self: training.Training, *arguments: Any, **settings: Any) -> None:
        begins.append(time.perf_counter())
        step(self, *arguments, **settings)

    with mock.patch.object(training.Training, "step", noted):
        worker.run(RunRequest.read(source), environment)
    if environment.rank == 0:
        out.write_text("\n".join(map(str, begins)), encoding="utf-8")


if __name__ == "__main__":
    main()
