"""Pipelines of micro-batches: timetables of open micro-batches by hand, and whole plans."""

from __future__ import annotations

from math import log2

import pytest
import slow_links

from helpers.cut import cuttable
from helpers.plans import profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.micro_batches import MicroBatched, in_micro_batches
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.pipelines.cuts import Piece
from spindle_cli.plan.pipelines.lanes import Lanes
from spindle_cli.plan.pipelines.timetable import PieceSeconds, messages_s, timetable
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.search.evaluate import EvaluatedCandidate
from spindle_cli.plan.stages import pipelined
from spindle_cli.plan.stages.pipelined import may_gain
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.simulate.run import simulate
from spindle_cli.units import MIB

# A tenth of a second for a sample.
LINEAR = {n: 0.1 * n for n in (1, 2, 4, 8, 16)}
UP_TO_32 = {n: 0.1 * n for n in (1, 2, 4, 8, 16, 32)}


def chain(num_ops: int = 4) -> MetaOpProfile:
    """Layers of 64 MiB that hand on little."""
    return cuttable("t/net", num_ops, LINEAR, param_bytes_per_op=64 * MIB)


def apart(num_devices: int) -> Cluster:
    """Devices that are a node each, with 50 MB/s between them."""
    return slow_links.apart(num_devices, gb_per_s=0.05)


def staged(stages: int, count: int, takes: int = 0) -> tuple[Lanes, list[Piece]]:
    """A chain of stages in a lane each, in so many micro-batches."""
    cut = in_micro_batches(profile_of(chain(stages)), {"t": count}, apart(stages))
    lanes = Lanes(cut.all, tuple((device,) for device in range(stages)))
    pieces = [
        Piece(number, stage, stage + 1, stage, ((number * stages + stage - 1, takes),) if stage else ())
        for number in range(count)
        for stage in range(stages)
    ]
    return lanes, pieces


def most_open(order: list[tuple[int, bool]], stages: int, stage: int) -> int:
    """How many micro-batches a stage has run forward and not yet backward, at most."""
    now = most = 0
    for piece, is_backward in order:
        if piece % stages == stage:
            now += -1 if is_backward else 1
            most = max(most, now)
    return most


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 4), (4, 8), (3, 16)])
def test_one_open_micro_batch_for_each_of_equal_stages_ends_as_1f1b(stages: int, count: int) -> None:
    lanes, pieces = staged(stages, count)
    seconds = [PieceSeconds(1.0, 2.0)] * len(pieces)
    found = timetable(lanes, pieces, seconds, [1.0] * count, stages)
    assert max(found.end_s) == pytest.approx((count + stages - 1) * 3.0)
    open_in = [most_open(found.order, stages, stage) for stage in range(stages)]
    assert (open_in[0], open_in[-1]) == (stages, 1)
    assert max(open_in) == stages


def test_fewer_open_micro_batches_than_stages_leave_lanes_idle() -> None:
    """One at a time: 4 x 2 stages x 3 s."""
    lanes, pieces = staged(2, 4)
    found = timetable(lanes, pieces, [PieceSeconds(1.0, 2.0)] * len(pieces), [1.0] * 4, 1)
    assert max(found.end_s) == pytest.approx(24.0)


def side_by_side(count: int) -> tuple[Lanes, list[Piece]]:
    """Micro-batches of one op, each in a lane of its own, which nothing but a limit holds up."""
    cut = in_micro_batches(profile_of(chain(1)), {"t": count}, apart(count))
    lanes = Lanes(cut.all, tuple((device,) for device in range(count)))
    return lanes, [Piece(number, 0, 1, number, ()) for number in range(count)]


def test_a_micro_batch_begins_when_another_has_ended_on_whichever_lane() -> None:
    lanes, pieces = side_by_side(2)
    found = timetable(lanes, pieces, [PieceSeconds(1.0, 2.0)] * 2, [1.0] * 2, 1)
    assert sorted(found.end_s) == pytest.approx([3.0, 6.0])


def test_a_micro_batch_takes_the_place_that_is_free_first() -> None:
    """Two places: of those that begin at once one ends after 3 s and one after 9, so the third runs from 3 to
    6, and the fourth from then on.
    """
    lanes, pieces = side_by_side(4)
    seconds = [PieceSeconds(1.0, 2.0), PieceSeconds(3.0, 6.0), PieceSeconds(1.0, 2.0), PieceSeconds(1.0, 2.0)]
    found = timetable(lanes, pieces, seconds, [1.0] * 4, 2)
    assert sorted(found.end_s) == pytest.approx([3.0, 6.0, 9.0, 9.0])


