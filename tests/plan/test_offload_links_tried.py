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
from spindle_cli.plan.search.memory_fallback import TightProblem
from spindle_cli.plan.tight.keeping_more import keeping_more
from spindle_cli.profile.types import Profile
from spindle_cli.units import GIB


@dataclass(frozen=True)
class _Taking:
    """A problem whose plans take so long; infinite: none fits."""

    problem: Problem
    taken_s: float
    lower_bound_s: float = 0.0

    def best(self, strategy: str, effort: int, within_s: float = inf) -> tuple[Judged | None, bool]:
        prediction = Prediction(self.taken_s, self.taken_s, 0.0, 0.0, 0.0, 0.0)
        return (None if self.taken_s == inf else Judged("spindle", (), (), prediction)), False


@dataclass(frozen=True)
class _AsSaid(SeveralTypes):
    """Poses such problems, by the types with links; says what it was asked for."""

    seconds: Mapping[tuple[str, ...], float]
    asked: list[tuple[int, float, tuple[str, ...]]] = field(default_factory=list)

    def posed(self, profile: Profile, cluster: Cluster, fallback: MemoryFallback | None = None) -> Any:
        assert fallback is not None
        types = tuple(kind for kind, link in cluster.host_link_of_type.items() if link is not None)
        self.asked.append((sum(fallback.recompute.values()), fallback.offload.get("t/net", 0.0), types))
        return _Taking(make_mixed_problem(profile, cluster), self.seconds.get(types, inf))


@pytest.mark.parametrize(
    ("seconds", "taken_s", "tried"),
    [
        ({BOTH: 3.0, (FAST,): 1.0}, 3.0, [BOTH]),
        ({(FAST,): 2.0, (SLOW,): 1.0}, 1.0, [BOTH, (FAST,), (SLOW,)]),
        ({}, None, [BOTH, (FAST,), (SLOW,)]),
    ],
)
def test_where_nothing_fits_over_all_links_those_of_one_type_are_tried(
    seconds: Mapping[tuple[str, ...], float], taken_s: float | None, tried: list[tuple[str, ...]]
) -> None:
    posing: Any = _AsSaid(seconds)
    found = find._recomputing_alike(profile_on_types(net()), cluster(1.0, 0.25), "spindle", 0, posing, inf)
    assert (None if found is None else found.judged.prediction.iteration_s) == taken_s
    assert list(dict.fromkeys(types for *_, types in posing.asked)) == tried
    # All that hides on any type with a link, first with nothing recomputed, then with more and more.
    hides = {BOTH: 0.5, (FAST,): 0.5, (SLOW,): 0.25}
    for types in tried:
        asked = [(count, share) for count, share, over in posing.asked if over == types]
        assert asked == [(count, pytest.approx(hides[types])) for count in (0, 3, 6, 9, 12)[: len(asked)]]
        assert len(asked) == (2 if types in seconds else 5)


def test_what_is_kept_again_moves_all_that_hides_besides() -> None:
    profile, on, posing = profile_on_types(net()), cluster(1.0, 0.25), _AsSaid({BOTH: 1.0})
    of_posing: Any = posing
    tight = TightProblem(MemoryFallback(), of_posing.posed(profile, on, MemoryFallback()), of_posing)
    posing.asked.clear()
    found = keeping_more(tight, "spindle")
    assert found is not None
    assert found.tight.fallback.offload == {"t/net": pytest.approx(0.5)}
    assert [(count, share) for count, share, _ in posing.asked][:2] == [
        (12, pytest.approx(0.5)),
        (0, pytest.approx(0.5)),
    ]


def test_without_links_something_is_recomputed_from_the_first() -> None:
    posing: Any = _AsSaid({(): 1.0})
    find._recomputing_alike(profile_on_types(net()), cluster(None, None), "spindle", 0, posing, inf)
    assert [(count, share) for count, share, _ in posing.asked] == [(3, 0.0), (6, 0.0)]


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
