"""Say in one line what of a plan was not checked by numbers."""

from __future__ import annotations

from collections.abc import Mapping

from spindle_cli.units import counted

_NAMED = 3


def describe_unchecked(unchecked: Mapping[str, str]) -> str | None:
    """The line for `Plan.unchecked`; None: there is nothing to say."""
    if not unchecked:
        return None
    by_reason: dict[str, list[str]] = {}
    for name, why in unchecked.items():
        by_reason.setdefault(why, []).append(name)
    parts = [
        f"{counted(len(names), 'part') if len(names) > _NAMED else ', '.join(names)} ({why})"
        for why, names in by_reason.items()
    ]
    return f"not checked by numbers: {'; '.join(parts)}. `spindle verify` checks a whole run"