def test_without_a_limit_all_micro_batches_run_forward_first() -> None:
    lanes, pieces = staged(2, 4)
    found = timetable(lanes, pieces, [PieceSeconds(1.0, 2.0)] * len(pieces), [1.0] * 4)
    assert max(found.end_s) == pytest.approx(15.0)
    assert most_open(found.order, 2, 0) == 4


def test_messages_of_a_lane_in_the_middle_go_both_ways_on_both_sides() -> None:
    """5 MB take 0.1 s: of 2 micro-batches, 2 sides, there and back."""
    lanes, pieces = staged(3, 2, takes=5 * 10**6)
    assert messages_s(lanes, pieces) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("compute_s", "sums_s", "expected"),
    [(90.0, 10.0, True), (90.1, 9.9, False), (150.0, 0.0, True), (149.9, 0.0, False)],
)
def test_pipelines_may_gain_where_sums_or_what_avoids_them_take_long(
    compute_s: float, sums_s: float, *, expected: bool
) -> None:
    best = Prediction(compute_s + sums_s, compute_s, 0.0, 0.0, sums_s, 0.0)
    assert may_gain(best, 100.0) is expected


def test_a_chain_behind_a_slow_link_becomes_a_pipeline() -> None:
    """6.4 s of work are 1.6 s on each of four devices, where sums of 256 MiB take 8 s; one device alone takes
    6.4 s. A pipeline of K micro-batches takes (K + 3) / K of 1.6 s: 1.9 s of 16.
    """
    profile, cluster = profile_of(chain()), apart(4)
    plan = make_plan(profile, cluster)
    assert plan.micro_batches == {"t": 16}
    assert plan.predicted.compute_s == pytest.approx(1.9, abs=1e-3)
    assert plan.predicted.iteration_s == pytest.approx(1.9, rel=0.05)
    assert plan.predicted.compute_s >= plan.predicted.lower_bound_any_s
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.03)
    assert check_plan(plan, profile) == ()
    assert len(make_plan(profile, cluster, micro_batches={"t": 1}).slices) < len(plan.slices)


@pytest.mark.parametrize("count", [2, 8])
def test_so_it_does_in_as_many_micro_batches_as_are_asked_for(count: int) -> None:
    """Not in 16, which would take less; one device alone would take 6.4 s, three idle."""
    plan = make_plan(profile_of(chain()), apart(4), micro_batches={"t": count})
    assert plan.micro_batches == {"t": count}
    assert plan.predicted.compute_s == pytest.approx((count + 3) / count * 1.6, abs=1e-2)
    assert {device for piece in plan.slices for device in piece.devices} == {0, 1, 2, 3}


def test_of_micro_batches_that_are_asked_for_no_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, int]] = []
    monkeypatch.setattr(pipelined, "_best_of", lambda cut, _: tried.append(dict(cut.counts)))
    profile = profile_of(cuttable("t/net", 4, UP_TO_32), cuttable("s/net", 4, UP_TO_32))
    found = PlanResult(evaluated(4.0), is_short=False)
    for request in ({"t": 8, "s": 1}, {"t": 1, "s": 1}, {}):
        ends = (profile, apart(4), found, 0.0, predicted_s, request)
        assert pipelined.in_pipelines(*ends) is found
    assert tried == [{"t": 8}]


def test_where_messages_are_as_slow_as_sums_batches_stay_whole() -> None:
    net = chain().model_copy(update={"inner_output_bytes": 512 * MIB, "output_bytes": 512 * MIB})
    assert make_plan(profile_of(net), apart(4)).micro_batches == {}


def handing_on(mib: int) -> Profile:
    """The chain, with so much between its layers."""
    return profile_of(
        chain().model_copy(update=dict.fromkeys(("inner_output_bytes", "output_bytes"), mib * MIB))
    )


def test_over_gloo_messages_that_would_take_too_long_if_nothing_hid_them_leave_batches_whole() -> None:
    """Of 140 MiB two lanes move 5.9 s in all, there and back: with a pipeline's 4 s more than the 6.4 s of
    one device, though less where they hide behind passes.
    """
    assert make_plan(handing_on(140), apart(4)).micro_batches == {}


def on_gpus(cluster: Cluster) -> Cluster:
    nodes = tuple(group.model_copy(update={"device": "a800-80gb"}) for group in cluster.nodes)
    return cluster.changed(nodes=nodes)


@pytest.mark.parametrize(("mib", "micro_batches"), [(220, {"t": 16}), (230, {})])
def test_over_nccl_messages_hide_behind_passes_but_for_a_part(
    mib: int, micro_batches: dict[str, int]
) -> None:
    """Between two lanes, 220 MiB take 4.6 s there and back, most of it beside passes. With 230 MiB no
    pipeline takes less than the 6.4 s of one device with 0.15 of 4.8 s more.
    """
    plan = make_plan(handing_on(mib), on_gpus(apart(4)))
    assert plan.micro_batches == micro_batches
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.06)


