"""The best plan whose devices are teams, each of which shares out what it runs, where memory is short.

Shared out by all devices, parameters take least memory, but every batch is cut into as many shares as there
are devices, and small shares are slow. Teams have fewer, larger shares each, run different tasks at the same
time, and hold their parameters as often as there are teams that run them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.asked import Asked
from spindle_cli.plan.best.drafts import ONE_TYPE
from spindle_cli.plan.best.find import Found, find
from spindle_cli.plan.best.find_asked import with_less
from spindle_cli.plan.best.micro_batches import MicroBatched, cut_profile
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.problem import make_problem
from spindle_cli.plan.search.judge import Judged
from spindle_cli.plan.strategies.spindle import NO_SEARCH
from spindle_cli.plan.teams.cluster import Team, cluster_of, equal_teams
from spindle_cli.plan.teams.expanded import on_devices
from spindle_cli.plan.teams.profile import on_team, shared_out
from spindle_cli.plan.tight.given_up import least_fallback
from spindle_cli.profile.types import Profile

# How many teams there are; of more each has too little memory, and hands on more.
COUNTS = (2, 4)
# How much of the memory of teams plans may fill: what devices gather into, and their communicators, comes on
# top of what the plan of teams counts.
FILLED = (1.0, 0.95, 0.9, 0.85, 0.8)


def in_teams(profile: Profile, cluster: Cluster, asked: Asked, found: Found | None) -> Found | None:
    """The best plan; `found` where none of teams is faster, or memory is not short.

    Args:
        found: the best of other plans; None: nothing fits.

    Raises:
        BelowBoundError: a bug of the planner.
    """
    if not _may_gain(profile, asked, found):
        return found
    best = found
    for count in COUNTS:
        teams = equal_teams(cluster, count)
        tried = _Planner.of(profile, cluster, teams, asked) if teams else None
        planned = (
            None
            if tried is None
            else tried.planned(inf if best is None else best.best.prediction.iteration_s)
        )
        if planned is not None and (best is None or planned.best.rank() < best.best.rank()):
            best = planned
    return best


def _may_gain(profile: Profile, asked: Asked, found: Found | None) -> bool:
    """Whether memory is short, and nothing is asked for that plans of teams cannot be."""
    is_free = asked.micro_batches is None and asked.sharding is None and not asked.equal_shares
    is_searched = asked.strategy == "spindle" and asked.effort > NO_SEARCH
    is_possible = profile.optimizer_state_sharded and not profile.task_sets
    return is_free and is_searched and is_possible and (found is None or found.is_short)


@dataclass(frozen=True)
class _Planner:
    """Plans some teams.

    Attributes:
        profile: of the devices, with what teams share out.
        seen: of the teams, of whole batches.
    """

    profile: Profile
    seen: Profile
    cluster: Cluster
    teams: Sequence[Team]
    asked: Asked

    @classmethod
    def of(cls, profile: Profile, cluster: Cluster, teams: Sequence[Team], asked: Asked) -> _Planner | None:
        """None: a MetaOp does not run on such teams."""
        shared = profile.sharded(shared_out(profile))
        seen = on_team(shared, teams[0])
        own = Asked(effort=asked.effort, sharding={}, equal_shares=True, offload=False)
        return None if seen is None else cls(shared, seen, cluster, teams, own)

    def planned(self, than_s: float) -> Found | None:
        """The best plan that fits and may take less than so long; None: there is none."""
        whole = make_problem(self.seen, cluster_of(self.teams, self.cluster))
        if lower_bound(whole).lower_bound_s >= than_s:
            return None
        for filled in FILLED:
            small = cluster_of(self.teams, self.cluster, filled)
            of_teams = self._of_teams(small)
            if of_teams is None or of_teams.best.prediction.compute_s >= than_s:
                return None
            found = self._on_devices(of_teams)
            if found is not None:
                return found
        return None

    def _of_teams(self, small: Cluster) -> Found | None:
        whole = find(self.seen, small, "spindle", self.asked.effort)
        planner = _CutPlanner(self.profile, self.teams[0], small, self.cluster, self.asked.effort)
        return with_less(self.seen, small, self.asked, whole, planner, ONE_TYPE)

    def _on_devices(self, of_teams: Found) -> Found | None:
        counts = {} if of_teams.cut is None else of_teams.cut.counts
        cut = MicroBatched(cut_profile(self.profile, counts, self.cluster), counts, self.cluster)
        judged = on_devices(cut.all if counts else cut.first, of_teams.best, self.teams)
        if judged is None:
            return None
        note = " ".join(each for each in (self._note(), of_teams.note) if each is not None)
        return Found(judged, True, note, cut if counts else None, self.profile.sharding)

    def _note(self) -> str:
        keys, size = ", ".join(self.profile.sharding), self.teams[0].size
        return (
            f"Memory asks for sharing out the parameters of {keys} by {len(self.teams)} teams of {size} "
            "devices."
        )


@dataclass(frozen=True)
class _CutPlanner:
    """Plans micro-batches on teams.

    Attributes:
        profile: of the devices, with what teams share out.
        small: the cluster of teams.
    """

    profile: Profile
    team: Team
    small: Cluster
    cluster: Cluster
    effort: int

    def cut(self, counts: Mapping[str, int]) -> MicroBatched:
        counts = {task: count for task, count in counts.items() if count > 1}
        seen = on_team(cut_profile(self.profile, counts, self.cluster), self.team)
        if seen is None:
            raise NoPlanError(
                f"micro-batches: nothing is known of shares so small on {self.team.size} devices"
            )
        return MicroBatched(seen, counts, self.small)

    def quickly(self, cut: MicroBatched, than_s: float) -> Judged | None:  # noqa: ARG002 - of several types
        one = least_fallback(cut.one, self.small, "spindle", ONE_TYPE, recomputes=False)
        return None if one is None else one.judged

    def searched(self, cut: MicroBatched) -> Found | None:
        return find(cut.one, self.small, "spindle", self.effort)
