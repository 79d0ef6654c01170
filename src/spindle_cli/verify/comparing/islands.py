"""What was found of each of several islands, together."""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.verify.types import Check, Difference


def together(found: Sequence[Sequence[Check]]) -> tuple[Check, ...]:
    """Each kind of comparison once, with what was compared on all islands.

    Args:
        found: by island, its checks; each kind once, in one order.
    """
    if len(found) == 1:
        return tuple(found[0])
    kinds = dict.fromkeys(check.what for checks in found for check in checks)
    numbered = [(number, check) for number, checks in enumerate(found) for check in checks]
    return tuple(_joined([each for each in numbered if each[1].what == kind]) for kind in kinds)


def _joined(own: Sequence[tuple[int, Check]]) -> Check:
    named = [_of_island(difference, number) for number, check in own if (difference := check.largest)]
    compared = [each for each in named if each.relative is not None]
    return own[0][1].model_copy(
        update={
            "compared": sum(check.compared for _, check in own),
            "tolerance": max(check.tolerance for _, check in own),
            "largest": max(compared, key=lambda each: each.relative or 0.0, default=None),
            "failures": tuple(
                _of_island(difference, number) for number, check in own for difference in check.failures
            ),
            "explained": tuple(
                _of_island(difference, number) for number, check in own for difference in check.explained
            ),
        }
    )


def _of_island(difference: Difference, number: int) -> Difference:
    return difference.model_copy(update={"where": f"island {number}, {difference.where}"})
