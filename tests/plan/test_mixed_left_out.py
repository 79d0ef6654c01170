"""What plans for several types leave out because it cannot be faster than what is known."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from plan.test_mixed_memory import split_by_two
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.bound.bound import lower_bound, lower_bound_under
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.mixed import candidates as posed_module
from spindle_cli.plan.problem import MemoryFallback
from spindle_cli.plan.schedule import Candidate
from spindle_cli.plan.search.memory_fallback import (
    ABOVE_BOUND,
    every_split,
    may_be_faster,
    splits,
)
from spindle_cli.plan.types import Plan
from spindle_cli.plan.weights import choose
from spindle_cli.profile.types import Profile
from spindle_cli.units import GIB

TIMES = {"fast": 1.0, "slow": 2.0}
ONE_EACH = cluster_of_types({"fast": 1, "slow": 1})
TWO_EACH = cluster_of_types({"fast": 2, "slow": 2})


def chain(batch_size: int = 6, num_ops: int = 2) -> Profile:
    """An op takes 4 s on one device of each type."""
    return profile_on_types(metaop_on_types("t/net", num_ops, TIMES, batch_size=batch_size))


@pytest.mark.parametrize(("by", "may"), [(1.0, False), (1 + ABOVE_BOUND, False), (1.0201, True)])
def test_a_plan_is_at_least_two_per_cent_above_its_bound_where_memory_is_short(by: float, may: bool) -> None:
    posed = SimpleNamespace(lower_bound_s=8.0)
    assert may_be_faster(posed, 8.0 * by) is may  # type: ignore[arg-type]  # a stand-in


def test_nothing_known_leaves_nothing_out_and_asks_for_no_bound() -> None:
    assert may_be_faster(SimpleNamespace(), float("inf"))  # type: ignore[arg-type]  # it has none


def test_prices_of_whole_layers_bound_those_that_are_split() -> None:
    """Split by two an op takes 1.5 times the seconds of two devices: three times the work of whole layers."""
    nets = [split_by_two(metaop_on_types(name, 4, TIMES, batch_size=6), 1.5) for name in ("t/net", "u/net")]
    profile, posing = profile_on_types(*nets), ProblemPoser()
    whole = posing.posed(profile, TWO_EACH)
    assert lower_bound_under(whole.problem, whole.bound, MemoryFallback()) == pytest.approx(
        whole.lower_bound_s, rel=1e-3
    )
    both = MemoryFallback(2, frozenset({"t/net", "u/net"}))
    one = MemoryFallback(2, frozenset({"t/net"}))
    assert whole.least_s(both) == pytest.approx(3 * whole.lower_bound_s, rel=0.02)
    assert whole.least_s(one) == pytest.approx(2 * whole.lower_bound_s, rel=0.02)
    for split in (one, both):
        posed = posing.posed(profile, TWO_EACH, split)
        assert whole.least_s(split) <= posed.lower_bound_s * (1 + 1e-9)
        assert posed.least_s(both) == posed.lower_bound_s


def test_prices_that_break_their_own_constraints_bound_no_more_than_those_that_keep_them() -> None:
    """2 ops of 4 s count for a quarter more, and so does every second of the end."""
    problem = ProblemPoser().posed(chain(), ONE_EACH).problem
    sound = lower_bound(problem)
    (end,) = (name for name in sound.row_prices if name.startswith("end_"))
    known_s = [
        lower_bound_under(
            problem,
            replace(sound, row_prices={**dict.fromkeys(sound.row_prices, 0.0), end: price}),
            MemoryFallback(),
        )
        for price in (0.5, 1.0, 1.25)
    ]
    assert known_s == pytest.approx([4.0, 8.0, 8.0], rel=1e-6)


def test_splits_are_posed_where_their_bound_by_prices_leaves_them_a_chance() -> None:
    net = split_by_two(metaop_on_types("t/net", 4, TIMES, batch_size=6), 1.5)
    profile, posing = profile_on_types(net), ProblemPoser()
    whole_s = posing.posed(profile, TWO_EACH).lower_bound_s
    assert len(list(every_split(profile))) == 2
    for within_s, count in ((2.9 * whole_s, 1), (3.2 * whole_s, 2)):
        found = splits(profile, TWO_EACH, posing, within_s)
        assert len(found) == count
        assert not found[0].fallback.split


def test_baselines_that_end_later_than_the_best_iteration_are_not_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Side by side two chains take 30 s, one after another twice as long."""
    chains = [metaop_on_types(f"{task}/net", 10, {"fast": 3.0, "slow": 3.0}, batch_size=1) for task in "ab"]
    evaluated: list[str] = []
    known = posed_module.evaluate

    def evaluate(problem: object, candidate: Candidate) -> object:
        evaluated.append(candidate.name)
        return known(problem, candidate)  # type: ignore[arg-type]

    monkeypatch.setattr(posed_module, "evaluate", evaluate)
    posed = ProblemPoser().posed(profile_on_types(*chains), ONE_EACH)
    best, fits = posed.best("spindle", 0)
    assert best is not None
    assert fits
    assert evaluated == []
    assert posed.best("sequential", 0)[0] is not None
    assert evaluated == ["sequential"]


def with_state(fast_gib: float, slow_gib: float) -> tuple[Profile, Cluster]:
    """2 GiB of parameters and 4 of optimizer state, in halves."""
    net = metaop_on_types(
        "t/net", 2, TIMES, batch_size=6, param_bytes_per_op=GIB, activation_bytes_per_op=GIB // 2
    )
    profile = profile_on_types(net).model_copy(update={"optimizer_state_per_param": 2.0})
    nodes = tuple(
        group.model_copy(update={"memory_gib": gib, "reserve_gib": 0.0})
        for group, gib in zip(ONE_EACH.nodes, (fast_gib, slow_gib), strict=True)
    )
    return profile, ONE_EACH.changed(nodes=nodes)


@pytest.mark.parametrize(("state_gib", "is_tried"), [(2.05, False), (1.95, True)])
def test_weights_are_tried_where_a_twentieth_of_memory_is_optimizer_state(
    monkeypatch: pytest.MonkeyPatch, state_gib: float, is_tried: bool
) -> None:
    """Each device has 2 GiB of it."""
    profile, cluster = with_state(20 * state_gib, 1000.0)
    plan = make_plan(profile, cluster, "sequential")
    tried: list[Profile] = []

    def make(own: Profile, _: Cluster) -> Plan:
        if own.shard_weights:
            tried.append(own)
        return plan.model_copy(update={"shard_weights": own.shard_weights})

    monkeypatch.setattr(choose, "by_free_memory", lambda *_: (3, 1))
    assert choose.with_best_weights(profile, cluster, None, make, lambda _: True).slices == plan.slices
    assert bool(tried) is is_tried
