"""What is done to parameters beside the optimizer's update: bounds, and averages that move with others.

The names of parameters are canonical ones (`ParameterTable`), but for those of a `Move`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Moment

# The hint of refusals of what changes parameters in other ways.
DECLARE = (
    "Declare it in the workload instead, to be done by whoever holds the parameters: "
    "follows=[Follows(teacher, student, decay)] for a moving average, with a function of the step for a "
    "decay that changes, and 'before_forward' where forward begins with it; constraints=[Constraint("
    "parameter, clamp=(low, high))] for bounds, with unit_norm=dim for vectors of length 1."
)


@dataclass(frozen=True)
class Move:
    """What a forward makes of a parameter at its start: `slow` becomes `decay` times itself and the rest of
    `fast`, both dotted names in its task's module. `place`: in the user's code.
    """

    slow: str
    fast: str
    decay: float
    place: str | None


@dataclass(frozen=True)
class Constrained:
    """A trained parameter, by canonical name, that is changed after every update. See `Constraint`."""

    name: str
    clamp: tuple[float | None, float | None] | None
    unit_norm: int | None

    @property
    def treats_elements_alone(self) -> bool:
        """Whether a part of the parameter can be treated without the rest."""
        return self.unit_norm is None

    def apply(self, values: Tensor) -> None:
        """Change values of the parameter: of all of it, or where elements are treated alone, of any."""
        if self.clamp is not None:
            values.clamp_(*self.clamp)
        else:
            assert self.unit_norm is not None, "a constraint says one of them"
            values.copy_(nn.functional.normalize(values, dim=self.unit_norm))


@dataclass(frozen=True)
class Following:
    """Parameters that are moving averages of trained ones. See `Follows`.

    Attributes:
        pairs: canonical names, of the average and of what it follows.
        decay: by the step, counted from 0.
        forwards_of: the task whose forward makes them by itself, at its start: once for each of its batches,
            of which a step may have several; None: they are declared.
    """

    pairs: tuple[tuple[str, str], ...]
    decay: float | Callable[[int], float]
    when: Moment
    forwards_of: str | None = None

    def decay_at(self, step: int) -> float:
        """Return the decay in a step, counted from 0.

        Raises:
            WorkloadError: the workload's function gives no number from 0 to 1.
        """
        decay = self.decay(step) if callable(self.decay) else self.decay
        number = decay.item() if isinstance(decay, Tensor) and decay.numel() == 1 else decay
        if not isinstance(number, int | float) or not 0 <= number <= 1:
            raise WorkloadError(
                f"follows: decay gave {decay!r:.80} for step {step}, expected a number from 0 to 1"
            )
        return float(number)


def move_towards(slow: list[Tensor], fast: list[Tensor], decay: float) -> None:
    """Give moving averages their next values, in place: `slow.mul_(decay).add_(fast, alpha=1 - decay)`."""
    if slow:  # torch takes no empty lists
        torch._foreach_mul_(slow, decay)
        torch._foreach_add_(slow, fast, alpha=1 - decay)
