"""What a step came to, as those see it who train by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property

from spindle_cli.files.run_files import StepMetrics
from spindle_cli.runtime.measuring.outcome import StepOutcome
from spindle_cli.runtime.measuring.work import StepWork
from spindle_cli.runtime.step.losses import LossAccumulator


class Step:
    """A step that has been trained; the same on every rank, but for times.

    All but its number comes from the device, which may still be at it: who asks waits for that. Nothing can
    be set.
    """

    def __init__(self, number: int, read: Callable[[], StepMetrics]) -> None:
        """`number`: counted from 1. `read`: gives what it came to, when it is asked for."""
        self.__dict__["number"] = number
        self.__dict__["_read"] = read

    number: int
    _read: Callable[[], StepMetrics]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Step's {name} cannot be set")

    def __repr__(self) -> str:
        return f"Step({self.number})"

    @cached_property
    def metrics(self) -> StepMetrics:
        """All of it, as in a line of metrics.jsonl."""
        return self._read()

    @property
    def loss(self) -> float:
        """The weighted total of the tasks' losses."""
        return self.metrics.loss

    @property
    def task_losses(self) -> dict[str, float]:
        """Each task's loss over its whole batch, before weighting."""
        return self.metrics.task_losses

    @property
    def learning_rates(self) -> dict[str, float]:
        """That the step's update took, by parameter group."""
        return self.metrics.learning_rates

    @property
    def gradient_norm(self) -> float | None:
        """The norm of all gradients together, before clipping; None where the train settings do not clip."""
        return self.metrics.gradient_norm

    @property
    def loss_scale(self) -> float | None:
        """What the losses were multiplied by before their backward passes; None: by nothing."""
        return self.metrics.loss_scale

    @property
    def skipped(self) -> bool | None:
        """Whether a gradient overflowed, so that the step changed nothing; None where losses are not
        scaled.
        """
        return self.metrics.skipped

    @property
    def seconds(self) -> float:
        """Seconds from the step's beginning to its end."""
        return self.metrics.iteration_s


def metrics_of(
    outcome: StepOutcome,
    accumulator: LossAccumulator,
    due: Collection[str],
    work: StepWork,
    uncounted: tuple[str, ...],
) -> StepMetrics:
    """A step's line.

    Args:
        outcome: that has arrived.
        due: the tasks that it ran; `work`: what that was.
        uncounted: of these, those of which something counts nothing.
    """
    read, seconds = accumulator.read(outcome.losses, due), outcome.seconds
    weights = accumulator.weights_at(outcome.step)
    return StepMetrics(
        step=outcome.step + 1,
        loss=accumulator.total(read.losses, outcome.step),
        task_losses=read.losses,
        iteration_s=seconds,
        samples_per_s=work.samples / seconds,
        uncounted_tasks=uncounted,
        task_weights={name: weights[name] for name in weights if name in due},
        learning_rates=outcome.learning_rates,
        step_values=outcome.step_values,
        gradient_norm=outcome.norm_value,
        loss_scale=outcome.scale_value,
        skipped=outcome.is_skipped,
        tokens_per_s=None if work.tokens is None else work.tokens / seconds,
        peak_share=None if work.peak_s is None else work.peak_s / seconds,
        least_memory_bytes=round(min(read.memory_bytes)),
        most_memory_bytes=round(max(read.memory_bytes)),
        data_wait_s=max(read.data_waits_s),
    )
