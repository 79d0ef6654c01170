"""The predicted iteration: the schedule, and what transfers and gradient sums add to it.

A plain account of a step, slice by slice: forward in the order of the schedule, backward in reverse, messages
between them in every batch (`passes.py`); behind the last batch's backward pass the gradient sums, then the
optimizer's step; where the devices of a sum share the optimizer's state, the gathers of what they have
updated, before the first batch's forward pass uses it. A device takes part in one sum or gather at a time.
What moves is said by `account/traffic.py`. (`spindle simulate` is a finer and independent account of when.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from spindle_cli.account.traffic import Traffic
from spindle_cli.account.types import ParameterGroup
from spindle_cli.costs.links import per_node, spread_all_gather_s, spread_all_reduce_s
from spindle_cli.plan.placing.passes import Passes, Times
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.types import Slice


@dataclass(frozen=True)
class Prediction:
    """Seconds of an iteration: of one batch, on average over those of a step.

    Attributes:
        iteration_s: all of it: `compute_s` plus the other three.
        compute_s: the schedule alone.
        transfer_s: added by transfers, and by forward and backward passes that do not fit each other as their
            sums do.
        gradient_sum_s: added by gradient sums, and by gathers of what they have updated.
        optimizer_s: added by the optimizer's step.
    """

    iteration_s: float
    compute_s: float
    transfer_s: float
    gradient_sum_s: float
    optimizer_s: float


def predict(
    problem: Problem, slices: Sequence[Slice], traffic: Traffic, compute_s: float, steps_s: Sequence[float]
) -> Prediction:
    """Predict the iteration of a placed schedule that takes `compute_s` by itself.

    Args:
        slices: in order of start.
        traffic: what they move.
        steps_s: the optimizer's step on each device.
    """
    batches = problem.profile.accumulate
    passes, sums = Passes(problem, slices, traffic), _Sums(problem, slices, traffic)
    plain = passes.run({})
    plain_s = max(compute_s, *plain.free_s)
    gathered = passes.run(sums.gathered_s(passes.forward_s)) if sums.shares_state else plain
    first_s = max(plain_s, *gathered.free_s)
    last, last_s = (gathered, first_s) if batches == 1 else (plain, plain_s)
    summed_s = sums.summed_s(last)
    with_sums_s = max(last_s, *summed_s)
    ready_s = (max(times) for times in zip(summed_s, last.free_s, strict=True))
    with_step_s = max(with_sums_s, *(ready + step for ready, step in zip(ready_s, steps_s, strict=True)))
    added_s = first_s - plain_s + with_sums_s - last_s
    return Prediction(
        iteration_s=plain_s + (added_s + with_step_s - with_sums_s) / batches,
        compute_s=compute_s,
        transfer_s=plain_s - compute_s,
        gradient_sum_s=added_s / batches,
        optimizer_s=(with_step_s - with_sums_s) / batches,
    )


class _Sums:
    """The sums and gathers of a step.

    Devices that take part in the same sums are of one kind, and free at the same time.
    """

    def __init__(self, problem: Problem, slices: Sequence[Slice], traffic: Traffic) -> None:
        self._problem = problem
        self._slices = slices
        self._sums = traffic.sums
        self.shares_state = bool(self._sums) and problem.profile.optimizer_state_sharded
        taking_part: list[list[int]] = [[] for _ in range(problem.num_devices)]
        of_devices = {devices: number for number, devices in enumerate(dict.fromkeys(self._devices()))}
        for devices, number in of_devices.items():
            for device in devices:
                taking_part[device].append(number)
        kinds = {part: kind for kind, part in enumerate(dict.fromkeys(map(tuple, taking_part)))}
        self._kind_of = [kinds[tuple(part)] for part in taking_part]
        self._num_kinds = len(kinds)
        self._kinds_in = {
            devices: [kind for part, kind in kinds.items() if number in part]
            for devices, number in of_devices.items()
        }
        self._spread = {devices: per_node(devices, problem.cluster) for devices in of_devices}

    def _devices(self) -> Iterator[tuple[int, ...]]:
        return (group.devices for group in self._sums)

    def summed_s(self, backward: Times) -> list[float]:
        """When the last sum of each device ends; 0 where it takes part in none.

        A group can be summed when every slice that uses it has run its op backward.
        """
        free_s = [0.0] * self._num_kinds
        take_s = self._seconds(spread_all_gather_s if self.shares_state else spread_all_reduce_s)
        for group, seconds in zip(self._sums, take_s, strict=True):
            self._take(group, self._ready_s(group, backward), seconds, free_s)
        return [free_s[kind] for kind in self._kind_of]

    def gathered_s(self, forward_s: Sequence[float]) -> dict[int, float]:
        """When each slice may start forward so that what it uses has been gathered when it comes to it; the
        last group to be summed is gathered first.

        Args:
            forward_s: of each slice, its forward pass.
        """
        free_s = [0.0] * self._num_kinds
        not_before_s: dict[int, float] = {}
        take_s = self._seconds(spread_all_gather_s)
        for group, seconds in zip(reversed(self._sums), reversed(take_s), strict=True):
            end_s = self._take(group, 0.0, seconds, free_s)
            for index, op in zip(group.slices, group.first_ops, strict=True):
                piece = self._slices[index]
                before_s = forward_s[index] * (op - piece.ops[0]) / piece.num_ops
                not_before_s[index] = max(not_before_s.get(index, 0.0), end_s - before_s)
        return not_before_s

    def _seconds(self, formula: Callable[..., float]) -> list[float]:
        cluster = self._problem.cluster
        known: dict[tuple[int, tuple[int, ...]], float] = {}
        for group in self._sums:
            key = (group.num_bytes, self._spread[group.devices])
            if key not in known:
                known[key] = formula(*key, cluster)
        return [known[group.num_bytes, self._spread[group.devices]] for group in self._sums]

    def _take(self, group: ParameterGroup, ready_s: float, seconds: float, free_s: list[float]) -> float:
        """Let a group's devices sum or gather as soon as all are free; when that ends."""
        kinds = self._kinds_in[group.devices]
        end_s = max(ready_s, max(free_s[kind] for kind in kinds)) + seconds
        for kind in kinds:
            free_s[kind] = end_s
        return end_s

    def _ready_s(self, group: ParameterGroup, backward: Times) -> float:
        """When each of the slices has run its op backward; a slice runs its last op first."""
        latest_s = 0.0
        for index, op in zip(group.slices, group.first_ops, strict=True):
            piece = self._slices[index]
            start_s, end_s = backward.start_s[index], backward.end_s[index]
            latest_s = max(latest_s, start_s + (end_s - start_s) * (piece.ops[1] - op) / piece.num_ops)
        return latest_s
