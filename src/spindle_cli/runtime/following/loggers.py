"""A run's numbers for TensorBoard and for Weights & Biases."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spindle_cli.errors import InputError
from spindle_cli.files.run_files import StepMetrics
from spindle_cli.runtime.following.callback import Callback, RunInfo
from spindle_cli.runtime.results import Step

if TYPE_CHECKING:
    from spindle_cli.files.runs.records import Evaluation


# Of a line of metrics.jsonl, what is one number.
_ALONE = (
    "loss",
    "gradient_norm",
    "loss_scale",
    "skipped",
    "iteration_s",
    "samples_per_s",
    "tokens_per_s",
    "peak_share",
    "least_memory_bytes",
    "most_memory_bytes",
    "data_wait_s",
)
# What is one number for each of several.
_FOR_EACH = ("task_losses", "task_weights", "learning_rates", "step_values")


def of_step(metrics: StepMetrics) -> dict[str, float]:
    """What is known of a step: `train/loss`, `train/task_losses/<task>` and so on."""
    values = {f"train/{name}": getattr(metrics, name) for name in _ALONE}
    for name in _FOR_EACH:
        values.update((f"train/{name}/{key}", value) for key, value in getattr(metrics, name).items())
    return {name: float(value) for name, value in values.items() if value is not None}


def of_evaluation(evaluation: Evaluation) -> dict[str, float]:
    """`evaluation/<task>/loss` and `evaluation/<task>/<metric>`."""
    values = {"loss": evaluation.loss, **evaluation.metrics}
    return {f"evaluation/{evaluation.task}/{name}": value for name, value in values.items()}


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
