"""Times count as equal by what the slices take that they are of, whatever else is in the plan."""

from __future__ import annotations

import pytest

from helpers.plans import two_towers
from spindle_cli.check.run import check_plan
from spindle_cli.check.types import slack_s
from spindle_cli.plan.types import Plan, Slice


def piece(start_s: float, end_s: float) -> Slice:
    return Slice(metaop="a", ops=(0, 1), devices=(0,), dp=1, start_s=start_s, end_s=end_s)


def test_the_shortest_slice_says_how_far_times_may_differ() -> None:
    short, stretched = piece(2.0, 2.5), piece(0.0, 1e8)
    assert slack_s(short) == pytest.approx(0.5e-6, rel=1e-6)
    assert slack_s(stretched, short) == pytest.approx(0.5e-6, abs=2e-7)  # and what floats are off by near 1e8
    assert slack_s(piece(0.0, 0.0)) == 0


def stretched(plan: Plan, late_s: float) -> Plan:
    """The plan, whose last slice starts `late_s` before the one on its device ends, and lasts 3 years."""
    slices = sorted(plan.slices, key=lambda each: each.start_s)
    before = max(
        (each for each in slices[:-1] if set(each.devices) & set(slices[-1].devices)), key=lambda e: e.end_s
    )
    last = slices[-1].model_copy(update={"start_s": before.end_s - late_s, "end_s": 1e8})

    def changed(each: Slice) -> Slice:
        return last if each == slices[-1] else each

    waves = tuple(
        wave.model_copy(
            update={
                "slices": tuple(map(changed, wave.slices)),
                "start_s": min(changed(each).start_s for each in wave.slices),
                "end_s": max(changed(each).end_s for each in wave.slices),
            }
        )
        for wave in plan.waves
    )
    predicted = plan.predicted.model_copy(update={"compute_s": 1e8, "iteration_s": 1e8})
    return plan.model_copy(update={"waves": waves, "predicted": predicted})


@pytest.mark.parametrize(("share", "is_busy"), [(0.01, True), (1e-4, True), (1e-7, False)])
def test_a_stretched_slice_hides_no_overlap(share: float, is_busy: bool) -> None:
    _, plan = two_towers()
    first = min(each.end_s - each.start_s for each in plan.slices)
    found = {violation.rule for violation in check_plan(stretched(plan, share * first))}
    assert ("device-busy" in found) == is_busy
