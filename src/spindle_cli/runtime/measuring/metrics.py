"""metrics.jsonl: rank 0 writes a line per step while the run goes on."""

from __future__ import annotations

from pathlib import Path

from spindle_cli.errors import InputError
from spindle_cli.files.run_files import METRICS_FILE, StepMetrics, forget_metrics_after


class MetricsLog:
    """A run's metrics file; every line is whole when it is seen."""

    def __init__(self, run_dir: Path, steps_done: int = 0) -> None:
        """`steps_done`: whose lines are kept, where a run is gone on with; without any it is started anew.

        Raises:
            InputError: the file cannot be written.
        """
        self._path = run_dir / METRICS_FILE
        forget_metrics_after(run_dir, steps_done)
        try:
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written: {error.strerror}") from error

    def write(self, metrics: StepMetrics) -> None:
        """Append a step.

        Raises:
            InputError: the disk is full.
        """
        try:
            self._file.write(metrics.to_line())
            self._file.flush()
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()
