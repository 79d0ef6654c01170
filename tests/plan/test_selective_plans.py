"""What is recomputed but for what takes longest: how much, of which ops, and what a plan says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.check.run import check_plan
from spindle_cli.costs.beyond_curve import Again, selectively_saved_bytes
from spindle_cli.errors import NoPlanError
from spindle_cli.plan.best.micro_batches import in_micro_batches
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.cutting.allocations import recomputed
from spindle_cli.plan.file import plan_text
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback, Point, make_point
from spindle_cli.plan.search.memory_fallback import describe, given_up
from spindle_cli.plan.search.room import CutPart
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, OpMemory, Profile

MIB = 2**20
ONE = cluster_of(1)


def memory(kept_mib: float, selective_mib: float | None, first_op: int = 0, tp: int = 1) -> OpMemory:
    selective = None if selective_mib is None else (0, round(selective_mib * MIB))
    kept = (0, round(kept_mib * MIB))
    return OpMemory(
        tp=tp,
        first_op=first_op,
        kept_bytes=kept,
        forward_bytes=kept,
        backward_bytes=(0, 0),
        first_backward_bytes=(0, 0),
        selective_bytes=selective,
    )


def net(
    name: str, num_ops: int, kept_mib: int, selective_mib: float | None = None, **more: Any
) -> MetaOpProfile:
    """Ops that take 1 s forward and 2 backward, and hand on 1 MiB; recomputed but for what takes longest they
    run a quarter of their forward pass again.
    """
    settings: dict[str, Any] = {
        "activation_bytes_per_op": kept_mib * MIB,
        "inner_output_bytes": MIB,
        "memory": (memory(kept_mib, selective_mib),),
        "selective_share": None if selective_mib is None else 0.25,
    }
    return metaop_of(name, num_ops, {1: 3.0}, **(settings | more))


def ops_of(fallback: MemoryFallback) -> tuple[dict[str, int], dict[str, int]]:
    return dict(fallback.recompute), dict(fallback.selective)


@pytest.mark.parametrize(
    ("share", "whole", "selective"),
    [
        (0.0, {}, {}),
        (4 / 51, {}, {"a/m": 1}),
        (4.1 / 51, {}, {"a/m": 2}),
        (12 / 51, {}, {"a/m": 3}),
        (12.1 / 51, {"b/m": 1}, {"a/m": 3}),
        (36 / 51, {"b/m": 3}, {"a/m": 3}),
        (36.1 / 51, {"b/m": 3, "a/m": 1}, {"a/m": 2}),
        (1.0, {"b/m": 3, "a/m": 3}, {}),
    ],
)
def test_what_saves_most_for_a_second_goes_first_in_part_before_the_rest(
    share: float, whole: dict[str, int], selective: dict[str, int]
) -> None:
    """Of a's 9 MiB an op 4 are saved for 1/4 s, the other 5 for 3/4 s; of b's 8 all for 1 s: 27 + 24 MiB."""
    profile = profile_of(net("a/m", 3, 10, 6), net("b/m", 3, 9))
    assert ops_of(given_up(profile, share)) == (whole, selective)


def test_what_saves_less_in_part_than_the_rest_does_for_a_second_is_recomputed_whole() -> None:
    """2 of 9 MiB for 1/4 s, 7 for 3/4 s; a bit more saves more than the rest."""
    profile = profile_of(net("a/m", 3, 10, 8))
    assert ops_of(given_up(profile, 2 / 27)) == ({"a/m": 1}, {})
    profile = profile_of(net("a/m", 3, 10, 7.7))
    assert ops_of(given_up(profile, 2 / 27)) == ({}, {"a/m": 1})


def test_ops_that_are_split_are_recomputed_whole() -> None:
    profile = profile_of(net("a/m", 3, 10, 6))
    assert ops_of(given_up(profile, 4 / 27, whole={"a/m"})) == ({"a/m": 1}, {})


def test_what_is_saved_in_part_is_the_mean_of_the_ops() -> None:
    """Of four ops one saves 4 MiB and three 2; one of which nothing is known saves nothing; no op saves more
    than all that it need not keep.
    """
    uneven = net("a/m", 4, 10, memory=(memory(10, 6), memory(10, 8, 1)), selective_share=0.25)
    assert selectively_saved_bytes(uneven) == (4 + 3 * 2) / 4 * MIB
    split = (memory(10, 6), memory(10, None, tp=2))
    assert selectively_saved_bytes(net("a/m", 4, 10, memory=split, selective_share=0.25)) == 4 * MIB
    assert selectively_saved_bytes(net("a/m", 4, 10)) == 0
    assert selectively_saved_bytes(net("a/m", 4, 3, memory=(memory(10, 1),), selective_share=0.25)) == 2 * MIB


def test_as_much_recomputes_nothing_whole_as_can_be_saved_in_part() -> None:
    """Of a's 27 MiB 12, of b's 24 nothing: 12/51."""
    profile = profile_of(net("a/m", 3, 10, 6), net("b/m", 3, 9))
    assert not given_up(profile, 11.9 / 51).recompute
    assert given_up(profile, 12.1 / 51).recompute


def test_parts_that_recompute_differently_follow_each_other() -> None:
    """Of five ops one is recomputed whole and two in part: 4, 3.25 and 3 s each."""
    profile = profile_of(net("a/m", 5, 10, 6))
    fallback = MemoryFallback(recompute={"a/m": 1}, selective={"a/m": 2})
    first, second, third = make_problem(profile, ONE, fallback).nodes
    assert [(node.first_op, node.num_ops, node.continues) for node in (first, second, third)] == [
        (0, 1, None),
        (1, 2, 0),
        (3, 2, 1),
    ]
    points = [node.points[0] for node in (first, second, third)]
    assert [point.op_s for point in points] == [4.0, 3.25, 3.0]
    assert [Again.of(point) for point in points] == [Again.ALL, Again.SELECTIVE, Again.NOTHING]


def with_tp(metaop: MetaOpProfile, *, alone: bool = False) -> MetaOpProfile:
    point = CurvePoint(num_devices=2, dp=1, tp=2, forward_s=0.6, backward_s=1.2, source="measured")
    return metaop.model_copy(update={"curve": (point,) if alone else (*metaop.curve, point)})


def test_in_part_runs_where_nothing_is_split_and_whole_where_all_is() -> None:
    fallback = MemoryFallback(selective={"a/m": 5})
    (node,) = make_problem(profile_of(with_tp(net("a/m", 5, 10, 6))), cluster_of(2), fallback).nodes
    assert [(point.tp, point.op_s) for point in node.points] == [(1, 3.25)]
    alone = profile_of(with_tp(net("a/m", 5, 10, 6), alone=True))
    (node,) = make_problem(alone, cluster_of(2), fallback).nodes
    assert [(point.tp, point.op_s, point.selective) for point in node.points] == [
        (2, pytest.approx(2.4), False)
    ]
    split = MemoryFallback(2, frozenset({"a/m"}), selective={"a/m": 5})
    (node,) = make_problem(profile_of(with_tp(net("a/m", 5, 10, 6))), cluster_of(2), split).nodes
    assert {(point.tp, point.selective) for point in node.points} == {(2, False)}


def test_on_several_types_too() -> None:
    metaop = net("a/m", 1, 10, 6)
    points = [Point(1, 1, 1, 1.0, 2.0, 3.0), Point(2, 1, 2, 0.6, 1.2, 1.8)]
    assert [(p.tp, p.op_s) for p in recomputed(points, metaop, Again.SELECTIVE)] == [(1, 3.25)]
    assert [(p.tp, p.op_s, p.selective) for p in recomputed(points[1:], metaop, Again.SELECTIVE)] == [
        (2, pytest.approx(2.4), False)
    ]
    assert [p.op_s for p in recomputed(points, metaop, Again.ALL)] == pytest.approx([4.0, 2.4])
    assert [len(recomputed(points, metaop, again)) for again in Again] == [2, 1, 2]


def test_rooms_count_what_runs_again_of_every_micro_batch() -> None:
    """Ten ops keep 10 MiB each; in 75 MiB 7 ops save 4 each, in 60 all do, in 55 one more 5, for 3/4 s."""
    metaop = net("a/m", 10, 10, 6)
    part = CutPart({"a": 3}, (metaop,), {"a/m": make_point(metaop.curve[0], metaop)}, 100.0)
    for room_mib, again_s in ((100, 0.0), (75, 7 / 4), (60, 10 / 4), (55, 10 / 4 + 3 / 4)):
        found = part.within(room_mib * MIB)
        assert found is not None
        assert found.seconds == pytest.approx(100.0 + 3 * again_s)
    split = CutPart(
        {"a": 1}, (metaop,), {"a/m": make_point(with_tp(metaop, alone=True).curve[0], metaop)}, 100.0
    )
    found = split.within(75 * MIB)
    assert found is not None
    assert ops_of(found.fallback) == ({"a/m": 3}, {})


def test_micro_batches_keep_their_part() -> None:
    metaop = net(
        "a/m",
        2,
        10,
        6,
        shares=[
            {"samples": samples, "forward_s": samples / 8, "backward_s": samples / 4, "source": "measured"}
            for samples in (1, 2, 4, 8)
        ],
    )
    (part,) = in_micro_batches(profile_of(metaop), {"a": 4}, ONE).one.metaops
    assert part.memory[0].selective_bytes == (0, 6 * MIB // 4)
    assert part.memory[0].rebatched(2.0).selective_bytes == (0, 3 * MIB)


def planned(memory_mib: float, metaop: MetaOpProfile) -> tuple[Plan, Profile]:
    profile = profile_of(metaop.model_copy(update={"param_bytes_per_op": 0, "parameters": None}))
    cluster = cluster_of(1, memory_gib=memory_mib / 1024)
    return make_plan(profile, cluster), profile


def test_a_plan_recomputes_in_part_before_it_does_whole_and_is_sound() -> None:
    """20 ops keep 10 MiB each. Where all fit but a tenth, some run a quarter again; where less than 6 MiB
    each fits, some all of it.
    """
    much, _ = planned(250, net("a/m", 20, 10, 6))
    assert not any(piece.recompute for piece in much.slices)
    some, profile = planned(185, net("a/m", 20, 10, 6))
    assert {piece.selective for piece in some.slices if piece.recompute} == {True}
    assert check_plan(some, profile) == ()
    whole, _ = planned(185, net("a/m", 20, 10))
    assert some.predicted.iteration_s < whole.predicted.iteration_s
    least, profile = planned(100, net("a/m", 20, 10, 6))
    assert check_plan(least, profile) == ()
    assert sum(piece.num_ops for piece in least.slices if piece.recompute and not piece.selective) > 0
    with pytest.raises(NoPlanError):
        planned(20, net("a/m", 20, 10, 6))


def test_a_plan_says_it_in_its_file_and_its_notes() -> None:
    some, _ = planned(185, net("a/m", 20, 10, 6))
    again = Plan.model_validate_json(some.model_dump_json(by_alias=True))
    assert [piece.selective for piece in again.slices] == [piece.selective for piece in some.slices]
    count = sum(piece.num_recomputed for piece in some.slices)
    assert some.notes[0] == (
        f"Memory asks for recomputed activations of {count} ops, all of them but for what takes longest."
    )
    assert "selective: true" in plan_text(some)
    assert "selective: false" not in plan_text(some)


def test_notes_tell_both_ways_apart() -> None:
    metaop = net("a/m", 6, 10, 6)
    whole = slice_of(metaop, (0, 2), (0,), 0.0, recompute=True)
    part = slice_of(metaop, (2, 6), (0,), 8.0, recompute=True, selective=True)
    assert describe([whole, part]) == (
        "Memory asks for recomputed activations of 6 ops, 4 of them but for what takes longest."
    )
    assert describe([whole]) == "Memory asks for recomputed activations of 2 ops."


def test_the_bound_on_types_counts_no_more_than_what_runs_again_at_least() -> None:
    """A quarter of a forward pass of a second, beside 3 s; of several allocations the least."""
    shares = metaop_on_types("t/net", 1, {"fast": 3.0, "slow": 30.0}, batch_size=1)
    problem = make_problem(profile_on_types(shares), cluster_of_types({"fast": 1, "slow": 1}))
    (node,) = problem.nodes
    plain = node.points[-1]
    part = replace(plain, again=0.25, selective=True)
    whole = replace(part, again=1.0, selective=False)
    for points, forwards in (((plain,), 1), ((part,), 1.25), ((part, whole), 1.25)):
        own = replace(problem, nodes=(replace(node, points=points),))
        again_s = (forwards - 1) * plain.forward_s
        assert lower_bound(own).lower_bound_s == pytest.approx(3.0 + again_s)
