"""The report's page: one HTML file with its style, its scripts and its data inside.

Nothing is loaded from anywhere, and the page's own content security policy says so: only the script and
the style that are in it may run, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any

from spindle_cli.report.types import ReportData

# In the order in which they are put together; later ones use earlier ones.
ALL_BUT_MAIN = (
    "elements.js",
    "units.js",
    "colours.js",
    "tooltip.js",
    "axes.js",
    "viewport.js",
    "gestures.js",
    "drawing.js",
    "facts.js",
    "scenes.js",
    "schedule.js",
    "controls.js",
    "allocation.js",
    "devices.js",
    "curves.js",
    "strategies.js",
    "evaluations.js",
    "run.js",
    "work.js",
)
SCRIPTS = (*ALL_BUT_MAIN, "main.js")


@dataclass(frozen=True)
class Page:
    """A page, and its content security policy, which it also says itself."""

    text: str
    policy: str


def render_page(data: ReportData) -> str:
    """Return the whole page. Same data, same bytes."""
    content = data.model_dump(mode="json", by_alias=True)
    return make_page(content, SCRIPTS, title=f"{data.workload}: {data.strategy} plan").text


def make_page(content: Mapping[str, Any], scripts: Sequence[str], *, title: str, policy: str = "") -> Page:
    """Return a page of the report's parts. Same content, same bytes.

    Args:
        content: what the scripts find as `DATA`.
        scripts: by their names, in order.
        policy: what its script may do beyond what is in the page.
    """
    style = _asset("report.css")
    script = "(() => {\n'use strict';\n" + "".join(_asset(name) for name in scripts) + "})();\n"
    rules = (
        "default-src 'none'; img-src data:",
        f"style-src {_csp_hash(style)}",
        f"script-src {_csp_hash(script)}",
        "base-uri 'none'; form-action 'none'",
        *([policy] if policy else []),
    )
    whole = "; ".join(rules)
    text = Template(_asset("report.html")).substitute(
        title=html.escape(title), style=style, script=script, policy=whole, data=embedded_json(content)
    )
    return Page(text, whole)


def embedded_json(content: Mapping[str, Any]) -> str:
    """Return the content as JSON that cannot end the script element it stands in, whatever names it has."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # Inside JSON these occur in strings only. U+2028 and U+2029 were line ends in older JavaScript.
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (files("spindle_cli.report") / "assets" / name).read_text(encoding="utf-8")


def _csp_hash(content: str) -> str:
    """Return the source expression that lets an inline element with exactly this content run."""
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
