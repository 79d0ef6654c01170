"""A user's mistake ends in one message with file and place, the contract's exit code, and no traceback."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.cli import Ended, run_spindle
from helpers.readers import (
    Edit,
    assert_one_message,
    check_command,
    compare_command,
    diff_command,
    edit_json,
    explain_command,
    launch_command,
    plan_command,
    report_command,
    set_in_profile,
    show_command,
    simulate_command,
    sweep_command,
    verify_command,
    write_files,
)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_files(tmp_path)


NO_TIME = {"samples": 2, "forward_s": 0, "backward_s": 0, "source": "measured"}
READERS = [
    pytest.param(plan_command, "profile.json", id="plan-profile"),
    pytest.param(plan_command, "cluster.yaml", id="plan-cluster"),
    pytest.param(check_command, "plan.yaml", id="check-plan"),
    pytest.param(check_command, "profile.json", id="check-profile"),
    pytest.param(show_command, "plan.yaml", id="show-plan"),
    pytest.param(launch_command, "plan.yaml", id="launch-plan"),
    pytest.param(verify_command, "plan.yaml", id="verify-plan"),
    pytest.param(simulate_command, "plan.yaml", id="simulate-plan"),
    pytest.param(explain_command, "plan.yaml", id="explain-plan"),
    pytest.param(explain_command, "profile.json", id="explain-profile"),
    pytest.param(report_command, "plan.yaml", id="report-plan"),
    pytest.param(diff_command, "plan.yaml", id="diff-plan"),
    pytest.param(compare_command, "profile.json", id="compare-profile"),
    pytest.param(sweep_command, "cluster.yaml", id="sweep-cluster"),
]


@pytest.mark.parametrize(("command", "name"), READERS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("", "the file is empty", id="empty"),
        pytest.param(" \n", "the file is empty", id="blank"),
        pytest.param("[1, 2]", "expected a mapping", id="list"),
        pytest.param('"text"', "expected a mapping", id="string"),
        pytest.param("null", "expected a mapping with the key 'schema', found nothing", id="null"),
        pytest.param('{"schema": "spindle.nonsense/1"}', "found 'spindle.nonsense/1'", id="another-kind"),
        pytest.param('{"schema": 7}', "found 7", id="schema-not-text"),
        pytest.param('{"name": "x"}', "the key 'schema' is missing", id="no-schema"),
        pytest.param('{"schema": ', "not valid", id="cut-off"),
        pytest.param('{"a": 1, "a": 2}', "the key 'a' is given twice", id="key-twice"),
        pytest.param("[" * 2000, "", id="deep"),
        pytest.param("\0", "not valid", id="binary"),
    ],
)
def test_a_file_that_is_not_what_it_should_be(
    files: Path, command: Callable[[Path], Ended], name: str, content: str, message: str
) -> None:
    (files / name).write_text(content)
    assert_one_message(command(files), 3, name, message)


@pytest.mark.parametrize(("command", "name"), READERS)
def test_a_missing_file_a_folder_and_latin_text(
    files: Path, command: Callable[[Path], Ended], name: str
) -> None:
    (files / name).write_bytes("schema: ünknown".encode("latin-1"))
    assert_one_message(command(files), 3, name, "not a text file in UTF-8")
    (files / name).unlink()
    assert_one_message(command(files), 3, name, "no such file")
    (files / name).mkdir()
    assert_one_message(command(files), 3, name, "directory")


@pytest.mark.parametrize(("command", "name"), READERS)
def test_a_newer_major_version(files: Path, command: Callable[[Path], Ended], name: str) -> None:
    edit_json(files / name, lambda data: data.update(schema=data["schema"].replace("/1", "/9")))
    assert_one_message(command(files), 3, name, "version '9' is not known")


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        pytest.param(lambda d: d.pop("metaops"), "metaops: this key is missing", id="missing-key"),
        pytest.param(lambda d: d.update(metaops=[]), "metaops: ", id="no-metaops"),
        pytest.param(
            lambda d: d["metaops"][1].pop("num_ops"), "metaops[1].num_ops: this key", id="missing-inside"
        ),
        pytest.param(
            set_in_profile(0, "curve", 1, "forward_s", value=-0.5),
            "metaops[0].curve[1].forward_s: expected a number greater than or equal to 0 (found -0.5)",
            id="negative-time",
        ),
        pytest.param(set_in_profile(0, "curve", 1, "forward_s", value=1e300), "1e+300", id="absurd-time"),
        pytest.param(set_in_profile(0, "output_bytes", value=10**30), "output_bytes", id="absurd-size"),
        pytest.param(set_in_profile(0, "curve", value=[]), "metaops[0].curve: ", id="curve-without-points"),
        pytest.param(set_in_profile(0, "inputs", value=["pairs/loss"]), "form a cycle", id="cycle"),
        pytest.param(
            set_in_profile(2, "inputs", value=["pairs/audio"]), "'pairs/audio', which is not", id="input"
        ),
        pytest.param(set_in_profile(1, "name", value="pairs/vision"), "occurs 2 times", id="duplicate-name"),
        pytest.param(
            set_in_profile(0, "num_ops", value="many"), "metaops[0].num_ops", id="text-for-a-number"
        ),
        pytest.param(set_in_profile(0, "num_ops", value=10**12), "metaops[0].num_ops", id="absurd-number"),
        pytest.param(set_in_profile(0, "curve", 1, "dp", value=3), "dp 3 x tp 1 is not", id="degrees"),
        pytest.param(set_in_profile(0, "batch_size", value=3), "does not divide batch_size 3", id="batch"),
        pytest.param(set_in_profile(0, "parameter_blocks", value=[0]), "parameter_blocks: 1", id="blocks"),
        pytest.param(
            lambda d: [point.update(forward_s=0, backward_s=0) for point in d["metaops"][0]["curve"]],
            "takes zero seconds",
            id="zero-times",
        ),
        pytest.param(
            set_in_profile(0, "shares", value=[NO_TIME]), "the share of 2 samples takes zero", id="zero-share"
        ),
    ],
)
def test_a_wrong_value_in_a_profile_is_named_with_its_place(files: Path, edit: Edit, named: str) -> None:
    edit_json(files / "profile.json", edit)
    assert_one_message(plan_command(files), 3, "profile.json", named)
    assert not (files / "new.yaml").exists()


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_profile_with_a_number_that_is_none(files: Path, text: str) -> None:
    path = files / "profile.json"
    path.write_text(re.sub(r'"forward_s": [^,]+', f'"forward_s": {text}', path.read_text(), count=1))
    assert_one_message(plan_command(files), 3, "profile.json", "finite number")


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        pytest.param(lambda d: d["nodes"][0].update(devices=0), "nodes[0].devices", id="zero-devices"),
        pytest.param(lambda d: d["nodes"][0].update(count=0), "nodes[0].count", id="zero-nodes"),
        pytest.param(lambda d: d.update(nodes=[]), "nodes: ", id="no-nodes"),
        pytest.param(lambda d: d["nodes"][0].update(count=10**12), "at most 65536", id="too-many-devices"),
        pytest.param(
            lambda d: d["nodes"][0].update(memory_gib=-1), "nodes[0].memory_gib", id="negative-memory"
        ),
        pytest.param(
            lambda d: d["nodes"][0].update(memory_gib=1e300), "nodes[0].memory_gib", id="absurd-memory"
        ),
        pytest.param(lambda d: d["links"].pop("intra_node"), "links.intra_node", id="no-link"),
        pytest.param(
            lambda d: d["links"]["intra_node"].update(bandwidth_gb_per_s=0),
            "bandwidth_gb_per_s: expected a number greater than or equal to 1e-06 (found 0)",
            id="speed",
        ),
        pytest.param(
            lambda d: d["links"]["intra_node"].update(curve=[[2, 1], [1, 1]]),
            "ascending bytes",
            id="link-curve",
        ),
        pytest.param(
            lambda d: d["nodes"].append({"devices": 1, "device": "h100", "memory_gib": 80}),
            "CPUs and GPUs",
            id="mixed-devices",
        ),
    ],
)
def test_a_wrong_value_in_a_cluster_is_named_with_its_place(files: Path, edit: Edit, named: str) -> None:
    edit_json(files / "cluster.yaml", edit)
    assert_one_message(plan_command(files), 3, "cluster.yaml", named)


@pytest.mark.parametrize(
    ("found", "replacement", "named"),
    [
        pytest.param("devices: [0, 1]", "devices: [0, x]", "found 'x'", id="no-device"),
        pytest.param("devices: [0, 1]", "devices: []", "expected a list of device numbers", id="no-devices"),
        pytest.param("devices: [0, 1]", "devices: [3-1]", "found '3-1'", id="descending-range"),
        pytest.param("devices: [0, 1]", "devices: [0-99999999]", "found '0-99999999'", id="absurd-range"),
        pytest.param("start_s: 0.0", "start_s: .nan", "finite number", id="nan"),
        pytest.param("strategy: spindle", "strategy: magic", "strategy: expected 'spindle'", id="strategy"),
    ],
)
@pytest.mark.parametrize("command", [check_command, show_command, launch_command])
def test_a_wrong_value_in_a_plan_is_named_with_its_place(
    files: Path, command: Callable[[Path], Ended], found: str, replacement: str, named: str
) -> None:
    path = files / "plan.yaml"
    assert found in path.read_text()
    path.write_text(path.read_text().replace(found, replacement, 1))
    assert_one_message(command(files), 3, "plan.yaml", named)


def test_sizes_that_nothing_holds_are_no_plan(files: Path) -> None:
    edit_json(files / "profile.json", set_in_profile(0, "param_bytes_per_op", value=2**62))
    assert_one_message(plan_command(files), 4, "no plan fits", "Correct param_bytes_per_op")


def test_a_byte_order_mark_is_no_mistake(files: Path) -> None:
    for name in ("profile.json", "cluster.yaml"):
        (files / name).write_bytes(b"\xef\xbb\xbf" + (files / name).read_bytes())
    assert plan_command(files).code == 0


def test_a_profile_of_another_workload_is_refused(files: Path) -> None:
    edit_json(
        files / "profile.json", lambda d: d["workload"].update(fingerprint="sha256:other", name="other")
    )
    assert_one_message(check_command(files), 3, "'other'", "'test'")


def test_a_profile_measured_again_is_a_violation(files: Path) -> None:
    edit_json(files / "profile.json", set_in_profile(0, "curve", 0, "forward_s", value=0.9))
    ended = check_command(files)
    assert ended.code == 1
    assert "[profile]" in ended.out


@pytest.mark.parametrize("place", ["missing/new.yaml", "plan.yaml/new.yaml", "folder"])
def test_an_output_that_cannot_be_written(files: Path, place: str) -> None:
    (files / "folder").mkdir()
    ended = run_spindle(
        "plan", files / "profile.json", "--cluster", files / "cluster.yaml", "-o", files / place
    )
    assert_one_message(ended, 3, place, "cannot be written")


def test_a_full_disk_is_said_and_leaves_nothing(files: Path) -> None:
    ended = run_spindle(
        "plan", files / "profile.json", "--cluster", files / "cluster.yaml", "-o", "/dev/full"
    )
    assert_one_message(ended, 3, "/dev/full: cannot be written: No space left on device")


def test_output_to_a_device_does_not_replace_it(files: Path) -> None:
    ended = run_spindle(
        "plan", files / "profile.json", "--cluster", files / "cluster.yaml", "-o", "/dev/null"
    )
    assert ended.code == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["check"],
        ["show", "plan.yaml", "--no-such-option"],
        ["show", "plan.yaml", "--rank", "many"],
        ["show", "plan.yaml", "--rank", "-1"],
        ["plan", "profile.json"],
        ["launch", "plan.yaml", "--steps", "0"],
    ],
)
def test_wrong_use_ends_with_2(arguments: list[str]) -> None:
    ended = run_spindle(*arguments)
    assert ended.code == 2
    assert "Error" in ended.err
    assert "Traceback" not in ended.err


def test_a_rank_that_the_plan_does_not_have(files: Path) -> None:
    assert_one_message(run_spindle("show", files / "plan.yaml", "--rank", 4), 2, "devices 0 to 3")
