"""Follow metrics.jsonl while rank 0 writes it."""

from __future__ import annotations

from pathlib import Path

from spindle_cli.files.run_files import METRICS_FILE, StepMetrics


class MetricsFollower:
    """Hands out each new line of a run's metrics.jsonl once, from the file's present end on."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS_FILE
        self._offset = self._path.stat().st_size if self._path.exists() else 0
        self._rest = b""

    def new(self) -> list[StepMetrics]:
        """The steps that have been written since the last call; a line without its end waits for the next.

        Raises:
            InputError: a line that is not one.
        """
        if not self._path.exists():
            return []
        if self._path.stat().st_size < self._offset:
            self._offset, self._rest = 0, b""  # begun anew
        with self._path.open("rb") as file:
            file.seek(self._offset)
            read = file.read()
        self._offset += len(read)
        *lines, self._rest = (self._rest + read).split(b"\n")
        return [StepMetrics.from_line(line, where=str(self._path)) for line in lines]
