"""A run's numbers for Weights & Biases; comes with `spindle-cli[wandb]`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spindle_cli.errors import InputError
from spindle_cli.runtime.following.callback import Callback, RunInfo
from spindle_cli.runtime.following.scalars import of_evaluation, of_step
from spindle_cli.runtime.results import Step

if TYPE_CHECKING:
    from spindle_cli.files.runs.records import Evaluation


class WeightsAndBiases(Callback):
    """Logs a run by the `wandb` package, offline unless told otherwise; `wandb sync` sends it later."""

    def __init__(self, project: str = "spindle", mode: str = "offline", **settings: Any) -> None:
        """`mode`: as wandb has it: 'offline', 'online' or 'disabled'. `settings`: more arguments of
        `wandb.init`.

        Raises:
            InputError: wandb is not installed.
        """
        try:
            self._wandb: Any = import_module("wandb")
        except ImportError as error:
            raise InputError(
                f"callbacks: wandb cannot be imported: {error}",
                hint="Install it with `pip install 'spindle-cli[wandb]'`.",
            ) from error
        self._settings = {"project": project, "mode": mode, **settings}
        self._run: Any = None

    def at_start(self, run: RunInfo) -> None:
        """Begin wandb's run."""
        config = {"workload": run.workload, **run.train.model_dump(mode="json")}
        settings = {"dir": str(run.run_dir), "name": run.run_dir.name, "config": config, **self._settings}
        self._run = self._wandb.init(**settings)

    def after_step(self, step: Step) -> None:
        """Log its numbers."""
        self._run.log(of_step(step.metrics), step=step.number)

    def at_evaluation(self, evaluation: Evaluation) -> None:
        """Log its numbers."""
        self._run.log({**of_evaluation(evaluation), "evaluation/step": evaluation.step})

    def at_end(self) -> None:
        """End wandb's run."""
        self._run.finish()
