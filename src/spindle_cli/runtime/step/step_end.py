"""The end of a rank's step: which parameters each of its updates steps, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from spindle_cli.account.step_end import UpdatePart
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.measuring.timing import Activity, Stopwatch
from spindle_cli.runtime.update.gradient_check import GradientCheck
from spindle_cli.runtime.update.update import Update


@dataclass(frozen=True)
class RankPart:
    """What a rank updates at a time. `groups`: of its program, whose sums it waits for. `names`: of the
    parameters; None: of all that there are.
    """

    groups: tuple[int, ...]
    names: frozenset[str] | None


def rank_parts(parts: Sequence[UpdatePart], pool: GradientPool, part: int) -> tuple[RankPart, ...]:
    """Find what each UPDATE of a program updates, and its STEP, which takes all that no UPDATE has: also what
    this step leaves out, and so has no gradient.

    Args:
        part: of the pool, the program's groups.
    """
    if len(parts) == 1:
        return (RankPart(parts[0].groups, None),)
    made: list[RankPart] = []
    left = frozenset(owned.name for owned in pool.owned_ranges)
    for number, update in enumerate(parts[:-1]):
        names = pool.names_of(part, update.groups)
        names = names | pool.local_names if number == 0 else names
        made.append(RankPart(update.groups, names))
        left -= names
    return (*made, RankPart(parts[-1].groups, left))


@dataclass(frozen=True)
class StepEnd:
    """The update of one step, as a program asks for it. `losses`: of all tasks, which say whether there is
    one.
    """

    update: Update
    losses: Tensor
    stopwatch: Stopwatch

    def check_gradients(self) -> GradientCheck:
        """What all ranks find out of the gradients; collective."""
        self.update.take_gradients()
        with self.stopwatch.timed(Activity.WAIT, cause="norm"):
            return self.update.check_gradients()

    def step_part(self, part: RankPart) -> None:
        """Step some parameters, ahead of `step`."""
        assert part.names is not None, "the last part alone may be all"
        self.update.step_part(self.losses, part.names)

    def step(self, gradient_check: GradientCheck, left: RankPart) -> None:
        """Step those that are not stepped yet, and do what a step does once."""
        self.update.step(self.losses, gradient_check, left.names)
