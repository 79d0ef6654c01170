"""Plans of version 2: each pass of a slice has times of its own, and rules of its own."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.plans import two_towers
from spindle_cli.check.run import check_plan
from spindle_cli.check.types import place_of
from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan

# Of the two towers, by the first op of each MetaOp's slices: forward and backward.
TIMES = {
    ("pairs/vision", 0): (0.0, 1.0, 2.5, 4.5),
    ("pairs/text", 0): (0.0, 0.5, 2.5, 3.5),
    ("pairs/vision", 3): (1.0, 1.4, 1.7, 2.5),
    ("pairs/loss", 0): (1.4, 1.5, 1.5, 1.7),
}


def apart(**changed: tuple[float, float, float, float]) -> dict[str, Any]:
    """The two towers, solved by hand in version 2, as a file has it: each pass with room to spare."""
    data = two_towers()[1].model_dump(mode="json", by_alias=True)
    data["schema"] = "spindle.plan/2"
    ends = []
    for wave in data["waves"]:
        for piece in wave["slices"]:
            times = TIMES[piece["metaop"], piece["ops"][0]]
            times = changed.get(f"{piece['metaop'].removeprefix('pairs/')}_{piece['ops'][0]}", times)
            keys = ("start_s", "end_s", "backward_start_s", "backward_end_s")
            piece.update(zip(keys, times, strict=True))
            ends.append(piece["backward_end_s"])
        wave["start_s"] = min(piece["start_s"] for piece in wave["slices"])
        wave["end_s"] = max(piece["end_s"] for piece in wave["slices"])
    data["predicted"] |= {"compute_s": max(ends), "iteration_s": max(ends)}
    return data


def rules_of(data: dict[str, Any]) -> set[str]:
    """But for memory: the order of passes changes it, and the plan's is that of the first order."""
    found = {each.rule for each in check_plan(Plan.from_data(data, where="plan.yaml"))}
    return found - {"peak-memory"}


def test_a_plan_of_version_2_has_no_violations() -> None:
    assert rules_of(apart()) == set()


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({"vision_0": (0.0, 0.9, 2.5, 4.5)}, {"duration"}),
        ({"vision_0": (0.0, 1.0, 2.5, 4.4)}, {"duration"}),
        ({"loss_0": (1.4, 1.5, 1.45, 1.7)}, {"backward", "device-busy"}),
        ({"vision_0": (0.0, 1.0, 2.3, 4.5)}, {"backward", "device-busy"}),
        ({"text_0": (0.0, 0.5, 2.4, 3.4)}, {"device-busy"}),
        ({"vision_3": (0.9, 1.4, 1.7, 2.5)}, {"order", "device-busy"}),
        (
            {
                "text_0": (0.0, 0.5, 1.6, 2.6),
                "vision_3": (1.0, 1.4, 2.6, 3.4),
                "vision_0": (0.0, 1.0, 3.4, 5.4),
            },
            {"backward"},
        ),
    ],
)
def test_each_pass_has_its_length_and_waits_for_what_it_takes(
    changed: dict[str, tuple[float, float, float, float]], broken: set[str]
) -> None:
    assert rules_of(apart(**changed)) == broken


def test_a_slice_that_recomputes_runs_forward_again_in_its_backward_pass() -> None:
    """Text: 0.5 s forward, then as much again and 1 s backward."""
    data = apart(text_0=(0.0, 0.5, 2.5, 4.0))
    data["waves"][0]["slices"][1]["recompute"] = True
    assert "duration" not in rules_of(data)
    data["waves"][0]["slices"][1]["backward_end_s"] = 3.9
    assert "duration" in rules_of(data)


def test_the_schedule_ends_with_the_last_backward_pass_and_may_end_before_the_bound_of_version_1() -> None:
    data = apart()
    data["predicted"]["compute_s"] = 1.5
    assert rules_of(data) == {"compute"}
    data = apart()
    data["predicted"]["lower_bound_s"] = 5.0
    assert rules_of(data) == set()


def test_times_of_passes_that_do_not_fit_the_version_are_wrong_inputs() -> None:
    data = apart()
    data["schema"] = "spindle.plan/1"
    with pytest.raises(InputError, match=r"backward_start_s: expected none in version 1"):
        Plan.from_data(data, where="plan.yaml")
    data = apart()
    for key in ("backward_start_s", "backward_end_s"):
        del data["waves"][1]["slices"][0][key]
    with pytest.raises(InputError, match=r"pairs/vision\[3:4\]: backward_start_s: expected one for every"):
        Plan.from_data(data, where="plan.yaml")
    data = apart()
    del data["waves"][1]["slices"][0]["backward_end_s"]
    with pytest.raises(InputError, match=r"slices\[0\].*expected both or neither"):
        Plan.from_data(data, where="plan.yaml")
    data = apart()
    data["schema"] = "spindle.plan/3"
    with pytest.raises(
        InputError, match=r"version '3' is not known; .* reads spindle.plan/1 or spindle.plan/2"
    ):
        Plan.from_data(data, where="plan.yaml")


def test_a_producer_that_runs_backward_too_early_is_named_with_its_own_wave() -> None:
    """Vision's last op is in wave 1; the loss, in wave 2, is through backward at 1.7."""
    plan = Plan.from_data(apart(vision_3=(1.0, 1.4, 1.6, 2.5)), where="plan.yaml")
    (found,) = (each for each in check_plan(plan) if each.rule == "backward")
    wave = next(wave for wave in plan.waves for piece in wave.slices if piece.label == "pairs/vision[3:4]")
    assert wave.index == 1
    assert found.where == place_of(1, wave.slices[0])
