"""A plan of teams as one of their devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spindle_cli.account.types import Pass
from spindle_cli.plan.ordering.orders import mirrored
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.judge import Judged, measure_as_they_are
from spindle_cli.plan.slices import rows_of
from spindle_cli.plan.teams.cluster import Team
from spindle_cli.plan.teams.profile import way_on
from spindle_cli.plan.types import Slice
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile


def on_devices(problem: Problem, judged: Judged, teams: Sequence[Team]) -> Judged | None:
    """The plan of teams on all of their devices, its passes in the same order; None if it does not fit their
    memory.

    Args:
        problem: of the devices, with what teams share out; its MetaOps have the names of those of the teams'.
        judged: the plan of the teams.
    """
    seen = {team.kind: seen_on(problem.profile, team.cluster) for team in teams}
    on = [teams[piece.devices[0]] for piece in judged.slices]
    slices = tuple(
        _expanded(piece, team, seen[team.kind]) for piece, team in zip(judged.slices, on, strict=True)
    )
    slices = timed(problem, slices, tuple(_order(judged.slices)))
    return measure_as_they_are(problem, "spindle", slices)


def _expanded(piece: Slice, team: Team, seen: Profile) -> Slice:
    """Args: seen: the profile as the team's type of device sees it."""
    metaop = seen.by_name[piece.metaop]
    way = way_on(metaop, team.size, seen.sharding)
    assert way is not None, "the team's profile has it"
    own = {"devices": team.devices[: way.dp], "dp": way.dp, "rows": rows_of(metaop.batch_size, way.dp)}
    times = {"backward_start_s": None, "backward_end_s": None}
    return piece.model_copy(update=own | times)


def _order(slices: Sequence[Slice]) -> Iterator[Pass]:
    """All passes as they start; `slices` are in order of start."""
    if any(piece.backward_s is None for piece in slices):
        yield from mirrored(range(len(slices)))
        return
    starts = [
        (piece.times_s[is_backward][0], Pass(index, is_backward=bool(is_backward)))
        for index, piece in enumerate(slices)
        for is_backward in (0, 1)
    ]
    yield from (each for _, each in sorted(starts))
