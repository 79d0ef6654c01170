"""A profile that knows shares alone: those that divide the batch are the points of its curve."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.plan.make import make_plan
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile


def shares(*entries: tuple[int, int, float]) -> list[dict[str, Any]]:
    """Of (samples, tp, seconds); a third of it forward."""
    return [
        {"samples": samples, "tp": tp, "forward_s": s / 3, "backward_s": 2 * s / 3, "source": "fitted"}
        for samples, tp, s in entries
    ]


def of_shares(*entries: tuple[int, int, float], **more: object) -> MetaOpProfile:
    """A MetaOp with a batch of 8, and no curve."""
    made = metaop_of("t/net", 2, {1: 1.0}, **more).model_dump()
    return MetaOpProfile.model_validate({**made, "curve": [], "shares": shares(*entries)})


def test_shares_that_divide_the_batch_are_its_points() -> None:
    found = of_shares((2, 1, 3.0), (2, 2, 1.8), (3, 1, 4.0), (8, 1, 9.0)).curve
    assert found == (
        CurvePoint(num_devices=1, dp=1, forward_s=3.0, backward_s=6.0, source="fitted"),
        CurvePoint(num_devices=4, dp=4, forward_s=1.0, backward_s=2.0, source="fitted"),
        CurvePoint(num_devices=8, dp=4, tp=2, forward_s=0.6, backward_s=1.2, source="fitted"),
    )


def test_a_curve_that_is_there_is_as_it_says() -> None:
    made = metaop_of("t/net", 2, {1: 1.0})
    assert (
        MetaOpProfile.model_validate({**made.model_dump(), "shares": shares((4, 1, 2.0))}).curve == made.curve
    )


@pytest.mark.parametrize("entries", [(), ((3, 1, 4.0),), ((16, 1, 4.0),)], ids=str)
def test_no_points_and_no_shares_that_give_any_are_refused(
    entries: tuple[tuple[int, int, float], ...],
) -> None:
    expected = (
        "curve: no points; expected one at least, or shares of 't/net' whose samples divide its batch_size 8"
    )
    with pytest.raises(ValidationError, match=expected):
        of_shares(*entries)


def test_it_is_planned_by_these_and_read_again_as_it_is_written() -> None:
    profile = profile_of(of_shares((4, 1, 2.0), (8, 1, 3.0)))
    plan = make_plan(profile, cluster_of(2), "sequential")
    assert [piece.dp for piece in plan.slices] == [2]
    assert plan.predicted.compute_s == pytest.approx(4.0)
    again = Profile.model_validate_json(profile.model_dump_json(by_alias=True))
    assert (again, again.sha256()) == (profile, profile.sha256())
