"""Ops whose curves rise are spread over the devices of their inputs where messages cost more than that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from candidates import candidate_of, problem_of

from helpers.cut import shares_of
from helpers.plans import cluster_of, curve_of, metaop_of, profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search import spread
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, evaluate
from spindle_cli.plan.search.spread import spread_out
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.types import MetaOpProfile, Profile

LARGE, SMALL = 100_000_000, 8


def tower(num_devices: int, output_bytes: int, name: str = "t/tower") -> MetaOpProfile:
    made = metaop_of(name, 1, {num_devices: 1.0}, trainable_fraction=0.0)
    return made.model_copy(update={"output_bytes": output_bytes})


def loss(op_s: dict[int, float], inputs: tuple[str, ...] = ("t/tower",), **more: Any) -> MetaOpProfile:
    made = metaop_of("t/loss", 1, op_s, inputs=inputs, parameters=None, param_bytes_per_op=0, **more)
    return made.model_copy(update={"output_bytes": 0})


def evaluated(problem: Problem, *devices: tuple[int, ...]) -> EvaluatedCandidate:
    """Of two MetaOps, one after the other, on these devices."""
    candidate = candidate_of(problem, (0, 0, 1, len(devices[0]), 0.0), (1, 0, 1, len(devices[1]), 1.0))
    found = evaluate(problem, replace(candidate, devices=devices))
    assert found is not None
    return found


def test_a_loss_goes_to_the_devices_that_hold_its_input_and_nothing_moves() -> None:
    """Three quarters of 100 MB at 5 GB/s take 15 ms each way, the loss on four devices 2 ms more."""
    problem = problem_of(cluster_of(4), tower(4, LARGE), loss({1: 0.010, 2: 0.011, 4: 0.012}))
    before = evaluated(problem, (2, 0, 3, 1), (0,))
    assert before.prediction.iteration_s == pytest.approx(1.010 + 2 * (3 * 10e-6 + 0.015))
    (four, two) = spread._choices(problem, before.slices)
    assert (four.slice_.dp, two.slice_.dp) == (4, 2)
    assert four.saved_s == pytest.approx(2 * (3 * 10e-6 + 0.015) - 0.002)
    assert two.saved_s == pytest.approx(2 * (2 * 10e-6 + 0.010) - 0.001)  # each still takes a quarter
    after = spread_out(problem, before)
    assert (after.slices[1].devices, after.slices[1].dp) == ((2, 0, 3, 1), 4)
    assert after.prediction.iteration_s == pytest.approx(1.012)
    assert after.prediction.transfer_s == pytest.approx(0, abs=1e-8)


def test_a_loss_goes_to_a_number_of_devices_that_does_not_divide_its_batch() -> None:
    """8 samples on three devices as 2, 3 and 3: a loss on the second lacks 5 of 8 parts of 100 MB."""
    made, taken = tower(1, LARGE), loss({1: 0.010})
    made = made.model_copy(update={"curve": curve_of({3: 1.0}), "shares": shares_of({3: 1.0})})
    curve = curve_of({1: 0.010, 3: 0.012})
    taken = taken.model_copy(update={"curve": curve, "shares": shares_of({3: 0.012})})
    whole = profile_of(tower(1, LARGE), loss({1: 0.010}))
    profile = Profile.model_construct(**{**dict(whole), "metaops": (made, taken)})
    problem = make_problem(profile, cluster_of(3))
    before = evaluated(problem, (2, 0, 1), (0,))
    assert [piece.rows for piece in before.slices] == [(0, 2, 5, 8), None]
    (three,) = spread._choices(problem, before.slices)
    assert three.saved_s == pytest.approx(2 * (2 * 10e-6 + 0.0125) - 0.002)
    after = spread_out(problem, before)
    assert (after.slices[1].devices, after.slices[1].rows) == ((2, 0, 1), (0, 2, 5, 8))
    assert after.prediction.iteration_s == pytest.approx(1.012)
    assert after.prediction.transfer_s == pytest.approx(0, abs=1e-8)


def test_where_messages_take_less_than_it_would_cost_a_loss_stays() -> None:
    problem = problem_of(cluster_of(4), tower(4, SMALL), loss({1: 0.010, 2: 0.021, 4: 0.022}))
    before = evaluated(problem, (2, 0, 3, 1), (0,))
    assert spread_out(problem, before) is before


def test_a_loss_on_as_many_devices_as_its_inputs_stays() -> None:
    problem = problem_of(cluster_of(4), tower(2, LARGE), loss({2: 0.010, 4: 0.011}))
    before = evaluated(problem, (0, 1), (2, 3))
    assert before.prediction.transfer_s > 0.01
    assert spread_out(problem, before) is before


def test_a_whole_node_is_taken_rather_than_devices_of_each_where_gathers_are_slow_between_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On all four the loss is slow. On devices 0 and 1 half of the input crosses between the nodes, on 0 and
    2 none does; but the gather does, which takes longer.
    """
    monkeypatch.setattr(spread, "JUDGED_PER_SLICE", 1)
    gather = (BatchSum(kind="gather", num_bytes=2 * LARGE, forward=1, backward=1),)
    cluster = cluster_of(4, devices_per_node=2)
    found = {}
    for sums in ((), gather):
        problem = problem_of(cluster, tower(4, LARGE), loss({1: 0.2, 2: 0.05, 4: 9.0}, batch_sums=sums))
        found[sums] = spread_out(problem, evaluated(problem, (0, 1, 2, 3), (0,))).slices[1].devices
    assert found == {(): (0, 2), gather: (0, 1)}


