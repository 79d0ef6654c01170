"""Whether a run goes on, has ended, and how: from what its launcher has noted, and whether it lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spindle_cli.files.run_files import PREDICTED_FILE
from spindle_cli.files.runs.attempts import AttemptEvent
from spindle_cli.launch.owner import living_claims
from spindle_cli.watch.types import State

_ENDINGS: dict[str, State] = {"done": "ended", "failed": "failed", "stopped": "stopped"}


@dataclass(frozen=True)
class Standing:
    """See `WatchData`."""

    state: State
    message: str | None = None


def standing_of(
    run_dir: Path, events: Sequence[AttemptEvent], last_step: int | None, total_steps: int | None
) -> Standing:
    """How a run stands.

    Args:
        events: all that its launcher has noted; none of runs of older versions.
        last_step: that it has done.
        total_steps: at which it ends, if that is known.
    """
    if not run_dir.is_dir():
        return Standing("gone")
    claimed_s = [0.0 if claim.owner is None else claim.owner.since_s for claim in living_claims(run_dir)]
    newest = events[-1] if events else None
    if newest is not None and newest.event in _ENDINGS:
        if claimed_s and max(claimed_s) > newest.time_s:  # launched once more
            return Standing("starting")
        return Standing(_ENDINGS[newest.event], newest.message)
    if claimed_s:
        began_at = 0 if newest is None else newest.step
        return Standing("running" if (last_step or 0) > began_at else "starting")
    if (run_dir / PREDICTED_FILE).exists() and (total_steps is None or (last_step or 0) >= total_steps):
        return Standing("ended")
    return Standing("not begun" if newest is None and last_step is None else "lost")
