"""A step's and an evaluation's numbers under the names that loggers show them by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spindle_cli.files.run_files import StepMetrics

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
