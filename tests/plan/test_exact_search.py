"""What exact search is asked, and what is made of its answer."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
from exact_optimum import candidate_of, question_of
from exact_search import Job, Question, answer

from helpers.plans import cluster_of, metaop_of, profile_of
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.search.posed import Posed


def on_types() -> Posed:
    metaops = [
        metaop_on_types("t/a", 6, {"fast": 1.0, "slow": 2.0}, batch_size=6),
        metaop_on_types("t/b", 3, {"fast": 2.0, "slow": 1.0}, batch_size=6, inputs=("t/a",)),
        metaop_on_types("u/c", 5, {"fast": 1.0, "slow": 1.5}, batch_size=6),
    ]
    return ProblemPoser().posed(profile_on_types(*metaops), cluster_of_types({"fast": 2, "slow": 3}))


def on_one_type() -> Posed:
    curve = {1: 4.0, 2: 2.5, 4: 2.0}
    metaops = [
        metaop_of("t/a", 4, curve),
        metaop_of("t/b", 2, curve, inputs=("t/a",)),
        metaop_of("u/c", 7, curve),
    ]
    return ProblemPoser().posed(profile_of(*metaops), cluster_of(4))


@pytest.mark.parametrize("posed", [on_types(), on_one_type()])
def test_the_schedule_to_start_from_is_one_of_the_question_and_comes_back_as_it_was(posed: Posed) -> None:
    question, points = question_of(posed, pieces=2, most=3)
    problem = posed.problem
    for node in problem.nodes:
        jobs = [job for job in question.start if job.node == node.index]
        assert sum(job.num_ops for job in jobs) == node.num_ops
        assert max(job.num_ops for job in jobs) <= -(-node.num_ops // 2)
        assert all(points[node.index][job.allocation] in node.points for job in jobs)
    by_node = sorted(question.start, key=lambda job: (job.node, job.start_s))
    candidate = candidate_of(problem, by_node, points)
    assert candidate.end_s == pytest.approx(question.start_end_s)
    assert {piece.node for piece in candidate.pieces} == set(range(len(problem.nodes)))
    for job in question.start:
        took = [piece for piece in candidate.pieces if piece.node == job.node]
        assert any(piece.start_s <= job.start_s + 1e-9 and job.start_s < piece.end_s for piece in took)


def test_of_several_types_the_cheapest_the_fastest_and_those_in_use_are_asked_about() -> None:
    posed = on_types()
    question, points = question_of(posed, pieces=1, most=2)
    for node, own in zip(posed.problem.nodes, points, strict=True):
        assert len(own) < len(node.points)
        assert min(point.op_s for point in own) == min(point.op_s for point in node.points)
        assert [each.devices for each in question.allocations[node.index]] == [point.counts for point in own]
    assert question.devices == (2, 3)


def test_jobs_with_a_gap_between_them_stay_apart() -> None:
    posed = on_one_type()
    question, points = question_of(posed, pieces=2, most=3)
    first, second = (job for job in question.start if job.node == 0)
    others = [job for job in question.start if job.node != 0]
    same = [replace(first, allocation=0), replace(second, allocation=0)]
    op_s = points[0][0].op_s

    def pieces(gap_s: float) -> int:
        later = replace(same[1], start_s=same[0].start_s + same[0].num_ops * op_s + gap_s)
        jobs: list[Job] = [same[0], later, *sorted(others, key=lambda job: (job.node, job.start_s))]
        return sum(piece.node == 0 for piece in candidate_of(posed.problem, jobs, points).pieces)

    assert pieces(0.0) == pieces(1e-3) == 1
    assert pieces(1.0) == 2


@pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="needs ortools (the extra `exact`)")
def test_a_schedule_that_waits_for_nothing_is_made_shorter() -> None:
    question, _ = question_of(on_one_type(), pieces=1, most=3)
    late = tuple(replace(job, start_s=job.start_s + 10.0) for job in question.start)
    found = answer(Question(**{**question.__dict__, "start": late}), seconds=5.0, workers=1)
    assert max(job.start_s for job in found) < max(job.start_s for job in late)
