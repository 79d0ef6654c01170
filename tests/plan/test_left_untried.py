"""What planning leaves out because it cannot be the best, and what it does not work out twice."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import SELECTIVE, cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.account import device_memory as memory_account
from spindle_cli.account.device.account import Account
from spindle_cli.account.device_memory import RolesOf, device_memory
from spindle_cli.account.joint import joint_of
from spindle_cli.plan.best import candidates
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.placing.arrange import arrange
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Candidate
from spindle_cli.plan.search import evaluate
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, best_of, measure
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.strategies.spindle import spindle
from spindle_cli.profile.types import CurvePoint, Profile
from spindle_cli.units import MIB

SEEDS = st.integers(0, 2**32)


def drawn(seed: int) -> Profile:
    """Some tasks of two MetaOps each, some of which share parameters."""
    random = Random(seed)
    metaops = []
    for task in "abcd":
        curve = {1: 4.0, 2: random.choice((2.0, 3.0)), 4: random.choice((1.0, 1.9))}
        key = random.choice("pqr")
        metaops.append(metaop_of(f"{task}/in", random.randrange(1, 4), curve, parameters=key))
        metaops.append(metaop_of(f"{task}/out", random.randrange(1, 4), curve, inputs=(f"{task}/in",)))
    return profile_of(*metaops)


def quick_candidates(problem: Problem) -> list[Candidate]:
    """Those of a quick look."""
    return [
        candidate
        for candidates in spindle(problem, lower_bound(problem), NO_SEARCH)
        for candidate in candidates
    ]


@settings(max_examples=20)
@given(seed=SEEDS)
def test_a_quick_look_finds_the_best_of_all_candidates(seed: int) -> None:
    problem = make_problem(drawn(seed), cluster_of(4, devices_per_node=2))
    every_candidate = quick_candidates(problem)
    every = [best_of(problem, [candidate], with_care=False) for candidate in every_candidate]
    fastest = min(
        (each for found in every for each in found if each is not None), key=EvaluatedCandidate.rank
    )
    found = best_of(problem, every_candidate, with_care=False)
    assert (
        min((each for each in found if each is not None), key=EvaluatedCandidate.rank).rank()
        == fastest.rank()
    )
    earliest_s = min(candidate.end_s for candidate in every_candidate)
    assert best_of(problem, every_candidate, with_care=False, within_s=0.999 * earliest_s) == []
    assert len(best_of(problem, every_candidate, with_care=False, within_s=earliest_s)) >= 1


@settings(max_examples=20)
@given(seed=SEEDS)
def test_what_devices_hold_is_that_of_where_they_are_after_exchanges(seed: int) -> None:
    problem = make_problem(drawn(seed), cluster_of(4, devices_per_node=2))
    for evaluated in best_of(problem, quick_candidates(problem)):
        assert evaluated is not None
        again = measure(problem, evaluated.strategy, evaluated.slices, evaluated.after)
        assert again is not None
        assert evaluated.memory == again.memory


def split_beside_whole() -> Profile:
    """A layer of which each of four devices has one of two parts, and one of them all, for another op."""
    point = CurvePoint(num_devices=4, dp=2, tp=2, forward_s=1.0, backward_s=1.0, source="measured")
    split = metaop_of("a/m", 1, {1: 1.0}, param_bytes_per_op=2**23, parameters="p")
    whole = metaop_of("b/m", 1, {1: 8.0}, param_bytes_per_op=2**23, parameters="p")
    return profile_of(split.model_copy(update={"curve": (point,)}), whole)


@pytest.mark.parametrize("profile", [split_beside_whole(), drawn(0), drawn(1)])
def test_devices_that_need_the_same_do_so_worked_out_one_by_one(
    monkeypatch: pytest.MonkeyPatch, profile: Profile
) -> None:
    seen: list[tuple[Account, list[RolesOf]]] = []
    original = memory_account._needs_by_device

    def each_once(account: Account, of_device: list[RolesOf], has_room: object) -> object:
        seen.append((account, of_device))
        return original(account, of_device, has_room)  # type: ignore[arg-type]

    monkeypatch.setattr(memory_account, "_needs_by_device", each_once)
    make_plan(profile, cluster_of(4, devices_per_node=2))
    assert any(len(dict.fromkeys(of_device)) > 1 for _, of_device in seen)
    for account, of_device in seen:
        for roles in dict.fromkeys(of_device):
            alone = replace(
                account, known_held={}, known_needs={}, known_used={}, known_levels={}, known_gathered={}
            )
            assert alone.need(*roles).peak() == account.need(*roles).peak()


def test_what_fits_one_task_after_the_other_alone_is_placed() -> None:
    """Two tasks that keep 600 MiB each, on a device of 1 GiB."""
    nets = [
        metaop_of(f"{task}/net", 1, {1: 1.0}, param_bytes_per_op=0, activation_bytes_per_op=600 * MIB)
        for task in "ab"
    ]
    problem = make_problem(profile_of(*nets), cluster_of(1, memory_gib=1))
    found = best_of(problem, quick_candidates(problem))
    assert found
    assert all(evaluated is not None and evaluated.is_apart for evaluated in found)


def test_two_devices_that_send_each_other_gain_nothing_by_an_exchange() -> None:
    """They lie on two nodes before and after it."""
    first = metaop_of("a/in", 1, {1: 1.0})
    last = metaop_of("a/out", 1, {1: 1.0}, inputs=("a/in",))
    problem = make_problem(profile_of(first, last), cluster_of(2, devices_per_node=1))
    slices = (slice_of(first, (0, 1), (0,), 0.0), slice_of(last, (0, 1), (1,), 1.0))
    for num_exchanges in range(1, 9):
        arranged, goes_to = arrange(problem, slices, num_exchanges)
        assert list(goes_to) == [0, 1]
        assert arranged == slices


def test_what_a_device_holds_for_another_set_of_tasks_is_its_own() -> None:
    """Two devices run the same of one task; the second holds 10 MiB of another one's besides."""
    a = metaop_of("a/m", 1, {2: 1.0})
    b = metaop_of("b/m", 1, {1: 1.0}, param_bytes_per_op=10 * MIB)
    profile = profile_of(a, b)
    plans = (slice_of(a, (0, 1), (0, 1), 0.0),), (slice_of(b, (0, 1), (1,), 0.0),)
    joint = joint_of(plans, profile.by_name)
    held = device_memory([a], plans[0], cluster_of(2), profile, turn=(joint, 0))
    assert [each.parameter_bytes / MIB for each in held] == [1, 11]


