"""Where activations are moved on several types of device: which links are tried, and what is placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import pytest
from test_offload_on_types import BOTH, FAST, GB, SLOW, cluster, net

from helpers.plans import cluster_of, metaop_of, profile_of
from helpers.several_types import profile_on_types
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.mixed import find
from spindle_cli.plan.mixed.posed import SeveralTypes
from spindle_cli.plan.mixed.problem import make_mixed_problem
from spindle_cli.plan.placing.placement import WEIGHTS, DoesNotFitError, place
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.placing.usage import Footprint
from spindle_cli.plan.problem import MemoryFallback, Problem, make_problem
from spindle_cli.plan.schedule import Draft, whole_slice
from spindle_cli.plan.search import judge
from spindle_cli.plan.search.judge import Judged
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.profile.types import Profile
from spindle_cli.units import GIB


@dataclass(frozen=True)
class _Taking:
    """A problem whose plans take so long; infinite: none fits."""

    problem: Problem
    taken_s: float
    lower_bound_s: float = 0.0

    def least_s(self, split: MemoryFallback) -> float:
        return self.lower_bound_s

    def baselines(self, strategy: str) -> tuple[str, ...]:
        return ()

    def best(self, strategy: str, effort: int, within_s: float = inf) -> tuple[Judged | None, bool]:
        prediction = Prediction(self.taken_s, self.taken_s, 0.0, 0.0, 0.0, 0.0)
        return (None if self.taken_s == inf else Judged("spindle", (), (), prediction)), False


@dataclass(frozen=True)
class _AsSaid(SeveralTypes):
    """Poses such problems, by the types with links where something is given up; says what was asked for."""

    plain_s: float
    seconds: Mapping[tuple[str, ...], float]
    asked: list[tuple[int, float, tuple[str, ...]]] = field(default_factory=list)

    def posed(self, profile: Profile, cluster: Cluster, fallback: MemoryFallback | None = None) -> Any:
        problem = make_mixed_problem(profile, cluster, fallback)
        if fallback is None or not fallback.keeps_less:
            return _Taking(problem, self.plain_s)
        types = tuple(kind for kind, link in cluster.host_link_of_type.items() if link is not None)
        self.asked.append((sum(fallback.recompute.values()), fallback.offload.get("t/net", 0.0), types))
        return _Taking(problem, self.seconds.get(types, inf))


def found_by(posing: Any, on: Cluster, monkeypatch: pytest.MonkeyPatch) -> float | None:
    """The iteration of the plan found, whose passes have no order of their own."""
    monkeypatch.setattr(find, "with_passes_apart", lambda _, judged: judged)
    monkeypatch.setattr(find, "apart", lambda _, judged: judged)
    found = find.find_in_memory(profile_on_types(net()), on, "spindle", NO_SEARCH, posing)
    return None if found is None else found.best.prediction.iteration_s


@pytest.mark.parametrize(
    ("plain_s", "seconds", "taken_s", "tried"),
    [
        (inf, {BOTH: 3.0, (FAST,): 1.0}, 3.0, [BOTH]),
        (inf, {(FAST,): 2.0, (SLOW,): 1.0}, 1.0, [BOTH, (FAST,), (SLOW,)]),
        (inf, {}, None, [BOTH, (FAST,), (SLOW,)]),
        (9.0, {(FAST,): 2.0, (SLOW,): 1.0}, 9.0, [BOTH]),  # something fits
    ],
)
def test_where_nothing_fits_over_all_links_those_of_one_type_are_tried(
    plain_s: float,
    seconds: Mapping[tuple[str, ...], float],
    taken_s: float | None,
    tried: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posing = _AsSaid(plain_s, seconds)
    assert found_by(posing, cluster(1.0, 0.25), monkeypatch) == taken_s
    assert list(dict.fromkeys(types for *_, types in posing.asked)) == tried
    # All that hides on any type with a link, with as much recomputed as saves the rest.
    hides = {BOTH: 0.5, (FAST,): 0.5, (SLOW,): 0.25}
    for types in tried:
        asked = [(count, share) for count, share, over in posing.asked if over == types]
        assert asked[0] == (12, pytest.approx(hides[types]))


def test_without_links_something_is_recomputed_and_nothing_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    posing = _AsSaid(inf, {(): 1.0})
    assert found_by(posing, cluster(None, None), monkeypatch) == 1.0
    assert all(count > 0 and not share for count, share, _ in posing.asked)


ON_TWO = make_mixed_problem(profile_on_types(net()), cluster(1.0, 1.0))
ON_ONE = make_problem(profile_of(metaop_of("t/net", 4, {1: 1.0})), cluster_of(1))


@pytest.mark.parametrize(
    ("problem", "offload", "filled"),
    [(ON_TWO, 0.0, [1.0, 1.0]), (ON_TWO, 0.5, [1.0, 1.0, 1.1, 1.1]), (ON_ONE, 0.5, [1.0, 1.0])],
)
def test_on_several_types_where_activations_are_moved_the_placement_may_estimate_a_little_too_much(
    problem: Problem, offload: float, filled: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = problem.nodes
    piece = whole_slice(node, replace(node.points[-1], offload=offload), 0.0, 1.0)
    asked: list[float] = []

    def no_room(*_: object, filled: float, **__: object) -> None:
        asked.append(filled)
        raise DoesNotFitError(piece, 0)

    monkeypatch.setattr(judge, "place", no_room)
    assert judge._place(problem, Draft("spindle", (piece,)), WEIGHTS[0]) is None
    assert asked == filled


def test_a_device_is_filled_up_to_a_share_of_what_it_has() -> None:
    """12 ops that keep 1/3 and 2/3 of 2 GB are estimated to take 8 GB on the slow device, 16 on the fast one,
    or a little more.
    """
    on = cluster(None, None, memory_gib=16.0)
    problem = make_mixed_problem(profile_on_types(net(kept_bytes=2 * GB)), on)
    (node,) = problem.nodes
    piece = whole_slice(node, node.points[-1], 0.0, 1.0)
    draft = Draft("spindle", (piece,))
    needed = Footprint(problem, piece)
    share = (needed.kept + needed.passing + needed.parameter_bytes) / (16 * GIB)
    assert share > 0.5
    assert place(problem, draft, WEIGHTS[0], filled=1.001 * share).devices == ((0, 1),)
    with pytest.raises(DoesNotFitError):
        place(problem, draft, WEIGHTS[0], filled=0.999 * share)
