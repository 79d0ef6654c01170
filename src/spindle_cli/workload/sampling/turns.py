"""Which tasks run at which step: a pure function of the train settings and the step, the same on every rank,
under every plan, and wherever a run goes on.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from hashlib import sha256
from itertools import accumulate
from typing import TYPE_CHECKING

from spindle_cli.errors import WorkloadError
from spindle_cli.files.parsing import shown
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.sampling import Draw, Every, Sampling

if TYPE_CHECKING:
    from spindle_cli.workload.types import FlowTask, Task

KEY = "train.sampling"
# Steps that are drawn in one go.
_BLOCK = 256


def drawn_number(seed: int, step: int) -> float:
    """A number of [0, 1) for a step: the first 53 bits of sha256("<seed>:<step>"), so that it is the same on
    any machine and needs none of the numbers before it.
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
        self._known = 0
        self._lock = threading.Lock()

    def at(self, step: int) -> str:
        """The task that a step draws: the first whose probability, with those before it, is above the step's
        number.
        """
        number = drawn_number(self._seed, step)
        return self._names[sum(number >= end for end in self._ends)]

    def before(self, task: str, step: int) -> int:
        """How many of the steps before this one draw a task."""
        with self._lock:
            while self._known < step:
                for number in range(self._known, self._known + _BLOCK):
                    self._steps[self.at(number)].append(number)
                self._known += _BLOCK
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
        """The tasks that run at a step, counted from 0, whatever is drawn."""
        due = {name for name, each in self._every.items() if step % each.every == each.offset}
        return self._always | due

    def due(self, step: int) -> tuple[str, ...]:
        """The tasks that run at a step, counted from 0, in the workload's order."""
        due = self.undrawn(step)
        if self._drawn is not None:
            due |= {self._drawn.at(step)}
        return self.in_order(due)

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Some tasks in the workload's order."""
        some = set(names)
        return tuple(name for name in self.names if name in some)

    def before(self, task: str, step: int) -> int:
        """At how many of the steps before this one a task has run: which of its batches this step takes."""
        if task in self._every:
            return self._every[task].runs_before(step)
        if self._drawn is not None and task in self.probabilities:
            return self._drawn.before(task, step)
        return step


def turns_of(train: TrainSettings, tasks: Iterable[Task | FlowTask]) -> Turns:
    """The turns of a workload's tasks; raises what `Turns` raises."""
    return Turns(train.sampling, (task.name for task in tasks), train.seed)
