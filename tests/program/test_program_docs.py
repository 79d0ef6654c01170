"""The program that docs/program.md walks through is the one that is linked."""

from __future__ import annotations

from pathlib import Path

from helpers.plans import two_towers
from spindle_cli.program.link import link
from spindle_cli.show.text import format_rank

DOCS = Path(__file__).parents[2] / "docs"


def test_the_walkthrough_shows_the_program_as_it_is() -> None:
    text = (DOCS / "program.md").read_text(encoding="utf-8")
    assert format_rank(link(two_towers()[1]), 2) in text
