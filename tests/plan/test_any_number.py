"""Plans on numbers of devices that do not divide a batch: by hand, and valid whatever the times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.cut import cuttable, shares_of
from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Link, Links
from spindle_cli.plan import make
from spindle_cli.plan.best import find
from spindle_cli.plan.best.any_number import on_any_number
from spindle_cli.plan.best.micro_batches import alike_micro_batches, in_micro_batches
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.search.evaluate import EvaluatedCandidate
from spindle_cli.plan.slices import rows_of
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.types import MetaOpProfile, TaskShare

# 2 s for 8 samples on one device, 1.2 s for half of them; so 0.95 s for 3.
SECONDS = {8: 2.0, 4: 1.2, 2: 0.7, 1: 0.5}


def points(metaop: MetaOpProfile, num_devices: int) -> list[tuple[int, int, float]]:
    wide = on_any_number(profile_of(metaop), cluster_of(num_devices))
    if wide is None:
        return []
    known = {(point.dp, point.tp) for point in metaop.curve}
    found = [point for point in wide.metaops[0].curve if (point.dp, point.tp) not in known]
    assert [point.num_devices for point in wide.metaops[0].curve] == sorted(
        point.num_devices for point in wide.metaops[0].curve
    )
    return [(point.dp, point.tp, pytest.approx(point.op_s)) for point in found]


def test_a_curve_gains_what_is_faster_than_fewer_devices() -> None:
    """On 3 devices the largest of 8 samples' shares has 3. On 5, 6 and 7 it has 2, as on 4."""
    net = cuttable("t/net", 1, SECONDS)
    assert points(net, 2) == []
    assert points(net, 3) == points(net, 8) == [(3, 1, 0.95)]
    # Of 9 samples the largest of 2 shares has 5, of 4 as of 3 has 3, and of 5 to 8 has 2.
    odd = cuttable("t/net", 1, {9: 9.0, 3: 3.0, 1: 1.0})
    assert points(odd, 8) == [(2, 1, 5.0), (5, 1, 2.0)]


def test_a_point_knows_what_is_summed_inside_of_it() -> None:
    """0.2 s of it for 4 samples and 0.1 s for 2."""
    net = cuttable("t/net", 1, SECONDS)
    sums_s = {4: 0.2, 2: 0.1}
    shares = [each.model_copy(update={"communication_s": sums_s.get(each.samples, 0)}) for each in net.shares]
    wide = on_any_number(profile_of(net.model_copy(update={"shares": tuple(shares)})), cluster_of(3))
    assert wide is not None
    (point,) = [point for point in wide.metaops[0].curve if point.dp == 3]
    assert point.communication_s == pytest.approx(0.15)


def test_a_curve_gains_nothing_below_the_smallest_share_or_beyond_the_largest() -> None:
    assert points(cuttable("t/net", 1, {8: 2.0, 4: 1.2}), 8) == []
    part = metaop_of("t/net", 1, {2: 1.2}).model_copy(update={"shares": shares_of({2: 0.7})})
    assert points(part, 3) == []  # three shares would have 3


def test_a_number_that_is_slower_than_fewer_is_left_out() -> None:
    """Between 4 samples, 0.7 s, and 2, 0.9 s."""
    assert points(cuttable("t/net", 1, {8: 2.0, 4: 0.7, 2: 0.9}), 3) == []


def test_groups_of_tensor_parallelism_are_counted_inside_nodes() -> None:
    """3 pairs, on 6 devices of one node and on 9 of three, but not on two nodes of 3."""
    net = cuttable("t/net", 1, SECONDS)
    split = net.model_copy(update={"shares": shares_of({4: 0.5, 2: 0.3}, tp=2)})
    assert points(split, 6) == [(3, 2, 0.4)]
    for nodes, size, found in ((3, 3, [(3, 2, 0.4)]), (2, 3, [])):
        wide = on_any_number(profile_of(split), cluster_of(nodes * size, devices_per_node=size))
        assert (wide is None) == (found == [])


def test_so_do_sets_of_tasks() -> None:
    profile = profile_of(cuttable("t/net", 1, SECONDS))
    sampled = profile.model_copy(update={"task_sets": (TaskShare(tasks=("t",), share=1.0),)})
    plan = make_plan(sampled, cluster_of(3))
    assert {piece.rows for piece in plan.set_plans["t",].slices} == {(0, 2, 5, 8)}
    assert check_plan(plan, sampled) == ()


def test_shares_are_as_equal_as_can_be() -> None:
    assert rows_of(8, 4) is None
    assert rows_of(8, 3) == (0, 2, 5, 8)
    assert rows_of(7, 5) == (0, 1, 2, 4, 5, 7)


@pytest.mark.parametrize("strategy", ["sequential", "distmm", "optimus", "spindle"])
def test_three_devices_share_eight_samples(strategy: StrategyName) -> None:
    """4 ops at 0.95 s in place of 1.2 on two; the bound of equal shares stays."""
    profile = profile_of(cuttable("t/net", 4, SECONDS, param_bytes_per_op=0))
    plan = make_plan(profile, cluster_of(3), strategy)
    assert check_plan(plan, profile) == ()
    assert plan.schema_ == "spindle.plan/2"
    assert {(piece.dp, piece.rows) for piece in plan.slices} == {(3, (0, 2, 5, 8))}
    assert plan.predicted.compute_s == pytest.approx(4 * 0.95, rel=1e-6)
    assert plan.predicted.lower_bound_s == pytest.approx(4 * 1.2, rel=1e-6)
    (share,) = plan.metaops[0].shares
    assert (share.samples, share.source) == (3, "fitted")
    assert share.forward_s + share.backward_s == pytest.approx(0.95)
    assert plan.metaops[0].curve == ()


