"""What came of a step, for the host to read while the device is busy with the next.

Within a step the host reads nothing from the device: it would have to wait for it, and the device would then
have to wait for the host. So losses and the gradients' norm are copied to the host behind the update, and
looked at one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from spindle_cli.runtime.measuring.timing import Mark, await_mark, has_passed, seconds_between, take_mark
from spindle_cli.runtime.update.gradient_check import GradientCheck

if TYPE_CHECKING:
    from torch import Tensor


class Told(Protocol):
    """What makes results on the host, in place, those of all islands (runtime/islands)."""

    def begin(self) -> None:
        """Start telling the other islands what the values are now."""

    def has_arrived(self) -> bool:
        """Whether `finish` would not wait."""

    def finish(self) -> None:
        """Wait until all islands have told their values."""


@dataclass(frozen=True)
class StepOutcome:
    """A step's results on their way to the host.

    Attributes:
        step: counted from 0.
        losses: as `LossAccumulator.take` gives them. `norm`, `scaling`: as `GradientCheck` has them. All are
            on the host, and not to be looked at before the device has passed `end`.
        learning_rates: that the update took, by parameter group.
        step_values: that forward passes read, by name.
        begin, end: of the step.
        told: on islands, what makes the losses and the norm those of all; None: there are none.
    """

    step: int
    losses: Tensor
    norm: Tensor | None
    scaling: Tensor | None
    learning_rates: dict[str, float]
    step_values: dict[str, float]
    begin: Mark
    end: Mark
    told: Told | None = None

    @classmethod
    def of(
        cls,
        step: int,
        losses: Tensor,
        gradient_check: GradientCheck,
        learning_rates: dict[str, float],
        step_values: dict[str, float],
        begin: Mark,
        tell: Callable[[Sequence[Tensor]], Told] | None = None,
    ) -> StepOutcome:
        """A step that ends now, from what it has left on its device. `tell`: makes of these results those of
        all islands; None: there are none.
        """
        norm, scaling = (
            None if value is None else _to_host(value)
            for value in (gradient_check.norm, gradient_check.scaling)
        )
        on_host = _to_host(losses)
        told = None
        if tell is not None:
            told = tell([on_host] if norm is None else [on_host, norm])
            if losses.device.type == "cpu":  # else the results are not there yet
                told.begin()
        end = take_mark(losses.device)
        return cls(step, on_host, norm, scaling, learning_rates, step_values, begin, end, told)

    def has_arrived(self) -> bool:
        """Whether `wait` would not wait."""
        return has_passed(self.end) and (self.told is None or self.told.has_arrived())

    def wait(self) -> None:
        """Wait until the device has come to the step's end, and all islands have told of theirs."""
        await_mark(self.end)
        if self.told is not None:
            self.told.finish()

    @property
    def norm_value(self) -> float | None:
        """The gradients' norm, where it was worked out; once it has arrived."""
        return None if self.norm is None else self.norm.item()

    @property
    def scale_value(self) -> float | None:
        """What the losses were multiplied by, where they were; once it has arrived."""
        return None if self.scaling is None else self.scaling[0].item()

    @property
    def is_skipped(self) -> bool | None:
        """Whether a gradient has overflowed, so that everything is as before; None: no loss was scaled. Once
        it has arrived.
        """
        return None if self.scaling is None else self.scaling[1].item() > 0

    @property
    def seconds(self) -> float:
        """From the step's beginning to its end; once it has arrived."""
        return seconds_between(self.begin, self.end)


def _to_host(values: Tensor) -> Tensor:
    """A copy on the host; from a CUDA device it arrives later, in memory that torch pins for it."""
    return values.detach().to("cpu", non_blocking=True, copy=True)