def evaluated(iteration_s: float) -> EvaluatedCandidate:
    return EvaluatedCandidate(
        "spindle", (), (), Prediction(iteration_s, iteration_s / 2, 0.0, 0.0, iteration_s / 2, 0.0)
    )


def predicted_s(found: PlanResult) -> float:
    return found.best.prediction.iteration_s


@pytest.mark.parametrize(
    ("gains", "tried_s", "count"),
    [
        ([3.9, None, 3.0, None], [4.0, 3.9, 3.9, 3.0], 16),
        ([None, 3.5, None, None], [4.0, 4.0, 3.5, 3.5], 8),
        ([3.9, None, None, 1.0], [4.0, 3.9, 3.9], 4),
        ([None, None, 1.0, 1.0], [4.0, 4.0], 1),
    ],
)
def test_more_micro_batches_are_tried_until_two_counts_in_a_row_gain_nothing(
    monkeypatch: pytest.MonkeyPatch, gains: list[float | None], tried_s: list[float], count: int
) -> None:
    """Each has to beat what the best so far takes with the part of its messages, not its prediction."""
    to_beat: list[float] = []
    profile, cluster = profile_of(cuttable("t/net", 4, UP_TO_32)), apart(4)

    def best_of(_: object, best_s: float) -> tuple[EvaluatedCandidate, float] | None:
        to_beat.append(best_s)
        gain = gains[len(to_beat) - 1]
        return None if gain is None else (evaluated(gain - 0.5), gain)

    monkeypatch.setattr(pipelined, "_best_of", best_of)
    found = pipelined.in_pipelines(
        profile, cluster, PlanResult(evaluated(4.0), is_short=False), 0.0, predicted_s
    )
    assert found is not None
    assert to_beat == tried_s
    assert (found.cut.counts["t"] if found.cut else 1) == count


@pytest.mark.parametrize(
    ("simulated", "count"), [((4.0, 3.95), 4), ((4.0, 3.96), 1), ((3.0, 3.5), 1), ((5.0, 4.5), 4)]
)
def test_a_pipeline_has_to_be_shorter_by_simulation_too(
    monkeypatch: pytest.MonkeyPatch, simulated: tuple[float, float], count: int
) -> None:
    """By a hundredth at least of what the best other plan takes, which need not be what is predicted."""
    tried = iter([(evaluated(3.0), 3.0)])
    monkeypatch.setattr(pipelined, "_best_of", lambda *_: next(tried, None))
    profile = profile_of(cuttable("t/net", 4, UP_TO_32))

    def simulated_s(found: PlanResult) -> float:
        return simulated[found.cut is not None]

    found = pipelined.in_pipelines(
        profile, apart(4), PlanResult(evaluated(4.0), is_short=False), 0.0, simulated_s
    )
    assert found is not None
    assert (found.cut.counts["t"] if found.cut else 1) == count


@pytest.mark.parametrize(
    ("simulated", "tried", "count"),
    [
        # Of pipelines ever shorter by prediction the second is longer than the first by simulation, the third
        # not by a hundredth shorter than that: after these two no more are tried.
        ([3.5, 3.6, 3.48, 1.0], 3, 4),
        ([3.5, 3.6, 3.4, 3.0], 4, 32),
        ([4.5, 4.5, 1.0, 1.0], 2, 1),
    ],
)
def test_a_pipeline_has_to_be_shorter_than_the_best_one_before_by_simulation(
    monkeypatch: pytest.MonkeyPatch, simulated: list[float], tried: int, count: int
) -> None:
    predicted = iter([3.0, 2.9, 2.8, 2.7])
    tried_s: list[float] = []

    def best_of(*_: object) -> tuple[EvaluatedCandidate, float]:
        seconds = next(predicted)
        tried_s.append(seconds)
        return evaluated(seconds), seconds

    def simulated_s(found: PlanResult) -> float:
        return 4.0 if found.cut is None else simulated[tried_s.index(found.best.prediction.iteration_s)]

    monkeypatch.setattr(pipelined, "_best_of", best_of)
    profile = profile_of(cuttable("t/net", 4, UP_TO_32))
    found = pipelined.in_pipelines(
        profile, apart(4), PlanResult(evaluated(4.0), is_short=False), 0.0, simulated_s
    )
    assert found is not None
    assert len(tried_s) == tried
    assert (found.cut.counts["t"] if found.cut else 1) == count


