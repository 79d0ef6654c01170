"""Slices with times for each of their passes, in an order of all passes."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from spindle_cli.account.activations import edges_between
from spindle_cli.account.types import Pass
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.types import Slice


def timed(problem: Problem, slices: Sequence[Slice], order: Sequence[Pass]) -> tuple[Slice, ...]:
    """Give slices in order of start, each pass as early as its devices and what it takes allow. Times are
    whole ticks of a decimal fraction of a second, durations rounded up with a tick on top, as in
    `exact_slices`.

    Args:
        order: of both passes of all `slices`, by their indices; none before what it takes.
    """
    ticks_per_s = problem.ticks_per_s
    before = takes(problem, slices)
    ended: dict[Pass, int] = {}
    started: dict[Pass, int] = {}
    free = [0] * problem.num_devices
    for pass_ in order:
        slice_ = slices[pass_.slice_index]
        op_s = problem.op_s_of(slice_)[pass_.is_backward]
        ready = max((ended[earlier] for earlier in before[pass_]), default=0)
        start = max(ready, *(free[device] for device in slice_.devices))
        end = start + ceil(slice_.num_ops * op_s * ticks_per_s) + 1
        started[pass_], ended[pass_] = start, end
        for device in slice_.devices:
            free[device] = end
    with_times = []
    for index, slice_ in enumerate(slices):
        forward, backward = Pass(index, is_backward=False), Pass(index, is_backward=True)
        times = {
            "start_s": started[forward] / ticks_per_s,
            "end_s": ended[forward] / ticks_per_s,
            "backward_start_s": started[backward] / ticks_per_s,
            "backward_end_s": ended[backward] / ticks_per_s,
        }
        with_times.append((started[forward], slice_.model_copy(update=times)))
    with_times.sort(key=lambda item: item[0])
    return tuple(slice_ for _, slice_ in with_times)


def takes(problem: Problem, slices: Sequence[Slice]) -> dict[Pass, list[Pass]]:
    """For each pass, those that have to be through before it."""
    before: dict[Pass, list[Pass]] = {}
    for index in range(len(slices)):
        forward = Pass(index, is_backward=False)
        before[forward], before[Pass(index, is_backward=True)] = [], [forward]
    for edge in edges_between(slices, problem.profile.by_name):
        producer, consumer = edge.producer, edge.consumer
        before[Pass(consumer, is_backward=False)].append(Pass(producer, is_backward=False))
        before[Pass(producer, is_backward=True)].append(Pass(consumer, is_backward=True))
    return before