def test_a_chain_runs_forward_and_then_backward_in_reverse() -> None:
    """A third of 0.95 s forward each, one behind the other."""
    first = cuttable("t/first", 1, SECONDS, param_bytes_per_op=0)
    second = cuttable("t/second", 1, SECONDS, param_bytes_per_op=0, inputs=("t/first",))
    profile = profile_of(first, second)
    plan = make_plan(profile, cluster_of(3), "sequential")
    assert check_plan(plan, profile) == ()
    one, two = plan.slices
    assert (one.metaop, one.rows, two.rows) == ("t/first", (0, 2, 5, 8), (0, 2, 5, 8))
    thirds = [time_s / (0.95 / 3) for piece in (one, two) for both in piece.times_s for time_s in both]
    assert thirds == pytest.approx([0, 1, 4, 6, 1, 2, 2, 4], abs=1e-6)


def test_equal_shares_can_be_asked_for() -> None:
    profile = profile_of(cuttable("t/net", 4, SECONDS, param_bytes_per_op=0))
    plan = make_plan(profile, cluster_of(3), equal_shares=True)
    assert plan.schema_ == "spindle.plan/1"
    assert plan.predicted.compute_s == pytest.approx(4 * 1.2, rel=1e-6)


def test_what_gains_too_little_is_not_searched() -> None:
    """0.75 s on three devices, 0.76 on two: 1.3 % of the bound."""
    profile = profile_of(cuttable("t/net", 4, {8: 1.5, 4: 0.76, 2: 0.74, 1: 0.735}, param_bytes_per_op=0))
    assert on_any_number(profile, cluster_of(3)) is not None
    assert make_plan(profile, cluster_of(3)).schema_ == "spindle.plan/1"


def test_a_plan_of_equal_shares_is_kept_where_it_is_faster() -> None:
    """Three devices would sum 64 MiB for each op over slow links; one sums nothing."""
    slow = Link(latency_us=1000, bandwidth_gb_per_s=0.001)
    net = cuttable("t/net", 2, SECONDS, param_bytes_per_op=2**26)
    cluster = cluster_of(3).model_copy(update={"links": Links(intra_node=slow, inter_node=slow)})
    plan = make_plan(profile_of(net), cluster)
    assert check_plan(plan, profile_of(net)) == ()
    assert all(piece.rows is None for piece in plan.slices)


def test_a_plan_whose_passes_do_not_fit_apart_gives_way_to_one_of_equal_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = profile_of(cuttable("t/net", 4, SECONDS, param_bytes_per_op=0))
    for apart in (lambda *_: None, _slower):
        monkeypatch.setattr(find, "told_apart", apart)
        monkeypatch.setattr(make, "in_pipelines", lambda *of: of[2])
        for effort in (0, 1):
            plan = make_plan(profile, cluster_of(3), effort=effort)
            assert all(piece.rows is None for piece in plan.slices)
            assert plan.predicted.compute_s == pytest.approx(4 * 1.2, rel=1e-6)


def _slower(_: object, evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    return replace(evaluated, prediction=replace(evaluated.prediction, iteration_s=100.0))


@pytest.mark.parametrize(
    "needs", [{"changes_buffers": True}, {"batch_sums": (BatchSum(num_bytes=8, forward=1, backward=1),)}]
)
def test_what_stays_in_one_micro_batch_is_cut_into_shares_alone(needs: dict[str, object]) -> None:
    net = cuttable("t/net", 1, SECONDS).model_copy(update=needs)
    assert alike_micro_batches(profile_of(net), 2) == {}
    with pytest.raises(NoPlanError, match="its batch is not cut into micro-batches"):
        in_micro_batches(profile_of(net), {"t": 2}, cluster_of(2))
    assert points(net, 3) == [(3, 1, 0.95)]
    plan = make_plan(profile_of(net), cluster_of(3), "sequential")
    assert check_plan(plan, profile_of(net)) == ()
    assert plan.slices[0].rows == (0, 2, 5, 8)


@examples(25)
@given(st.data())
def test_plans_on_any_number_of_devices_are_valid(data: st.DataObject) -> None:
    """Of one or two tasks of two MetaOps, on one node or two."""
    metaops: list[MetaOpProfile] = []
    for task in ("a", "b")[: data.draw(st.integers(1, 2))]:
        batch_size = data.draw(st.sampled_from([6, 8, 9, 16]))
        sizes = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        for number in range(2):
            rate, base = data.draw(st.floats(0.01, 1)), data.draw(st.floats(0.0, 0.5))
            inputs = (f"{task}/0",) if number else ()
            seconds = {n: base + rate * n for n in sizes}
            num_ops = data.draw(st.integers(1, 4))
            metaops.append(cuttable(f"{task}/{number}", num_ops, seconds, inputs=inputs, parameters="all"))
    num_devices = data.draw(st.integers(2, 8))
    per_node = num_devices // 2 if num_devices % 2 == 0 and data.draw(st.booleans()) else num_devices
    profile = profile_of(*metaops)
    strategy: StrategyName = data.draw(st.sampled_from(["sequential", "distmm", "optimus", "spindle"]))
    plan = make_plan(profile, cluster_of(num_devices, devices_per_node=per_node), strategy, 0)
    assert check_plan(plan, profile) == ()
    assert (plan.schema_ == "spindle.plan/2") or all(piece.rows is None for piece in plan.slices)
