"""Pipelines as candidates: pieces with their devices, and the order of their passes."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from spindle_cli.account.types import Pass
from spindle_cli.plan.pipelines.lanes import Lanes, ways_to_cut
from spindle_cli.plan.pipelines.search import Pipeline, Search
from spindle_cli.plan.pipelines.sections import sections_of
from spindle_cli.plan.pipelines.timetable import Timetable, messages_s, seconds_of, timetable
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Candidate, UnplacedSlice

# Passes that the shortest search for one way to cut the cluster runs.
BASE_PASSES = 20000
# Pipelines are tried where messages, sums, and what they take of the processor make the best plan so much
# longer, or where it computes so much longer than the bound, as it does if it avoids them; on several types
# of device schedules are as far from the bound for other reasons.
LINKS_MATTER = 0.02
FAR_FROM_BOUND = 0.1
FAR_ON_SEVERAL_TYPES = 0.25


def may_gain(best: Prediction, lower_bound_s: float, far: float = FAR_FROM_BOUND) -> bool:
    """Whether pipelines may be faster than the best plan of other candidates."""
    return best.beyond_compute >= LINKS_MATTER or best.compute_s >= (1 + far) * lower_bound_s


def pipelines(problem: Problem, effort: int, faster_than_s: float = inf) -> Iterator[Candidate]:
    """Candidates in which no parameters are in two lanes, of each way to cut the cluster into lanes; none
    where plans may not order passes.

    Args:
        effort: one search for each level of it, each four times as long as the one before.
        faster_than_s: ways are left out that take at least as long even with all lanes always busy, and so is
            what the search finds that does.
    """
    for lanes, pipeline in _found(problem, effort, faster_than_s):
        yield _candidate(lanes, pipeline, pipeline.timetable)


def bounded(problem: Problem, effort: int, faster_than_s: float = inf) -> Iterator[tuple[Candidate, float]]:
    """Candidates of a problem of micro-batches, in the lanes and with the cuts of `pipelines`: at most so
    many parts of the MetaGraph have begun and not ended as there are lanes, or twice as many. With each, the
    seconds of its lanes' messages.
    """
    for lanes, pipeline in _found(problem, effort, faster_than_s):
        seconds = seconds_of(lanes, pipeline.pieces)
        assert seconds is not None, "what was found has allocations"
        urgency = (1.0,) * len(problem.nodes)
        for most_open in (lanes.count, 2 * lanes.count):
            table = timetable(lanes, pipeline.pieces, seconds, urgency, most_open)
            yield _candidate(lanes, pipeline, table), messages_s(lanes, pipeline.pieces)


def _found(problem: Problem, effort: int, faster_than_s: float) -> Iterator[tuple[Lanes, Pipeline]]:
    sections = sections_of(problem)
    for way in ways_to_cut(problem):
        lanes = Lanes(problem, way)
        if lanes.least_s >= faster_than_s:
            continue
        for level in range(effort + 1):
            best = Search(lanes, sections, seed=level).best(BASE_PASSES * 4**level, faster_than_s)
            yield from ((lanes, pipeline) for pipeline in best)
            if not best:
                break  # a longer search makes them shorter, but not by much


def _candidate(lanes: Lanes, pipeline: Pipeline, table: Timetable) -> Candidate:
    """Pieces in the order of their forward passes, which start when they would if nothing else ran."""
    forward = [index for index, is_backward in table.order if not is_backward]
    place = {index: number for number, index in enumerate(forward)}
    pieces, devices = [], []
    for number, index in enumerate(forward):
        slice_ = pipeline.pieces[index]
        allocation = lanes.of_node[slice_.node][slice_.lane]
        assert allocation is not None, "pieces are where their nodes have allocations"
        devices.append(allocation.devices)
        pieces.append(
            UnplacedSlice(
                slice_.node, slice_.first, slice_.last, allocation.point, float(number), number + 1.0
            )
        )
    order = tuple(Pass(place[index], is_backward) for index, is_backward in table.order)
    return Candidate("spindle", tuple(pieces), tuple(devices), order=order)
