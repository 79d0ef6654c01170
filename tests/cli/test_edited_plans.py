"""A plan edited by hand: what is wrong is listed, and no command works on parts that are not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import Ended, run_spindle
from helpers.plans import two_towers
from helpers.readers import (
    assert_one_message,
    diff_command,
    edit_json,
    explain_command,
    launch_command,
    show_command,
    simulate_command,
    write_files,
)
from spindle_cli.plan.file import plan_text


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_files(tmp_path)


def test_a_plan_edited_by_hand_fails_its_check_with_every_violation(files: Path) -> None:
    path = files / "plan.yaml"
    text = path.read_text().replace("ops: [0, 3], devices: [0, 1]", "ops: [0, 2], devices: [0, 2]", 1)
    path.write_text(text)
    ended = run_spindle("check", path)
    assert ended.code == 1
    assert ended.err == ""
    assert "no slice runs ops [2, 3)" in ended.out
    assert "wave 0, pairs/text[0:3], device 2: also used by pairs/vision[0:2]" in ended.out
    report = json.loads(run_spindle("check", path, "--json").out)
    assert not report["valid"]
    assert {"coverage", "wave-devices", "device-busy"} <= {entry["rule"] for entry in report["violations"]}
    assert_one_message(launch_command(files), 3, "plan.yaml", "no slice runs ops [2, 3)")


def test_an_invalid_plan_is_drawn_with_a_warning_but_has_no_programs(files: Path) -> None:
    path = files / "plan.yaml"
    path.write_text(path.read_text().replace("ops: [0, 3]", "ops: [0, 2]", 1))
    shown = show_command(files)
    assert shown.code == 0
    assert "warning" in shown.err
    assert_one_message(run_spindle("show", path, "--rank", 0), 3, "plan.yaml", "the plan is not valid")


@pytest.mark.parametrize(
    ("found", "replacement"),
    [("metaop: pairs/text", "metaop: pairs/audio"), ("devices: [2, 3]", "devices: [4, 5]")],
)
@pytest.mark.parametrize("command", [show_command, simulate_command, explain_command])
def test_slices_of_nothing_or_nowhere_cannot_be_drawn(
    files: Path, command: Callable[[Path], Ended], found: str, replacement: str
) -> None:
    path = files / "plan.yaml"
    path.write_text(path.read_text().replace(found, replacement))
    assert_one_message(command(files), 3, "plan.yaml", "the plan is not valid")


@pytest.mark.parametrize(
    ("found", "replacement"),
    [
        ("ops: [0, 3]", "ops: [0, 2]"),
        ("ops: [0, 3]", "ops: [2, 1]"),
        ("devices: [0, 1]", "devices: [0, 0]"),
        ("devices: [0, 1]", "devices: [0]"),
    ],
)
def test_an_edited_plan_that_devices_cannot_run_is_not_simulated(
    files: Path, found: str, replacement: str
) -> None:
    path = files / "plan.yaml"
    path.write_text(path.read_text().replace(found, replacement, 1))
    assert_one_message(simulate_command(files), 3, "plan.yaml", "the plan is not valid")


ENTRY = {key: [0, 8] for key in ("kept_bytes", "forward_bytes", "backward_bytes", "first_backward_bytes")}


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({"memory": [ENTRY, {**ENTRY, "first_op": 1}, {**ENTRY, "first_op": 1}]}, "each once"),
        ({"memory": [{**ENTRY, "first_op": 1}]}, "by first_op from 0"),
        ({"inputs_of_every_op": ["pairs/audio"]}, "'pairs/audio' is not among the inputs"),
        ({"whole_param_bytes_per_op": 2**40}, "is more than the param_bytes_per_op"),
        ({"split_extra_param_bytes": {"0": 2**40}}, "is more than the extra_param_bytes"),
    ],
)
@pytest.mark.parametrize("command", [show_command, simulate_command, explain_command])
def test_sizes_of_a_plans_metaop_that_contradict_each_other_are_refused_as_in_a_profile(
    files: Path, command: Callable[[Path], Ended], edits: dict[str, Any], said: str
) -> None:
    edit_json(files / "plan.yaml", lambda d: d["metaops"][0].update(edits))
    assert_one_message(command(files), 3, "plan.yaml: metaops[0]", said)
    assert_one_message(run_spindle("check", files / "plan.yaml"), 3, "plan.yaml: metaops[0]", said)


def test_an_edited_prediction_is_simulated_and_compared_with_a_warning(files: Path) -> None:
    edit_json(files / "plan.yaml", lambda d: d["predicted"].update(lower_bound_s=99.0, peak_memory_bytes=[]))
    for command in (simulate_command, explain_command, show_command):
        ended = command(files)
        assert ended.code == 0
        assert "violations; `spindle check` lists them" in ended.err
    assert diff_command(files).code == 0


def test_the_plan_text_is_what_the_edits_above_expect() -> None:
    assert "ops: [0, 3], devices: [0, 1]" in plan_text(two_towers()[1])