def test_sets_of_tasks_that_keep_something_else_of_the_same_slice_are_told_apart() -> None:
    a = metaop_of("a/m", 1, {1: 1.0}, **SELECTIVE)
    whole, part = (
        slice_of(a, (0, 1), (0,), 0.0, recompute=True, selective=selective) for selective in (False, True)
    )
    assert len(joint_of([(whole,), (part,)], {"a/m": a}).slices) == 2
    assert len(joint_of([(part,), (part,)], {"a/m": a}).slices) == 1


def test_what_another_set_uses_more_of_counts_for_the_device_that_runs_it_alone() -> None:
    """Two devices run the same of one task; the second runs another one's op too, which uses 3 MiB of the
    same block of parameters.
    """
    a = metaop_of("a/m", 1, {2: 1.0}, parameters="p")
    b = metaop_of("b/m", 1, {1: 1.0}, parameters="p", param_bytes_per_op=3 * MIB)
    profile = profile_of(a, b)
    plans = (slice_of(a, (0, 1), (0, 1), 0.0),), (slice_of(b, (0, 1), (1,), 0.0),)
    joint = joint_of(plans, profile.by_name)
    held = device_memory([a], plans[0], cluster_of(2), profile, turn=(joint, 0))
    assert [each.parameter_bytes / MIB for each in held] == [1, 3]


