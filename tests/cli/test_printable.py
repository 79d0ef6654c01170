"""Names that would steer a terminal are shown escaped, wherever they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.cli import run_spindle
from helpers.plans import two_towers
from spindle_cli.cli.printable import printable
from spindle_cli.files.artifact import write_json
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.types import Plan

EVIL = "\x1b]0;owned\x07\x9b31m\u202e"


def test_what_steers_is_escaped_and_all_else_stays() -> None:
    assert printable("\x1b[31mred\x07\r") == r"\x1b[31mred\x07\r"
    assert printable("\x9b\x7f\u202e\u2066\ud800") == r"\x9b\x7f\u202e\u2066\ud800"
    assert printable("a\tb\nü 漢 🙂 \xa0") == "a\tb\nü 漢 🙂 \xa0"


def evil_plan() -> Plan:
    """A valid plan whose MetaOps, tasks, cluster and devices have such names."""
    _, plan = two_towers()
    text = plan.model_dump(mode="json", by_alias=True)
    for metaop in text["metaops"]:
        metaop["name"] += EVIL
        metaop["inputs"] = [name + EVIL for name in metaop["inputs"]]
        metaop["inputs_of_every_op"] = [name + EVIL for name in metaop.get("inputs_of_every_op", ())]
        metaop["task"] += EVIL
        metaop["component"] = (metaop.get("component") or "") + EVIL
    for wave in text["waves"]:
        for piece in wave["slices"]:
            piece["metaop"] += EVIL
    text["workload"]["name"] += EVIL
    text["cluster"]["name"] += EVIL
    text["notes"] = [EVIL]
    return Plan.model_validate(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "plan.yaml"),
        ("check", "broken.yaml"),
        ("check", EVIL.replace("/", "")),
        ("show", "plan.yaml"),
        ("show", "plan.yaml", "--rank", "0"),
        ("explain", "plan.yaml"),
        ("diff", "plan.yaml", "plan.yaml"),
        ("simulate", "plan.yaml"),
        ("report", "plan.yaml", "-o", f"{EVIL}.html"),
        ("launch", "plan.yaml", "--dry-run"),
    ],
    ids=lambda arguments: " ".join(arguments).encode("unicode_escape").decode(),
)
def test_no_command_prints_what_steers(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = evil_plan()
    write_plan(tmp_path / "plan.yaml", plan)
    late = plan.waves[0].model_copy(update={"start_s": 1e6})
    write_plan(tmp_path / "broken.yaml", plan.model_copy(update={"waves": (late, *plan.waves[1:])}))
    write_json(tmp_path / "profile.json", two_towers()[0])
    ended = run_spindle(*arguments)
    assert "internal error" not in ended.err
    said = ended.out + ended.err
    assert said
    assert [character for character in "\x1b\x07\x9b\u202e" if character in said] == []
