"""The documentation is true: its commands exist, its links lead somewhere, and the README's walk works."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.cli import run_spindle
from helpers.short_searches import short_searches
from spindle_cli.cli.app import COMMANDS, load_command

__all__ = ["short_searches"]  # a fixture

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
COMMAND = re.compile(r"^ {4}(spindle .*)$", re.M)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
MAKE_TARGET = re.compile(r"`make ([a-z-]+)|^ {4}make ([a-z-]+)", re.M)


def commands_in(page: Path) -> Iterator[list[str]]:
    """The words of every `spindle ...` line in an indented block; lines with brackets are synopses."""
    for line in COMMAND.findall(page.read_text(encoding="utf-8")):
        yield shlex.split(line, comments=True)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_command_and_option_in_the_docs_exists(page: Path) -> None:
    for words in commands_in(page):
        name = words[1]
        assert name in COMMANDS or name.startswith("--"), words
        if name.startswith("--"):
            continue
        known = {option for parameter in load_command(name).params for option in parameter.opts}
        for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(words[2:])):
            assert option in known | {"--help"}, f"spindle {name} has no {option}"


def test_every_command_is_in_the_contracts() -> None:
    assert {words[1] for words in commands_in(ROOT / "docs" / "contracts.md")} == set(COMMANDS)


@pytest.mark.parametrize(
    "words", list(commands_in(ROOT / "README.md")), ids=lambda words: " ".join(words[1:])
)
def test_every_command_in_the_readme_parses(words: list[str]) -> None:
    command = load_command(words[1])
    context = command.make_context(words[1], words[2:])  # a usage error is raised
    assert not context.args


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]*)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            linked = page.parent / target if target else page
            assert anchor in anchors_of(linked), f"{target}#{anchor}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        if page.parent == ROOT / "docs" and page.name != "README.md":
            assert f"]({page.name})" in index, page.name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for targets in MAKE_TARGET.findall(page.read_text(encoding="utf-8")):
        target = next(filter(None, targets))
        assert re.search(rf"^{target}:", makefile, re.M), target


@pytest.mark.processes
@pytest.mark.usefixtures("ready_pythons")
def test_the_readme_s_walk_leads_from_a_model_to_a_trained_one(tmp_path: Path) -> None:
    """Every command of the README in its order, on the README's model, as a user would type them; what is
    measured in a moment will do.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    model = re.search(r"`my_model\.py`:\n\n```python\n(.*?)```", readme, re.S)
    assert model
    (tmp_path / "my_model.py").write_text(model[1])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for words in commands_in(ROOT / "README.md"):
        # Other tests run beside this one.
        quietly = ["--accept-noise", "--time-limit", "0.05"] if words[1] == "profile" else []
        with contextlib.chdir(tmp_path):
            ended = run_spindle(*words[1:], *quietly)
        assert ended.code == 0, f"{shlex.join(words)}\n{ended.out}{ended.err}"
    assert (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().count("\n") == 20
