"""What came of a step, for the host to read while the device is busy with the next.

Within a step the host reads nothing from the device: it would have to wait for it, and the device would then
have to wait for the host. So losses and the gradients' norm are copied to the host behind the update, and
looked at one step later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spindle_cli.runtime.measuring.timing import Mark, await_mark, has_passed, seconds_between, take_mark
from spindle_cli.runtime.update.verdict import Verdict

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StepOutcome:
    """A step's results on their way to the host.

    Attributes:
        step: counted from 0.
        losses: as `LossBoard.take` gives them. `norm`, `scaling`: as `Verdict` has them. All on the host, and
            not to be looked at before the device has passed `end`.
        learning_rates: that the update took, by parameter group.
        begin, end: of the step.
    """

    step: int
    losses: Tensor
    norm: Tensor | None
    scaling: Tensor | None
    learning_rates: dict[str, float]
    begin: Mark
    end: Mark

    @classmethod
    def of(
        cls, step: int, losses: Tensor, verdict: Verdict, learning_rates: dict[str, float], begin: Mark
    ) -> StepOutcome:
        """A step that ends now, from what it has left on its device."""
        norm, scaling = (None if each is None else _to_host(each) for each in (verdict.norm, verdict.scaling))
        on_host = _to_host(losses)
        return cls(step, on_host, norm, scaling, learning_rates, begin, take_mark(losses.device))

    def has_arrived(self) -> bool:
        """Whether `wait` would not wait."""
        return has_passed(self.end)

    def wait(self) -> None:
        """Wait until the device has come to the step's end."""
        await_mark(self.end)

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