def test_kinds_of_candidates_come_the_best_first_of_equals_a_baseline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_baseline = {"sequential": evaluated_in(11.0), "distmm": None, "optimus": evaluated_in(10.0)}
    begins = [evaluated_in(12.0), None, evaluated_in(10.0)]
    quick: list[list[EvaluatedCandidate | None]] = [[evaluated_in(9.5), evaluated_in(9.0)], [None]]
    careful: list[list[EvaluatedCandidate | None]] = [[evaluated_in(9.0), evaluated_in(8.0)], [None]]
    searched = iter([begins, *quick, *careful])
    monkeypatch.setattr(candidates, "best_of", lambda *_, **__: next(searched))
    monkeypatch.setattr(candidates, "may_gain", lambda *_: False)
    problem = make_problem(drawn(2), cluster_of(4))
    found, all_fit = candidates.best_of_each(
        problem, lower_bound(problem), "spindle", 0, lambda name: by_baseline[name]
    )
    assert [each.prediction.iteration_s for each in found] == [8.0, 10.0, 10.0, 11.0]
    assert found[1] is by_baseline["optimus"]
    assert not all_fit


def evaluated_in(iteration_s: float) -> EvaluatedCandidate:
    """A plan that takes so long."""
    return EvaluatedCandidate("spindle", (), (), Prediction(iteration_s, 9.0, 0.0, 0.0, 0.0, 0.0))


def test_schedules_longer_than_the_best_plan_are_not_placed_with_care_either() -> None:
    problem = make_problem(drawn(3), cluster_of(4, devices_per_node=2))
    every = quick_candidates(problem)
    earliest_s = min(candidate.end_s for candidate in every)
    assert best_of(problem, every, within_s=0.999 * earliest_s) == []
    assert len(best_of(problem, every, within_s=earliest_s)) >= 1


@pytest.mark.parametrize(("known_s", "with_care"), [(1.0, True), (1 / 1.0101, False), (1 / 1.0099, True)])
def test_what_takes_one_percent_longer_than_the_best_plan_is_not_placed_with_care(
    monkeypatch: pytest.MonkeyPatch, known_s: float, *, with_care: bool
) -> None:
    """A candidate that takes 1 s by a quick placement, where the best plan known takes that or hardly
    less.
    """
    tried: list[int] = []

    def placed(*request: object) -> EvaluatedCandidate:
        tried.append(len(request[2]))  # type: ignore[arg-type]  # the weights
        return evaluated_in(1.0)

    monkeypatch.setattr(evaluate, "best_placed", placed)
    problem = make_problem(drawn(3), cluster_of(4))
    (candidate, *_) = quick_candidates(problem)
    short = replace(candidate, pieces=tuple(replace(piece, end_s=0.5) for piece in candidate.pieces))
    best_of(problem, [short], within_s=known_s)
    assert len(tried) == (2 if with_care else 1)


@pytest.mark.parametrize(
    ("seconds", "is_searched_on", "cares"),
    [(1.2, True, True), (1.21, True, False), (1.21, False, True)],
)
def test_a_search_places_with_care_what_it_finds_alone(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_searched_on: bool, cares: bool
) -> None:
    """Not what it begins with: schedules of other strategies. Nor what leaves much to a search over
    everything, which moves devices itself.
    """
    problem = make_problem(drawn(2), cluster_of(4))
    bound = lower_bound(problem)
    plan = evaluated_in(seconds * bound.lower_bound_s)
    care: list[bool] = []

    def best_of(*_: object, with_care: bool, within_s: float) -> list[EvaluatedCandidate | None]:
        assert within_s > 0
        care.append(with_care)
        return [plan]

    monkeypatch.setattr(candidates, "best_of", best_of)
    monkeypatch.setattr(candidates, "may_gain", lambda *_: False)
    best, _ = candidates.best_of_each(
        problem, bound, "spindle", 0, lambda _: plan, is_searched_on=is_searched_on
    )
    assert best[0] is plan
    assert care == [False, False, False] + [True, True] * cares


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_within_the_iteration_of_the_best_plan_the_same_is_found(seed: int) -> None:
    posed = ProblemPoser().posed(drawn(seed), cluster_of(4))
    best, _ = posed.best("spindle", 0)
    assert best is not None and best.strategy == "spindle"
    within, _ = posed.best("spindle", 0, best.prediction.iteration_s)
    assert within is not None and within.rank() == best.rank() and within.slices == best.slices
