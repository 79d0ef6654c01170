"""A run's numbers for TensorBoard; comes with `spindle-cli[tensorboard]`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spindle_cli.errors import InputError
from spindle_cli.runtime.following.callback import Callback, RunInfo
from spindle_cli.runtime.following.scalars import of_evaluation, of_step
from spindle_cli.runtime.results import Step

if TYPE_CHECKING:
    from spindle_cli.files.runs.records import Evaluation


class TensorBoard(Callback):
    """Writes event files: `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, folder: str | Path | None = None) -> None:
        """`folder`: of the event files; `tensorboard` in the run's folder if None.

        Raises:
            InputError: TensorBoard is not installed.
        """
        try:
            import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise InputError(
                f"callbacks: tensorboard cannot be imported: {error}",
                hint="Install it with `pip install 'spindle-cli[tensorboard]'`.",
            ) from error
        self._folder = None if folder is None else Path(folder)
        self._writer: Any = None  # torch leaves it untyped

    def at_start(self, run: RunInfo) -> None:
        """Open the event file."""
        writers: Any = import_module("torch.utils.tensorboard.writer")
        folder = self._folder or run.run_dir / "tensorboard"
        # What an earlier process of this run has written of steps that are trained again is left out.
        purge = run.first_step if run.first_step > 1 else None
        self._writer = writers.SummaryWriter(str(folder), purge_step=purge)

    def after_step(self, step: Step) -> None:
        """Write its numbers."""
        self._write(of_step(step.metrics), step.number)

    def at_evaluation(self, evaluation: Evaluation) -> None:
        """Write its numbers."""
        self._write(of_evaluation(evaluation), evaluation.step)

    def at_end(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, scalars: dict[str, float], step: int) -> None:
        assert self._writer is not None, "a run has a start"
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
