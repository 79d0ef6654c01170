"""The page as a file: whole, safe whatever the names, and with nothing to load; and the command."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from helpers.cli import run_spindle
from helpers.plans import two_towers
from spindle_cli.files.artifact import write_json
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.types import Plan
from spindle_cli.report import page
from spindle_cli.report.build import build_report
from spindle_cli.report.page import SCRIPTS, render_page
from spindle_cli.report.types import ReportData
from spindle_cli.watch.server import SCRIPTS as LIVE_SCRIPTS

HOSTILE = (
    "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">&\u2028'"
)


class Elements(HTMLParser):
    """Every element's tag and attributes, and the text inside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style", "title") and data.strip():
            self.inside.append((self.tags[-1][0], data))


def parsed(text: str) -> Elements:
    elements = Elements()
    elements.feed(text)
    elements.close()
    return elements


def hostile_plan() -> Plan:
    """Two towers whose every name tries to end the script element."""
    _, plan = two_towers()
    data = plan.model_dump(mode="json", by_alias=True)
    data["workload"]["name"] = data["cluster"]["name"] = HOSTILE
    data["notes"] = [HOSTILE]
    rename = {metaop["name"]: metaop["name"] + HOSTILE for metaop in data["metaops"]}
    for metaop in data["metaops"]:
        metaop.update(
            name=rename[metaop["name"]],
            task=HOSTILE,
            component=HOSTILE,
            inputs=[rename[name] for name in metaop["inputs"]],
        )
    for wave in data["waves"]:
        for piece in wave["slices"]:
            piece["metaop"] = rename[piece["metaop"]]
    return Plan.from_data(data, where="test")


def test_the_data_comes_back_whole_whatever_the_names() -> None:
    data = build_report(hostile_plan())
    elements = parsed(render_page(data))
    assert [tag for tag, _ in elements.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in elements.tags]
    embedded = next(text for tag, text in elements.inside if tag == "script")
    assert ReportData.from_data(json.loads(embedded), where="page") == data
    assert not set("<>&\u2028") & set(embedded)


def test_nothing_is_loaded_from_anywhere() -> None:
    text = render_page(build_report(two_towers()[1]))
    addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^\s'\"`]*", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace's name, not a place
    for tag, attributes in parsed(text).tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith(("#", "data:")), tag
    assert "@import" not in text and "url(" not in text


def test_only_the_page_s_own_script_and_style_may_run() -> None:
    elements = parsed(render_page(build_report(two_towers()[1])))
    policy = next(
        attributes["content"] or ""
        for tag, attributes in elements.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy and "unsafe" not in policy
    style = next(text for tag, text in elements.inside if tag == "style")
    script = [text for tag, text in elements.inside if tag == "script"][-1]
    for content in (style, script):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_the_same_plan_gives_the_same_bytes() -> None:
    assert render_page(build_report(two_towers()[1])) == render_page(build_report(two_towers()[1]))


def test_every_script_is_in_the_page_and_readable() -> None:
    assets = Path(page.__file__).parent / "assets"
    assert sorted(path.name for path in assets.glob("*.js")) == sorted({*SCRIPTS, *LIVE_SCRIPTS})
    for path in assets.iterdir():
        assert len(path.read_text(encoding="utf-8").splitlines()) < 400, path.name


def test_the_command_writes_the_page_and_prints_its_data(tmp_path: Path) -> None:
    profile, plan = two_towers()
    write_plan(tmp_path / "plan.yaml", plan)
    write_json(tmp_path / "profile.json", profile)
    made = tmp_path / "report.html"
    ended = run_spindle(
        "report", tmp_path / "plan.yaml", "--profile", tmp_path / "profile.json", "-o", made, "--json"
    )
    assert ended.code == 0, ended.err
    printed = ReportData.from_data(json.loads(ended.out), where="stdout")
    assert printed.has_profile
    assert made.read_text(encoding="utf-8") == render_page(printed)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--run", "nowhere"], "metrics.jsonl"),
        (["--profile", "nowhere.json"], "no such file"),
        (["-o", "no/such/folder/r.html"], "cannot be written"),
    ],
)
def test_wrong_files_are_input_errors(tmp_path: Path, options: list[str], text: str) -> None:
    write_plan(tmp_path / "plan.yaml", two_towers()[1])
    ended = run_spindle("report", tmp_path / "plan.yaml", "-o", tmp_path / "r.html", *options)
    assert (ended.code, text in ended.err) == (3, True), ended.err
    assert not (tmp_path / "r.html").exists()
