"""The paper's construction (arXiv 2409.03365, section 3.3 and 3.4): MetaLevel by MetaLevel, wave by wave.

For each level the continuous problem gives every MetaOp a mix of two neighbouring allocations (its bi-point).
A wave is then made greedily:

    propose   fill the devices with the widest allocations that are left, one of each MetaOp
    extend    give devices that stay idle to the slices with most left to do
    align     cut all slices to the shortest
    conclude  what has been cut off is left for the next wave

The paper runs waves one after another, and levels one after another. Here the same jobs can also be timed
without waves waiting for each other, and without levels doing so, to see what that alone brings
(docs/benchmarks/ablation.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.bound.pricing import Column, column_of
from spindle_cli.plan.problem import Node, Problem
from spindle_cli.plan.search.listing import Job, Timed, time_jobs

Wave = list[Job]
Level = list[Wave]


def wavefront(problem: Problem) -> list[Level]:
    """The waves of each level."""
    levels: dict[int, list[Node]] = {}
    for i in problem.order:
        levels.setdefault(problem.nodes[i].level, []).append(problem.nodes[i])
    return [_level(problem, levels[number]) for number in sorted(levels)]


def wave_after_wave(problem: Problem, levels: Sequence[Level]) -> list[Timed]:
    """Every slice of a wave starts when the wave before has ended altogether."""
    now_s = 0.0
    timed: list[Timed] = []
    for level in levels:
        for wave in level:
            ends_s = [now_s + ops * problem.rates[node][point][1] for node, point, ops in wave]
            timed += [(job, now_s, end_s) for job, end_s in zip(wave, ends_s, strict=True)]
            now_s = max(ends_s)
    return timed


def level_after_level(problem: Problem, levels: Sequence[Level]) -> list[Timed]:
    """Slices wait for their MetaOp's slice before and for devices; levels for the level before."""
    now_s = 0.0
    timed: list[Timed] = []
    for level in levels:
        jobs = [job for wave in level for job in wave]
        own = time_jobs(_without_edges(problem), jobs)
        timed += [(job, now_s + start_s, now_s + end_s) for job, start_s, end_s in own]
        now_s += max(end_s for _, _, end_s in own)
    return timed


def overlapping(problem: Problem, levels: Sequence[Level]) -> list[Timed]:
    """Slices wait for their inputs and for devices only."""
    return time_jobs(problem, [job for level in levels for wave in level for job in wave])


def _without_edges(problem: Problem) -> Problem:
    nodes = tuple(replace(node, inputs=(), consumers=()) for node in problem.nodes)
    return replace(problem, nodes=nodes)


def _level(problem: Problem, nodes: Sequence[Node]) -> Level:
    """The waves of MetaOps that do not depend on each other."""
    alone = tuple(replace(node, index=i, inputs=(), consumers=()) for i, node in enumerate(nodes))
    level_problem = replace(problem, nodes=alone, order=tuple(range(len(alone))))
    allocations = lower_bound(level_problem).ops
    left = {node.index: _whole_ops(node, mix) for node, mix in zip(nodes, allocations, strict=True)}
    waves: Level = []
    while left:
        wave = [_Slice(node, tuples[0], tuples[0][0]) for node, tuples in left.items()]
        wave = _align(problem, _extend(problem, _propose(problem, wave), left))
        for piece in wave:
            piece.tuple_[1] -= piece.ops
        waves.append([(piece.node, piece.point, piece.ops) for piece in wave])
        left = {node: kept for node, tuples in left.items() if (kept := [t for t in tuples if t[1]])}
    return waves


class _Slice:
    """A slice of a wave in the making: ops of one of its node's tuples, perhaps on a wider point than its
    own.
    """

    def __init__(self, node: int, tuple_: list[int], point: int) -> None:
        self.node = node
        self.tuple_ = tuple_  # [index of the point, ops left]
        self.point = point
        self.ops = tuple_[1]


def _whole_ops(node: Node, mix: Sequence[tuple[Column, float]]) -> list[list[int]]:
    """The bi-point in whole ops: [index of the point, ops], the widest first."""
    whole = [int(ops + 1e-9) for _, ops in mix]
    rest = [ops - floor for (_, ops), floor in zip(mix, whole, strict=True)]
    for i in sorted(range(len(mix)), key=lambda i: -rest[i])[: node.num_ops - sum(whole)]:
        whole[i] += 1
    columns = [column_of(point) for point in node.points]
    tuples = [[columns.index(column), ops] for (column, _), ops in zip(mix, whole, strict=True) if ops]
    return tuples[::-1]


def _propose(problem: Problem, candidates: Sequence[_Slice]) -> list[_Slice]:
    """The widest candidates that fit side by side."""
    free = problem.num_devices
    wave: list[_Slice] = []
    for piece in sorted(candidates, key=lambda piece: -problem.rates[piece.node][piece.point][0]):
        devices = problem.rates[piece.node][piece.point][0]
        if devices <= free:
            wave.append(piece)
            free -= devices
    return wave


def _extend(problem: Problem, wave: list[_Slice], left: Mapping[int, list[list[int]]]) -> list[_Slice]:
    """Widen slices as far as devices are idle, those with most left to do first."""

    def left_s(piece: _Slice) -> float:
        return sum(ops * problem.rates[piece.node][point][1] for point, ops in left[piece.node])

    free = problem.num_devices - sum(problem.rates[piece.node][piece.point][0] for piece in wave)
    for piece in sorted(wave, key=lambda piece: -left_s(piece)):
        rates = problem.rates[piece.node]
        while piece.point + 1 < len(rates) and rates[piece.point + 1][0] - rates[piece.point][0] <= free:
            free -= rates[piece.point + 1][0] - rates[piece.point][0]
            piece.point += 1
    return wave


def _align(problem: Problem, wave: list[_Slice]) -> list[_Slice]:
    """Cut every slice to as many whole ops as the shortest lasts, at least one."""
    shortest_s = min(piece.ops * problem.rates[piece.node][piece.point][1] for piece in wave)
    for piece in wave:
        op_s = problem.rates[piece.node][piece.point][1]
        if op_s:
            piece.ops = min(piece.ops, max(1, int(shortest_s / op_s + 1e-9)))
    return wave