def test_behind_all_alike_each_task_is_cut_by_itself_the_heaviest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Best with 8 of a and 4 of b, a tenth of a second longer for each half or double of a, two of b. Alike,
    and a alone, 4 of each are best; then a in 2 (longer), 8 (shorter) and 16 (longer), b in 2 (longer).
    """
    tried: list[tuple[int, int]] = []

    def best_of(cut: MicroBatched, best_s: float) -> tuple[EvaluatedCandidate, float] | None:
        a, b = (cut.counts.get(task, 1) for task in "ab")
        tried.append((a, b))
        seconds = 1.0 + 0.1 * abs(log2(a) - 3) + 0.2 * abs(log2(b) - 2)
        return (evaluated(seconds), seconds) if seconds < best_s else None

    monkeypatch.setattr(pipelined, "_best_of", best_of)
    profile = profile_of(cuttable("b/net", 1, UP_TO_32), cuttable("a/net", 4, UP_TO_32))
    found = pipelined.in_pipelines(
        profile, apart(4), PlanResult(evaluated(4.0), is_short=False), 0.0, predicted_s
    )
    assert found is not None
    assert found.cut is not None
    assert found.cut.counts == {"a": 8, "b": 4}
    alike = [(4, 4), (4, 1), (8, 8), (8, 1), (16, 16), (16, 1)]
    assert tried == [*alike, (2, 4), (8, 4), (16, 4), (8, 2)]


def test_tasks_that_exchange_values_stay_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, int]] = []

    def best_of(cut: MicroBatched, _: float) -> tuple[EvaluatedCandidate, float] | None:
        tried.append(dict(cut.counts))
        return (evaluated(3.0), 3.0) if len(tried) == 1 else None

    monkeypatch.setattr(pipelined, "_best_of", best_of)
    a, c = (cuttable(f"{task}/net", num_ops, UP_TO_32) for task, num_ops in (("a", 4), ("c", 1)))
    b = cuttable("b/net", 1, UP_TO_32, inputs=("a/net",))
    pipelined.in_pipelines(
        profile_of(a, b, c), apart(4), PlanResult(evaluated(4.0), is_short=False), 0.0, predicted_s
    )
    assert {"a": 2, "b": 2, "c": 4} in tried
    assert all(counts.get("a") == counts.get("b") for counts in tried)
    assert len(tried) == len({tuple(sorted(counts.items())) for counts in tried})


@pytest.mark.parametrize(("batch_size", "is_tried"), [(32, True), (16, False)])
@pytest.mark.parametrize("takes", ["a/net", "b/net", None])
def test_where_values_of_other_batches_are_taken_no_pipeline_is_tried(
    monkeypatch: pytest.MonkeyPatch, batch_size: int, takes: str | None, *, is_tried: bool
) -> None:
    """No program runs such MetaOps, so none can be simulated; of what takes nothing any batch will do."""
    tried: list[object] = []
    monkeypatch.setattr(pipelined, "_best_of", lambda *of: tried.append(of))
    curve = {n: seconds for n, seconds in UP_TO_32.items() if n <= batch_size}
    first = cuttable("a/net", 4, UP_TO_32, inputs=("b/net",) if takes == "b/net" else ())
    other = cuttable("b/net", 1, curve, inputs=("a/net",) if takes == "a/net" else ())
    whole = PlanResult(evaluated(4.0), is_short=False)
    profile = profile_of(first, other)
    assert pipelined.in_pipelines(profile, apart(4), whole, 0.0, predicted_s) is whole
    assert bool(tried) is (is_tried or takes is None)


def test_a_task_that_small_shares_do_not_serve_stays_whole_beside_a_pipeline() -> None:
    """A chain of layers of 64 MiB, 6.4 s on a device, and a task that takes 1.6 s for each micro-batch: in
    four of both it would take as long as the chain.
    """
    beside = cuttable("s/net", 4, dict.fromkeys((1, 2, 4, 8, 16), 0.4), param_bytes_per_op=MIB)
    profile = profile_of(chain(), beside)
    plan = make_plan(profile, apart(4))
    assert plan.micro_batches.keys() == {"t"}
    assert plan.predicted.iteration_s < 4.5
    assert check_plan(plan, profile) == ()
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.06)


@pytest.mark.parametrize(("num_ops", "sample_s"), [(24, 0.13), (40, 0.11), (40, 0.19)])
def test_equal_ops_are_cut_into_equal_stages(num_ops: int, sample_s: float) -> None:
    """Of each of 8 devices an eighth of the ops, 16 times, and 7 more times until the last has begun and
    ended; whatever floats say of an eighth.
    """
    profile = profile_of(cuttable("t/net", num_ops, {n: sample_s * n + 0.03 for n in (1, 2, 4, 8, 16)}))
    plan = make_plan(profile, slow_links.apart(8, gb_per_s=5), effort=0, micro_batches={"t": 16})
    assert plan.predicted.compute_s <= 1.001 * (16 + 7) * num_ops / 8 * (sample_s + 0.03)
