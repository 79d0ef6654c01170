"""Problems with how plans of them are found: on devices of one type, or of several. What gives up speed for
memory asks no more of either than this.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.search.evaluate import EvaluatedCandidate
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import Profile

# The effort of a quick look at what is possible: candidates without searching.
NO_SEARCH = -1


class Posed(Protocol):
    """A problem, and how plans of it are found."""

    @property
    def problem(self) -> Problem: ...
    @property
    def lower_bound_s(self) -> float:
        """Seconds that no schedule of it is shorter than."""
        ...

    def least_s(self, split: MemoryFallback) -> float:
        """Seconds that no schedule of the same problem under a split is shorter than, found without its
        program. Where this problem is split itself, or recomputes: of all schedules.
        """
        ...

    def baselines(self, strategy: StrategyName) -> tuple[StrategyName, ...]:
        """Return the strategies that search nothing whose plans a strategy considers."""
        ...

    def by_baseline(self, strategy: StrategyName) -> EvaluatedCandidate | None:
        """The plan of one of them; None: it does not fit."""
        ...

    def best(
        self, strategy: StrategyName, effort: int, within_s: float = inf
    ) -> tuple[EvaluatedCandidate | None, bool]:
        """The best plan that fits, or None; and whether memory stood in no candidate's way. What cannot have
        an iteration within `within_s` may be left out.
        """
        ...


class Posing(Protocol):
    """Makes problems of profiles."""

    def posed(self, profile: Profile, cluster: Cluster, fallback: MemoryFallback | None = None) -> Posed:
        """Pose the problem of a profile, with how plans of it are found."""
        ...
