"""A search for a shorter schedule by constraint programming (ortools, the extra `exact`).

In a process of its own, which reads the question and writes the answer as JSON: ortools and the planner's
solver cannot be loaded into one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Of the schedule to start from.
TICKS = 100_000


@dataclass(frozen=True)
class Allocation:
    """Seconds of an op, and how many devices of each type it takes."""

    op_s: float
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """Some next ops of a node on one of its allocations.

    Attributes:
        allocation: its index among the node's.
        start_s: seconds after the start of the schedule.
    """

    node: int
    allocation: int
    num_ops: int
    start_s: float


@dataclass(frozen=True)
class Question:
    """Which schedule is shortest.

    Attributes:
        devices: how many there are of each type.
        allocations: of each node.
        inputs: of each node, those that it waits for.
        order: the nodes, producers first.
        start: a schedule to start from, by node in order of start: each of its jobs stays one, and may change
            its allocation and its start.
    """

    devices: tuple[int, ...]
    allocations: tuple[tuple[Allocation, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    start: tuple[Job, ...]

    @property
    def start_end_s(self) -> float:
        """When the schedule to start from ends."""
        return max(job.start_s + job.num_ops * self._op_s(job) for job in self.start)

    def _op_s(self, job: Job) -> float:
        return self.allocations[job.node][job.allocation].op_s


def answer(question: Question, seconds: float, workers: int) -> tuple[Job, ...]:
    """What `search` finds in a process of its own.

    Raises:
        CalledProcessError: it failed.
    """
    asked = json.dumps({"question": asdict(question), "seconds": seconds, "workers": workers})
    done = subprocess.run(
        [sys.executable, __file__], input=asked, check=True, stdout=subprocess.PIPE, text=True
    )
    return tuple(Job(**job) for job in json.loads(done.stdout))


def search(question: Question, seconds: float, workers: int) -> tuple[Job, ...]:
    """The jobs of the shortest schedule that is found in so long, on so many threads; in order of node, and
    of each node in order of start.
    """
    from ortools.sat.python import cp_model

    # Durations are rounded up, so that what is found is a schedule in seconds, too.
    tick_s = question.start_end_s / TICKS
    model = _Model(cp_model.CpModel(), tick_s, 2 * TICKS)
    # Each job starts a tick later than the one before, so that it starts from a schedule in ticks, too.
    later = {job: number for number, job in enumerate(sorted(question.start, key=lambda job: job.start_s))}
    for node in question.order:
        model.add_node(question, node, later)
    model.add_devices(question.devices)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    model.of.minimize(model.end)
    status = solver.solve(model.of)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return question.start
    return tuple(
        Job(
            job.node,
            next(index for index, chosen in enumerate(model.chosen[number]) if solver.value(chosen)),
            job.num_ops,
            solver.value(model.starts[number]) * tick_s,
        )
        for number, job in enumerate(model.jobs)
    )


class _Model:
    """The jobs of a question as intervals, each on one of its node's allocations."""

    def __init__(self, of: Any, tick_s: float, horizon: int) -> None:
        self.of = of
        self.tick_s, self.horizon = tick_s, horizon
        self.end = of.new_int_var(0, horizon, "C")
        self.jobs: list[Job] = []
        self.starts: list[Any] = []
        self.chosen: list[list[Any]] = []
        self._ends: dict[int, Any] = {}
        self._intervals: list[tuple[Any, tuple[int, ...]]] = []

    def add_node(self, question: Question, node: int, later: Mapping[Job, int]) -> None:
        """Its jobs, one behind the other, when its inputs have ended.

        Args:
            later: by how many ticks each starts later than in seconds, to begin with.
        """
        before = [self._ends[producer] for producer in question.inputs[node]]
        for job in question.start:
            if job.node == node:
                before = [self._add_job(job, question.allocations[node], before, later[job])]
        (self._ends[node],) = before
        self.of.add(self.end >= self._ends[node])

    def _add_job(self, job: Job, allocations: Sequence[Allocation], before: Sequence[Any], later: int) -> Any:
        start, end = (self.of.new_int_var(0, self.horizon, f"{len(self.jobs)}.{what}") for what in "se")
        self.of.add_hint(start, int(job.start_s / self.tick_s) + later)
        chosen = []
        for index, allocation in enumerate(allocations):
            literal = self.of.new_bool_var(f"{len(self.jobs)}.{index}")
            length = int(job.num_ops * allocation.op_s / self.tick_s) + 1
            interval = self.of.new_optional_interval_var(start, length, end, literal, "")
            self._intervals.append((interval, allocation.devices))
            self.of.add_hint(literal, index == job.allocation)
            chosen.append(literal)
        self.of.add_exactly_one(chosen)
        for other in before:
            self.of.add(start >= other)
        self.jobs.append(job)
        self.starts.append(start)
        self.chosen.append(chosen)
        return end

    def add_devices(self, devices: Sequence[int]) -> None:
        """No more of each type are busy than there are."""
        for kind, number in enumerate(devices):
            taking = [(interval, taken[kind]) for interval, taken in self._intervals if taken[kind]]
            self.of.add_cumulative([each for each, _ in taking], [count for _, count in taking], number)


def _main() -> None:
    asked = json.load(sys.stdin)
    own = asked["question"]
    question = Question(
        devices=own["devices"],
        allocations=tuple(tuple(Allocation(**each) for each in node) for node in own["allocations"]),
        inputs=own["inputs"],
        order=own["order"],
        start=tuple(Job(**job) for job in own["start"]),
    )
    jobs = search(question, asked["seconds"], asked["workers"])
    json.dump([asdict(job) for job in jobs], sys.stdout)


if __name__ == "__main__":
    _main()
