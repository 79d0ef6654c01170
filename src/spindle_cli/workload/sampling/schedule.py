"""Which tasks each batch of a run is of, and which of a task's own batches it takes.

A step has the same number of batches of each task that runs in it; a task's batches are taken one after the
other, at the steps that run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spindle_cli.workload.sampling.turns import Turns


@dataclass(frozen=True)
class Schedule:
    """`batches_per_step`: of each task that runs. Steps and batches are counted from 0. `islands`: that train
    on a batch of their own each, at the same time; `island`: of which this is the schedule.
    """

    turns: Turns
    batches_per_step: int = 1
    islands: int = 1
    island: int = 0

    def of_step(self, step: int) -> tuple[str, ...]:
        """The tasks that run at a step."""
        return self.turns.due(step)

    def of_batch(self, number: int) -> tuple[str, ...]:
        """The tasks of which a batch of the run, in the order in which all are run, has samples."""
        return self.of_step(number // self.batches_per_step)

    def own_number(self, task: str, number: int) -> int:
        """Which of a task's own batches the run's batch `number` takes."""
        step, place = divmod(number, self.batches_per_step)
        own = self.turns.before(task, step) * self.batches_per_step + place
        return own * self.islands + self.island

    def own_numbers(self, steps: range) -> Mapping[str, range]:
        """By task, which of its batches these steps take."""
        per_step, before = self.batches_per_step * self.islands, self.turns.before
        return {
            task: range(
                before(task, steps.start) * per_step + self.island,
                before(task, steps.stop) * per_step + self.island,
                self.islands,
            )
            for task in self.turns.names
        }