def test_what_comes_back_is_counted() -> None:
    """One way the messages take 15 ms, less than the 20 ms that the loss takes longer; both ways more."""
    problem = problem_of(cluster_of(4), tower(4, LARGE), loss({1: 0.010, 4: 0.030}))
    assert spread_out(problem, evaluated(problem, (0, 1, 2, 3), (0,))).slices[1].dp == 4


def test_what_does_not_fit_the_memory_stays() -> None:
    """A quarter of the loss's activations is 2 GiB in the one case, 128 MiB in the other."""
    cluster, curve = cluster_of(4, memory_gib=1), {1: 0.010, 4: 0.011}
    large, small = (
        problem_of(cluster, tower(4, LARGE), loss(curve, activation_bytes_per_op=num_bytes))
        for num_bytes in (2**33, 2**29)
    )
    before = evaluated(small, (0, 1, 2, 3), (0,))
    assert spread_out(small, before).slices[1].dp == 4
    assert spread_out(large, before) is before


def test_a_schedule_in_which_one_waits_for_another_keeps_to_it() -> None:
    """The other task's tower runs after the loss, though its device is free before."""
    other = metaop_of("u/tower", 1, {1: 0.001})
    problem = problem_of(cluster_of(4), tower(2, LARGE), loss({1: 0.010, 2: 0.012}), other)
    candidate = candidate_of(problem, (0, 0, 1, 2, 0.0), (1, 0, 1, 1, 1.0), (2, 0, 1, 1, 1.01))
    before = evaluate(problem, replace(candidate, devices=((0, 1), (0,), (3,)), after=(0, 1, 2)))
    assert before is not None
    after = spread_out(problem, before)
    assert [piece.dp for piece in after.slices] == [2, 2, 1]
    assert [piece.start_s for piece in after.slices] == pytest.approx([0, 1, 1.012], abs=1e-6)


@pytest.mark.parametrize("strategy", ["sequential", "distmm", "optimus", "spindle"])
def test_every_strategy_s_plan_is_spread_and_passes_the_check(strategy: StrategyName) -> None:
    cluster: Cluster = cluster_of(4, devices_per_node=2)
    profile = profile_of(tower(4, LARGE), loss({1: 0.010, 2: 0.011, 4: 0.012}))
    plan = make_plan(profile, cluster, strategy, effort=0)
    assert {piece.metaop: piece.dp for piece in plan.slices} == {"t/tower": 4, "t/loss": 4}
    assert check_plan(plan, profile) == ()


@pytest.mark.parametrize("side_by_side", [True, False])
def test_several_losses_are_spread(side_by_side: bool) -> None:
    """Side by side, one of them alone gains nothing; one after the other, only the last one does."""
    first, second = ((0, 1), (2, 3)) if side_by_side else ((0, 1), (0, 1))
    towers = [tower(2, LARGE, f"{task}/tower") for task in "tu"]
    losses = [
        loss({1: 0.010, 2: 0.012}, inputs=(each.name,)).model_copy(
            update={"task": each.task, "name": f"{each.task}/loss"}
        )
        for each in towers
    ]
    problem = problem_of(cluster_of(4), *towers, *losses)
    start_s = 0.0 if side_by_side else 1.0
    candidate = candidate_of(
        problem, (0, 0, 1, 2, 0), (1, 0, 1, 2, start_s), (2, 0, 1, 1, 2), (3, 0, 1, 1, 2)
    )
    before = evaluate(problem, replace(candidate, devices=(first, second, first[:1], second[1:])))
    assert before is not None
    after = spread_out(problem, before)
    assert after.prediction.iteration_s == pytest.approx(1.012 if side_by_side else 2.022)
    assert [piece.dp for piece in after.slices] == [2, 2, 2 if side_by_side else 1, 2]


def test_inputs_of_two_producers_share_a_device_s_port() -> None:
    """Each alone takes 8 ms both ways, less than the 10 ms that four devices cost; together 16."""
    towers = [tower(4, 25_000_000, name) for name in ("t/one", "t/two")]
    problem = problem_of(
        cluster_of(4), *towers, loss({1: 0.010, 4: 0.020}, inputs=tuple(each.name for each in towers))
    )
    candidate = candidate_of(problem, (0, 0, 1, 4, 0.0), (1, 0, 1, 4, 1.0), (2, 0, 1, 1, 2.0))
    devices = ((0, 1, 2, 3), (0, 1, 2, 3), (0,))
    before = evaluate(problem, replace(candidate, devices=devices))
    assert before is not None
    assert spread_out(problem, before).slices[2].dp == 4


@pytest.mark.parametrize("gains_at", [2, 3])
def test_after_three_trials_in_vain_no_more_is_tried(monkeypatch: pytest.MonkeyPatch, gains_at: int) -> None:
    """Six losses that could each go to other devices; the trial `gains_at`, from 0, is the first to gain."""
    problem = problem_of(cluster_of(4), tower(4, LARGE), loss({1: 0.010, 2: 0.011, 4: 0.012}))
    before = evaluated(problem, (2, 0, 3, 1), (0,))
    faster = evaluated(problem, (2, 0, 3, 1), (2, 0, 3, 1)[:1])
    faster = replace(faster, prediction=replace(faster.prediction, iteration_s=0.5))
    choices = [spread._Choice(1, before.slices[1], 1.0 + number) for number in range(6)]
    monkeypatch.setattr(spread, "_choices", lambda *_: choices)
    tried: list[int] = []

    def evaluated_again(*_: object) -> EvaluatedCandidate | None:
        tried.append(1)
        return faster if len(tried) == gains_at + 1 else None

    monkeypatch.setattr(spread, "_evaluated_again", evaluated_again)
    found = spread_out(problem, before)
    assert (found is faster, len(tried)) == ((True, 6) if gains_at == 2 else (False, 3))
