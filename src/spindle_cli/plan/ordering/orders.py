"""Orders of all passes that are worth a try for placed slices.

* Tasks in groups: of each group all passes forward, then backward in reverse, then the next group's. With a
  task to each, no device holds the activations of more than one at once; it is what training task after task
  does.
* As they come: each device always runs what can start first, of equals backward passes before forward ones,
  or what has most to come behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.account.types import Pass
from spindle_cli.plan.ordering.timed import takes
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.types import Slice


def in_groups(problem: Problem, slices: Sequence[Slice]) -> Iterator[tuple[Pass, ...]]:
    """Orders in which at most 1, 2, 4, ... parts of the MetaGraph that do not hang together are begun and not
    ended; in order of the slices' start, which `slices` are in.
    """
    parts: dict[int, list[int]] = {}
    for index, slice_ in enumerate(slices):
        parts.setdefault(problem.part_of[slice_.metaop], []).append(index)
    size = 1
    while size < len(parts):
        in_order = list(parts.values())
        order: list[Pass] = []
        for first in range(0, len(in_order), size):
            group = sorted(index for part in in_order[first : first + size] for index in part)
            order += mirrored(group)
        yield tuple(order)
        size *= 2


def mirrored(indices: Sequence[int]) -> list[Pass]:
    """Slices, which are in order of start, all forward and then all backward in reverse."""
    order = [Pass(index, is_backward=False) for index in indices]
    return [*order, *(Pass(index, is_backward=True) for index in reversed(indices))]


def as_they_come(problem: Problem, slices: Sequence[Slice], *, longest_first: bool) -> tuple[Pass, ...]:
    """The order in which passes start if no device waits for one while it could run another.

    Args:
        longest_first: of passes that can start together, the one with most to come behind it goes first; else
            a backward pass, which gives memory back.
    """
    passes = _Passes.of(problem, slices)
    missing = {pass_: len(before) for pass_, before in passes.before.items()}
    free_s = [0.0] * passes.num_kinds
    ready_s = {pass_: 0.0 for pass_, count in missing.items() if not count}
    taken_s = dict.fromkeys(missing, 0.0)  # when those that a pass takes from have ended, as far as they have
    order: list[Pass] = []
    while ready_s:

        def urgency(pass_: Pass) -> tuple[float, float, Pass]:
            start_s = max(ready_s[pass_], *(free_s[kind] for kind in passes.kinds[pass_.slice_index]))
            rest_s = passes.rest_s[pass_]
            return start_s, -rest_s if longest_first else not pass_.is_backward, pass_

        chosen = min(ready_s, key=urgency)
        end_s = urgency(chosen)[0] + passes.seconds[chosen]
        del ready_s[chosen]
        order.append(chosen)
        for kind in passes.kinds[chosen.slice_index]:
            free_s[kind] = end_s
        for follower in passes.followers[chosen]:
            missing[follower] -= 1
            taken_s[follower] = max(taken_s[follower], end_s)
            if not missing[follower]:
                ready_s[follower] = taken_s[follower]
    return tuple(order)


@dataclass(frozen=True)
class _Passes:
    """What there is to order.

    Attributes:
        kinds: of each slice, the kinds of devices that it runs on; those of a kind run the same slices.
        rest_s: of each pass, the longest chain of passes that begins with it.
    """

    before: Mapping[Pass, Sequence[Pass]]
    followers: Mapping[Pass, Sequence[Pass]]
    seconds: Mapping[Pass, float]
    rest_s: Mapping[Pass, float]
    kinds: Sequence[Sequence[int]]
    num_kinds: int

    @classmethod
    def of(cls, problem: Problem, slices: Sequence[Slice]) -> _Passes:
        before = takes(problem, slices)
        followers = _followers(before)
        op_s = [problem.op_s_of(slice_) for slice_ in slices]
        seconds = {
            pass_: slices[pass_.slice_index].num_ops * op_s[pass_.slice_index][pass_.is_backward]
            for pass_ in before
        }
        rest_s: dict[Pass, float] = {}
        for pass_ in reversed(mirrored(range(len(slices)))):
            rest_s[pass_] = seconds[pass_] + max((rest_s[later] for later in followers[pass_]), default=0.0)
        kinds, num_kinds = _kinds_of_devices(slices, problem.num_devices)
        return cls(before, followers, seconds, rest_s, kinds, num_kinds)


def _followers(before: Mapping[Pass, Sequence[Pass]]) -> dict[Pass, list[Pass]]:
    """For each pass, those that wait for it. `before`: for each, those that it waits for."""
    followers: dict[Pass, list[Pass]] = {pass_: [] for pass_ in before}
    for pass_, earlier_passes in before.items():
        for earlier in earlier_passes:
            followers[earlier].append(pass_)
    return followers


def _kinds_of_devices(slices: Sequence[Slice], num_devices: int) -> tuple[list[list[int]], int]:
    """The kinds of devices that each slice runs on, and how many there are: devices that run the same slices
    are of one kind.
    """
    runs: list[list[int]] = [[] for _ in range(num_devices)]
    for index, slice_ in enumerate(slices):
        for device in slice_.devices:
            runs[device].append(index)
    distinct = dict.fromkeys(map(tuple, runs))
    kinds: list[list[int]] = [[] for _ in slices]
    for kind, run in enumerate(distinct):
        for index in run:
            kinds[index].append(kind)
    return kinds, len(distinct)
