"""Placing a draft and judging it: by the predicted iteration, inside every device's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from spindle_cli.costs.memory import DeviceMemory, device_memory
from spindle_cli.plan.assemble import exact_slices
from spindle_cli.plan.placement import ROOMY, TASTES, DoesNotFitError, Taste, place
from spindle_cli.plan.predict import Prediction, predict
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Draft, Placed
from spindle_cli.plan.types import Slice


@dataclass(frozen=True)
class Judged:
    """A draft with devices and exact times, the memory that it needs, and how long it will take."""

    placed: Placed
    slices: tuple[Slice, ...]
    memory: tuple[DeviceMemory, ...]
    prediction: Prediction

    def rank(self) -> tuple[float, float, int]:
        """Less is better: the iteration, then the schedule, then the number of slices."""
        return self.prediction.iteration_s, self.prediction.compute_s, len(self.slices)


def judge(problem: Problem, draft: Draft, tastes: Sequence[Taste] = TASTES) -> Judged | None:
    """The best placement of a draft, as it says itself or by taste; None if none fits the devices' memory."""
    own = [] if draft.devices is None else [Placed(draft, draft.devices)]
    for placements in (own or _placements(problem, draft, tastes), _placements(problem, draft, (ROOMY,))):
        fitting = [judged for placed in placements if (judged := measure(problem, placed))]
        if fitting:
            return min(fitting, key=Judged.rank)
    return None


def _placements(problem: Problem, draft: Draft, tastes: Iterable[Taste]) -> Iterator[Placed]:
    for taste in tastes:
        try:
            yield place(problem, draft, taste)
        except DoesNotFitError:
            continue


def measure(problem: Problem, placed: Placed) -> Judged | None:
    """Exact times, memory and prediction of a placed draft; None if a device's memory is too small."""
    slices = exact_slices(problem, placed)
    memory = memory_of(problem, slices)
    if any(
        need.total_bytes > capacity
        for need, capacity in zip(memory, problem.cluster.memory_bytes, strict=True)
    ):
        return None
    prediction = predict(problem, placed, max(piece.end_s for piece in slices))
    return Judged(placed, slices, memory, prediction)


def memory_of(problem: Problem, slices: Sequence[Slice]) -> tuple[DeviceMemory, ...]:
    """What each device holds."""
    profile = problem.profile
    return device_memory(profile.metaops, slices, problem.num_devices, profile.optimizer_state_per_param)
