"""Which parts of a cluster of several types are planned for, worked out by hand."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import pytest

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.plan.best import idle_nodes as parts_module
from spindle_cli.plan.best.idle_nodes import MOST_SEARCHED, _Costs, _fastest_in_turn
from spindle_cli.plan.posing import make_problem


@pytest.mark.parametrize(
    ("prices", "room", "bound_s"),
    [
        # 2 ops of 6 samples at 1 s each; a slow device's time is worth nothing, but there is none.
        ((1.0, 0.0), (1, 0), 12.0),
        # At 2 s each on the slow one alone, for half the price.
        ((1.0, 0.5), (0, 1), 24.0),
        # On either, or four samples and two on both for 4 s: worth 6 an op, of 1.5 a second.
        ((1.0, 0.5), (1, 1), 8.0),
        ((1.0, 0.0), (0, 1), 0.0),
    ],
)
def test_a_part_has_allocations_that_all_its_types_have_room_for(
    prices: tuple[float, float], room: tuple[int, int], bound_s: float
) -> None:
    net = metaop_on_types("t/net", 2, {"fast": 1.0, "slow": 2.0}, batch_size=6)
    problem = make_problem(profile_on_types(net), cluster_of_types({"fast": 1, "slow": 1}))
    assert _Costs(problem, prices).bound_s(room) == pytest.approx(bound_s)


def test_the_two_best_parts_are_searched_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts whose schedules end after 1, 2, ... s, with sums after 5, 4, 3 s and so on."""
    iteration_s = {1.0: 5.0, 2.0: 4.0, 3.0: 3.0, 4.5: 4.6, 4.9: 1.0}
    evaluated: list[float] = []

    def evaluate(_: object, candidate: SimpleNamespace) -> SimpleNamespace:
        evaluated.append(candidate.pieces[-1].end_s)
        seconds = iteration_s[evaluated[-1]]
        return SimpleNamespace(rank=lambda: (False, seconds), prediction=SimpleNamespace(iteration_s=seconds))

    candidates = {end_s: SimpleNamespace(pieces=[SimpleNamespace(end_s=end_s)]) for end_s in iteration_s}
    monkeypatch.setattr(parts_module, "evaluate_as_placed", evaluate)
    monkeypatch.setattr(parts_module, "_candidate_in_turn", lambda _, part: candidates[part])
    found = _fastest_in_turn(None, list(iteration_s), inf)  # type: ignore[arg-type]  # numbers for parts
    assert MOST_SEARCHED == 2
    assert [part for _, part in found] == [3.0, 2.0]
    # From the third on no iteration is shorter than the second best, 4 s, whose schedule alone takes longer.
    assert evaluated == [1.0, 2.0, 3.0]
