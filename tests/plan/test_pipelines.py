"""Pipelines: sections of shared ops, cuts, timetables and what lanes do beside, by hand; whole searches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from random_profiles import SHAPES, Shape, random_profile
from slow_links import apart

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.pipelines.candidates import may_gain, pipelines
from spindle_cli.plan.pipelines.cuts import Cutter, Piece, with_part
from spindle_cli.plan.pipelines.lanes import Lanes, ways_to_cut
from spindle_cli.plan.pipelines.search import LEAST_COUNTED, Beside, Search, State
from spindle_cli.plan.pipelines.sections import Section, sections_of
from spindle_cli.plan.pipelines.timetable import PieceSeconds, timetable
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.search.evaluate import evaluate
from spindle_cli.profile.types import MetaOpProfile, ProcessorCosts

MIB = 2**20
ONE_OP_A_SECOND = {1: 1.0, 2: 0.5}


def two_senses() -> tuple[MetaOpProfile, MetaOpProfile]:
    """Two ops of its own, one of its own; then three that both share."""
    see = metaop_of("a/see", 5, ONE_OP_A_SECOND, parameters="net", parameter_blocks=(0, 1, 7, 8, 9))
    hear = metaop_of("b/hear", 4, ONE_OP_A_SECOND, parameters="net", parameter_blocks=(2, 7, 8, 9))
    return see, hear


def problem_of(*metaops: MetaOpProfile, cluster: Cluster | None = None) -> Problem:
    return make_problem(profile_of(*metaops), cluster or apart(2))


def test_a_section_has_the_ops_that_the_same_metaops_share() -> None:
    assert sections_of(problem_of(*two_senses())) == (
        Section((("a/see", 0),), (MIB, MIB)),
        Section((("a/see", 2), ("b/hear", 1)), (MIB, MIB, MIB)),
        Section((("b/hear", 0),), (MIB,)),
    )


def test_parameters_that_one_metaop_uses_twice_keep_both_ops_together() -> None:
    tied = metaop_of("a/net", 4, ONE_OP_A_SECOND, parameters="net", parameter_blocks=(0, 1, 2, 0))
    assert sections_of(problem_of(tied)) == (
        Section((("a/net", 0), ("a/net", 3)), (MIB,)),
        Section((("a/net", 1),), (MIB, MIB)),
    )


def test_ops_without_parameters_are_in_nobodys_way() -> None:
    metaops = [
        metaop_of(f"{task}/net", 2, ONE_OP_A_SECOND, parameters=None, param_bytes_per_op=0) for task in "ab"
    ]
    assert sections_of(problem_of(*metaops)) == (
        Section((("a/net", 0),), (0, 0)),
        Section((("b/net", 0),), (0, 0)),
    )


@pytest.mark.parametrize(
    ("first", "last", "lane", "expected"),
    [
        (0, 6, 1, ((6, 1),)),
        (0, 2, 1, ((2, 1), (4, 0), (6, 2))),
        (3, 6, 1, ((3, 0), (6, 1))),
        (4, 6, 0, ((6, 0),)),  # neighbours of one lane are one part
        (2, 3, 2, ((2, 0), (3, 2), (4, 0), (6, 2))),
        (2, 2, 1, ((4, 0), (6, 2))),  # of no op
    ],
)
def test_a_part_in_another_lane_leaves_the_others_where_they_were(
    first: int, last: int, lane: int, expected: tuple[tuple[int, int], ...]
) -> None:
    assert with_part(((4, 0), (6, 2)), first, last, lane) == expected


def test_nodes_are_cut_where_their_lane_changes_and_hand_on_what_ops_inside_do() -> None:
    see, hear = two_senses()
    inner = see.model_copy(update={"inner_output_bytes": 1000})
    loss = metaop_of("a/loss", 1, ONE_OP_A_SECOND, inputs=("a/see",))
    problem = problem_of(inner, hear, loss)
    sections = sections_of(problem)
    assert [section.users[0] for section in sections] == [
        ("a/see", 0),
        ("a/see", 2),
        ("b/hear", 0),
        ("a/loss", 0),
    ]
    cutter = Cutter(problem, sections)
    # See's own ops in lanes 0 and 1, the shared ones 1 and 0; hear's own op in lane 1; the loss in lane 1.
    pieces = cutter.pieces((((1, 0), (2, 1)), ((1, 1), (3, 0)), ((1, 1),), ((1, 1),)))
    assert pieces == [
        Piece(0, 0, 1, 0, ()),
        Piece(0, 1, 3, 1, ((0, 1000),)),
        Piece(0, 3, 5, 0, ((1, 1000),)),
        Piece(1, 0, 2, 1, ()),
        Piece(1, 2, 4, 0, ((3, 2**16),)),
        Piece(2, 0, 1, 1, ((2, 2**16),)),
    ]


def test_what_every_op_takes_goes_to_every_piece_and_nodes_of_one_metaop_follow_each_other() -> None:
    show = metaop_of("a/show", 1, ONE_OP_A_SECOND)
    write = metaop_of("a/write", 3, ONE_OP_A_SECOND, inputs=("a/show",), inputs_of_every_op=("a/show",))
    profile = profile_of(show, write)
    problem = make_problem(profile, apart(2), MemoryFallback(recompute={"a/write": 1}))
    pieces = Cutter(problem, sections_of(problem)).pieces((((1, 0),), ((2, 0), (3, 1))))
    assert pieces == [
        Piece(0, 0, 1, 0, ()),
        Piece(1, 0, 1, 0, ((0, 2**16),)),
        Piece(2, 1, 2, 0, ((1, 2**16), (0, 2**16))),
        Piece(2, 2, 3, 1, ((2, 2**16), (0, 2**16))),
    ]


def chain(*lanes: int, takes: int = 0) -> list[Piece]:
    """Pieces of a node each, each taking the one before."""
    return [Piece(i, 0, 1, lane, ((i - 1, takes),) if i else ()) for i, lane in enumerate(lanes)]


def lanes_of(num_nodes: int, num_lanes: int = 2) -> Lanes:
    """A megabyte takes 0.1 s from lane to lane."""
    metaops = [metaop_of(f"t{i}/m", 1, {1: 3.0}) for i in range(num_nodes)]
    cluster = apart(num_lanes)
    return Lanes(problem_of(*metaops, cluster=cluster), tuple((d,) for d in range(num_lanes)))


def test_a_chain_over_two_lanes_waits_for_its_messages_there_and_back() -> None:
    """1 s, 0.1 s on the way, 1 + 2 s in the other lane, 0.1 s back, 2 s."""
    found = timetable(lanes_of(2), chain(0, 1, takes=10**6), [PieceSeconds(1.0, 2.0)] * 2, [1.0, 1.0])
    assert found.order == [(0, False), (1, False), (1, True), (0, True)]
    assert found.end_s == pytest.approx([6.2, 4.1])


def test_messages_between_two_lanes_go_one_at_a_time_each_way() -> None:
    """Both pieces of lane 1 take from one of lane 0: the second gets its input 0.1 s after the first, which
    is shorter than that.
    """
    pieces = [
        Piece(0, 0, 1, 0, ()),
        Piece(1, 0, 1, 1, ((0, 10**6),)),
        Piece(2, 0, 1, 1, ((0, 10**6),)),
    ]
    seconds = [PieceSeconds(1.0, 1.0), PieceSeconds(0.02, 1.0), PieceSeconds(0.02, 1.0)]
    found = timetable(lanes_of(3), pieces, seconds, [1.0] * 3)
    # Forward at 1.1 and 1.2; the backward pass between them holds the second up until 2.12.
    assert found.order[:3] == [(0, False), (1, False), (1, True)]
    assert found.end_s == pytest.approx([4.24, 3.14])


def test_the_longest_chain_goes_first_unless_another_is_more_urgent() -> None:
    pieces = [Piece(0, 0, 1, 0, ()), Piece(1, 0, 1, 0, ()), Piece(2, 0, 1, 1, ((1, 1),))]
    seconds = [PieceSeconds(1.0, 1.0), PieceSeconds(1.0, 1.0), PieceSeconds(1.0, 1.0)]
    assert timetable(lanes_of(3), pieces, seconds, [1.0] * 3).order[0] == (1, False)
    assert timetable(lanes_of(3), pieces, seconds, [10.0, 1.0, 1.0]).order[0] == (0, False)


def test_what_is_sent_to_another_lane_goes_before_what_takes_as_long_in_its_own() -> None:
    pieces = [
        Piece(0, 0, 1, 0, ()),
        Piece(1, 0, 1, 0, ()),
        Piece(2, 0, 1, 0, ((0, 10**6),)),
        Piece(3, 0, 1, 1, ((1, 10**6),)),
    ]
    found = timetable(lanes_of(4), pieces, [PieceSeconds(1.0, 1.0)] * 4, [1.0] * 4)
    assert found.order[:2] == [(1, False), (0, False)]


def test_a_search_counts_what_lanes_have_to_do_besides() -> None:
    profile = profile_of(*two_senses()).model_copy(update={"optimizer_s_per_byte": 1 / MIB})
    problem = make_problem(profile, apart(2))
    lanes, sections = Lanes(problem, ((0,), (1,))), sections_of(problem)
    for found in Search(lanes, sections).best(2000):
        beside_s = Beside(lanes, sections).seconds(found.state.assignment, found.pieces)
        ends_s = [sum(both) for both in zip(found.timetable.end_s, beside_s, strict=True)]
        assert sum(beside_s) == pytest.approx(6.0)  # six layers of a MiB, each in one lane
        assert found.end_s == pytest.approx(max(ends_s))


@pytest.mark.parametrize(("devices_per_node", "times"), [(4, 1.0), (2, 2.5)])
def test_lanes_update_what_they_hold_and_spend_their_processors_on_messages_and_samples(
    devices_per_node: int, times: float
) -> None:
    """`times`: what a byte takes of processors, in bytes inside a node."""
    see = metaop_of("a/see", 2, ONE_OP_A_SECOND, field_bytes={0: 8})
    costs = ProcessorCosts(message_s=0.25, s_per_byte=1e-6, load_s={"a": 0.125}, step_s=8.0, pass_s=16.0)
    profile = profile_of(see).model_copy(update={"processor": costs, "optimizer_s_per_byte": 1 / MIB})
    profile = profile.model_copy(update={"optimizer_state_sharded": True})
    problem = make_problem(profile, cluster_of(4, devices_per_node=devices_per_node))
    lanes = Lanes(problem, ((0, 1), (2, 3)))
    sections = sections_of(problem)
    beside = Beside(lanes, sections)
    cut = (((1, 0), (2, 1)),)
    pieces = Cutter(problem, sections).pieces(cut)
    # Each device: its half of a layer's update; a message each way with half of the rows; half of the batch.
    message_s = 2 * (0.25 + 2**15 * times * 1e-6)
    runtime_s = 8.0 + 16.0  # one piece in each lane
    assert beside.seconds(cut, pieces) == pytest.approx(
        [0.5 + runtime_s + message_s + 4 * 0.125, 0.5 + runtime_s + message_s]
    )
    whole = (((2, 1),),)
    assert beside.seconds(whole, Cutter(problem, sections).pieces(whole)) == pytest.approx(
        [0, 1.0 + runtime_s + 4 * 0.125]
    )


def test_where_devices_do_not_share_optimizer_state_each_updates_all_that_its_lane_holds() -> None:
    see = metaop_of("a/see", 2, ONE_OP_A_SECOND)
    changes = {"optimizer_state_sharded": False, "optimizer_s_per_byte": 1 / MIB}
    problem = make_problem(profile_of(see).model_copy(update=changes), cluster_of(4, devices_per_node=2))
    sections = sections_of(problem)
    whole = (((2, 1),),)
    pieces = Cutter(problem, sections).pieces(whole)
    assert Beside(Lanes(problem, ((0, 1), (2, 3))), sections).seconds(whole, pieces) == [0.0, 2.0]


def test_clusters_are_cut_into_their_nodes_and_into_equal_lanes() -> None:
    problem = problem_of(metaop_of("a/m", 1, ONE_OP_A_SECOND), cluster=cluster_of(6, devices_per_node=2))
    assert ways_to_cut(problem) == (
        ((0, 1), (2, 3), (4, 5)),
        ((0, 1, 2), (3, 4, 5)),
        ((0,), (1,), (2,), (3,), (4,), (5,)),
    )


def test_devices_of_a_lane_send_side_by_side_and_those_of_a_node_share_its_cards() -> None:
    problem = problem_of(metaop_of("a/m", 1, ONE_OP_A_SECOND), cluster=cluster_of(4, devices_per_node=2))
    inside = Lanes(problem, ((0,), (1,), (2,), (3,)))
    assert inside.message_s(10**6, 0, 1) == pytest.approx(10e-6 + 1e6 / 5e9)
    assert inside.message_s(10**6, 1, 2) == pytest.approx(20e-6 + 1e6 / 1e9)
    between = Lanes(problem, ((0, 1), (2, 3)))
    assert between.message_s(10**6, 0, 1) == pytest.approx(20e-6 + 1e6 / 1e9)
    one_node = problem_of(metaop_of("a/m", 1, ONE_OP_A_SECOND), cluster=cluster_of(6))
    uneven = Lanes(one_node, ((0, 1), (2, 3, 4, 5)))
    assert uneven.message_s(10**6, 0, 1) == pytest.approx(10e-6 + 0.5e6 / 5e9)


def test_the_least_that_lanes_take_is_all_work_over_their_number() -> None:
    problem = problem_of(*two_senses(), cluster=cluster_of(4))
    assert Lanes(problem, ((0, 1), (2, 3))).least_s == pytest.approx(9 * 0.5 / 2)
    assert Lanes(problem, ((0,), (1,), (2,), (3,))).least_s == pytest.approx(9 * 1.0 / 4)


@pytest.mark.parametrize(
    ("compute_s", "sums_s", "expected"),
    [(98.0, 2.0, True), (98.1, 1.9, False), (110.1, 0.0, True), (109.9, 0.0, False)],
)
def test_pipelines_may_gain_where_links_take_two_percent_or_compute_is_far_from_the_bound(
    compute_s: float, sums_s: float, *, expected: bool
) -> None:
    best = Prediction(compute_s + sums_s, compute_s, 0.0, 0.0, sums_s, 0.0)
    assert may_gain(best, 100.0) is expected


def test_a_pipeline_whose_order_holds_too_much_runs_in_groups_of_tasks() -> None:
    tasks = [task.model_copy(update={"activation_bytes_per_op": 64 * MIB}) for task in generalist()]
    roomy = problem_of(*tasks, cluster=apart(2))
    candidate = next(pipelines(roomy, 0))
    as_found = evaluate(roomy, candidate)
    assert as_found is not None
    most = max(device.total_bytes for device in as_found.memory)
    short = problem_of(*tasks, cluster=apart(2, memory_gib=(most - 1) / 2**30))
    in_groups = evaluate(short, candidate)
    assert in_groups is not None
    assert max(device.total_bytes for device in in_groups.memory) < most
    assert in_groups.prediction.iteration_s > as_found.prediction.iteration_s


def generalist() -> tuple[MetaOpProfile, ...]:
    """Three tasks with two ops of their own each; of eight more, which all share, each 64 MiB."""
    shared = tuple(range(100, 108))
    return tuple(
        metaop_of(
            f"{task}/net",
            10,
            ONE_OP_A_SECOND,
            parameters="net",
            parameter_blocks=(10 * number, 10 * number + 1, *shared),
            param_bytes_per_op=64 * MIB,
        )
        for number, task in enumerate("abc")
    )


def holders(
    problem: Problem, pieces: Sequence[tuple[str, int, int, tuple[int, ...]]]
) -> dict[object, set[int]]:
    """By block of parameters, the devices that hold it."""
    held: dict[object, set[int]] = {}
    for name, first, last, devices in pieces:
        for op in range(first, last):
            for block in problem.uses[name, op]:
                held.setdefault((block.key, block.block), set()).update(devices)
    return held


def test_a_shared_trunk_is_cut_where_sums_are_slow() -> None:
    """30 op-seconds are 15 s on two devices; the trunk's sum alone would take 54 s, and all on one device
    30 s. Ops of a second leave some gaps.
    """
    problem = problem_of(*generalist(), cluster=apart(2))
    plan = make_plan(problem.profile, problem.cluster, effort=0)
    pieces = [(piece.metaop, *piece.ops, piece.devices) for piece in plan.slices]
    assert all(len(devices) == 1 for devices in holders(problem, pieces).values())
    assert plan.predicted.gradient_sum_s == 0
    assert 15.0 <= plan.predicted.iteration_s < 17.1
    assert check_plan(plan, problem.profile) == ()


def test_pipelines_are_tried_where_sums_alone_make_a_plan_longer() -> None:
    """Two tasks that are equally long can have a device each, but not their trunk: its sum takes 2.7 s behind
    10 s of compute, and hides in part.
    """
    problem = problem_of(*generalist()[:2], cluster=apart(2, gb_per_s=0.2))
    plan = make_plan(problem.profile, problem.cluster, effort=0)
    assert plan.predicted.gradient_sum_s == 0
    assert plan.predicted.iteration_s < 12.0


@pytest.mark.parametrize("shape", SHAPES)
def test_pipelines_run_every_op_once_and_hold_nothing_in_two_lanes(shape: Shape) -> None:
    problem = make_problem(random_profile(1, shape), apart(4))
    for candidate in pipelines(problem, 0):
        assert candidate.devices is not None
        ran = {
            (problem.nodes[piece.node].metaop.name, op)
            for piece in candidate.pieces
            for op in range(piece.first, piece.last)
        }
        assert len(ran) == sum(piece.num_ops for piece in candidate.pieces)
        assert len(ran) == sum(node.num_ops for node in problem.nodes)
        pieces = [
            (problem.nodes[piece.node].metaop.name, piece.first, piece.last, (min(devices),))
            for piece, devices in zip(candidate.pieces, candidate.devices, strict=True)
        ]
        assert all(len(lane) == 1 for lane in holders(problem, pieces).values())
        assert evaluate(problem, candidate) is not None


def test_a_longer_search_for_pipelines_tries_what_the_shorter_ones_do() -> None:
    problem = problem_of(*generalist(), cluster=apart(2))
    shorter, longer = (list(pipelines(problem, effort)) for effort in (0, 1))
    assert longer[: len(shorter)] == shorter


def test_ways_that_cannot_be_faster_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(*generalist(), cluster=apart(2))
    searched: list[Search] = []
    monkeypatch.setattr(Search, "best", lambda search, *_: searched.append(search) or [])
    assert list(pipelines(problem, 0, faster_than_s=15.0)) == searched == []
    assert list(pipelines(problem, 2, faster_than_s=15.1)) == []
    assert len(searched) == 1  # no longer, where the shortest search finds nothing


def test_only_pipelines_faster_than_what_is_to_be_beaten_are_found() -> None:
    problem = problem_of(*generalist(), cluster=apart(2))
    search = partial(Search, Lanes(problem, ((0,), (1,))), sections_of(problem))
    ends_s = [found.end_s for found in search().best(20000)]
    assert [found.end_s for found in search().best(20000, faster_than_s=ends_s[-1] + 0.001)] == ends_s
    assert search().best(20000, faster_than_s=ends_s[0]) == []
    assert list(pipelines(problem, 0, faster_than_s=ends_s[0] + 0.001))
    assert not list(pipelines(problem, 0, faster_than_s=ends_s[0]))


@pytest.mark.parametrize(
    ("out_of_sight", "share"), [(1.26, 0.25), (1.24, 0.5), (1.11, 0.5), (1.09, 0.75), (1.04, 0.75), (1.02, 1)]
)
def test_a_search_ends_where_what_is_to_be_beaten_is_out_of_sight(
    monkeypatch: pytest.MonkeyPatch, out_of_sight: float, share: float
) -> None:
    problem = problem_of(*generalist(), cluster=apart(2))
    search = Search(Lanes(problem, ((0,), (1,))), sections_of(problem))
    begun = search._run(State(search._balanced(), (1.0,) * len(problem.nodes)))
    assert begun is not None
    tried: list[State] = []

    def changed(state: State) -> State:
        tried.append(state)
        return state  # the best stays what it is

    monkeypatch.setattr(search, "_changed", changed)
    search._improved(begun, max(2 * len(begun.pieces), LEAST_COUNTED) * 100, begun.end_s / out_of_sight)
    assert len(tried) == 100 * share


@pytest.mark.parametrize(("num_metaops", "passes"), [(1, 24), (12, 24), (13, 26)])
def test_a_change_counts_as_the_passes_that_it_runs_but_as_two_dozen_at_least(
    monkeypatch: pytest.MonkeyPatch, num_metaops: int, passes: int
) -> None:
    lanes = lanes_of(num_metaops)
    search = Search(lanes, sections_of(lanes.problem))
    begun = search._run(State(search._balanced(), (1.0,) * num_metaops))
    assert begun is not None
    tried: list[State] = []
    monkeypatch.setattr(search, "_changed", lambda state: tried.append(state) or state)
    search._improved(begun, 10 * passes, float("inf"))
    assert len(tried) == 10
