"""Which tasks run at which step: a pure function of the train settings and the step, the same on every rank,
under every plan, and wherever a run goes on.

A step has the same number of batches of each task that runs in it; a task's batches are taken one after the
other, at the steps that run it. The sets of tasks that steps run are found before a run: one plan is made for
each.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING

from spindle_cli.errors import WorkloadError
from spindle_cli.files.artifact import shown
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.types import Draw, Every, Sampling, TaskShare

if TYPE_CHECKING:
    from spindle_cli.workload.types import FlowTask, Task


KEY = "train.sampling"
# Steps that are drawn in one go.
_BLOCK = 256
# Each set takes a plan of its own, which is made, checked and linked.
MOST_SETS = 16
LONGEST_PERIOD = 10_000


def drawn_number(seed: int, step: int) -> float:
    """Return a number of [0, 1) for a step: the first 53 bits of sha256("<seed>:<step>"), so that it is the
    same on any machine and needs none of the numbers before it.
    """
    whole = int.from_bytes(sha256(f"{seed}:{step}".encode()).digest()[:8], "big")
    return (whole >> 11) / 2**53


class _Drawn:
    """At which steps each task of a draw runs, as far as it was asked for; threads may share it."""

    def __init__(self, draw: Draw, seed: int) -> None:
        self._names = tuple(draw.probabilities)
        self._ends = [*accumulate(draw.probabilities.values())][:-1]
        self._seed = seed
        self._steps = {name: array("q") for name in self._names}
        self._counted_steps = 0
        self._lock = threading.Lock()

    def at(self, step: int) -> str:
        """Return the task that a step draws: the first whose probability, with those before it, is above the
        step's number.
        """
        number = drawn_number(self._seed, step)
        return self._names[sum(number >= end for end in self._ends)]

    def before(self, task: str, step: int) -> int:
        """Return how many of the steps before this one draw a task."""
        with self._lock:
            while self._counted_steps < step:
                for number in range(self._counted_steps, self._counted_steps + _BLOCK):
                    self._steps[self.at(number)].append(number)
                self._counted_steps += _BLOCK
            return bisect_left(self._steps[task], step)


class Turns:
    """The tasks of each step. `names`: of all tasks, in the workload's order."""

    def __init__(self, sampling: Sampling | None, names: Iterable[str], seed: int) -> None:
        """`seed`: of the train settings.

        Raises:
            WorkloadError: the settings name a task that is not there, or leave steps without any.
        """
        self.names = tuple(names)
        self._every = {} if sampling is None else dict(sampling.every)
        draw = None if sampling is None else sampling.draw
        for name in (*self._every, *(draw.weights if draw else ())):
            if name not in self.names:
                raise WorkloadError(
                    f"{KEY}: there is no task {shown(name)}; the tasks are {', '.join(self.names)}"
                )
        self.probabilities = {} if draw is None else draw.probabilities
        self._drawn = None
        if draw is not None:
            self._drawn = _Drawn(draw, seed if draw.seed is None else draw.seed)
        self._always = frozenset(self.names) - set(self._every) - set(self.probabilities)

    @property
    def periods(self) -> tuple[Every, ...]:
        """The periods of the tasks that run at every so many steps."""
        return tuple(self._every.values())

    def undrawn(self, step: int) -> frozenset[str]:
        """Return the tasks that run at a step, counted from 0, whatever is drawn."""
        due = {name for name, period in self._every.items() if step % period.every == period.offset}
        return self._always | due

    def due(self, step: int) -> tuple[str, ...]:
        """Return the tasks that run at a step, counted from 0, in the workload's order."""
        due = self.undrawn(step)
        if self._drawn is not None:
            due |= {self._drawn.at(step)}
        return self.in_order(due)

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Some tasks in the workload's order."""
        some = set(names)
        return tuple(name for name in self.names if name in some)

    def before(self, task: str, step: int) -> int:
        """Count the steps before this one that run a task: which of its batches this step takes."""
        if task in self._every:
            return self._every[task].runs_before(step)
        if self._drawn is not None and task in self.probabilities:
            return self._drawn.before(task, step)
        return step


def turns_of(train: TrainSettings, tasks: Iterable[Task | FlowTask]) -> Turns:
    """Return the turns of a workload's tasks; raises what `Turns` raises."""
    return Turns(train.sampling, (task.name for task in tasks), train.seed)


def sets_of(turns: Turns) -> tuple[TaskShare, ...]:
    """Return the sets that occur and the share of the steps of each, the most frequent first; by name where
    equal.

    What `every` makes comes back after the least common multiple of its periods, so these are all of them. Of
    a draw every task is drawn sooner or later.

    Raises:
        WorkloadError: a step would have no task, the period is too long to go through, or there are too many
            sets.
    """
    period = lcm(*(of_task.every for of_task in turns.periods)) if turns.periods else 1
    if period > LONGEST_PERIOD:
        periods = ", ".join(str(of_task.every) for of_task in turns.periods)
        raise WorkloadError(
            f"{KEY}: `every` of {periods} come back to the same tasks after {period} steps only, more than "
            f"{LONGEST_PERIOD}",
            hint="Choose numbers with common factors, such as 2, 4 and 8.",
        )
    shares: dict[tuple[str, ...], float] = {}
    for step in range(period):
        undrawn = turns.undrawn(step)
        drawn = [({name}, share) for name, share in turns.probabilities.items()] or [(set(), 1.0)]
        for names, share in drawn:
            due = turns.in_order(undrawn | names)
            if not due:
                raise WorkloadError(
                    f"{KEY}: no task runs at step {step} (counted from 0), nor every {period} steps after it",
                    hint="Leave a task out of `every`, so that it runs at every step, or give one the offset "
                    "that is missing.",
                )
            shares[due] = shares.get(due, 0.0) + share / period
    if len(shares) > MOST_SETS:
        raise WorkloadError(
            f"{KEY}: the steps run {len(shares)} different sets of tasks, and each takes a plan of its own; "
            f"at most {MOST_SETS} are planned",
            hint="Give tasks the same `every` and `offset`, or draw among fewer.",
        )
    ordered = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
    return tuple(TaskShare(tasks=tasks, share=share) for tasks, share in ordered)


def sampled_sets(turns: Turns) -> tuple[TaskShare, ...]:
    """What `sets_of` gives, or nothing where every step runs all tasks; raises what `sets_of` raises."""
    sets = sets_of(turns)
    return () if [task_share.tasks for task_share in sets] == [turns.names] else sets


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
        """Return the tasks that run at a step."""
        return self.turns.due(step)

    def of_batch(self, number: int) -> tuple[str, ...]:
        """Return the tasks of which a batch of the run, in the order in which all are run, has samples."""
        return self.of_step(number // self.batches_per_step)

    def own_number(self, task: str, number: int) -> int:
        """Return which of a task's batches the run's batch `number` takes."""
        step, place = divmod(number, self.batches_per_step)
        of_island = self.turns.before(task, step) * self.batches_per_step + place
        return of_island * self.islands + self.island

    def own_numbers(self, steps: range) -> Mapping[str, range]:
        """Return, by task, which of its batches these steps take."""
        per_step, before = self.batches_per_step * self.islands, self.turns.before
        return {
            task: range(
                before(task, steps.start) * per_step + self.island,
                before(task, steps.stop) * per_step + self.island,
                self.islands,
            )
            for task in self.turns.names
        }
