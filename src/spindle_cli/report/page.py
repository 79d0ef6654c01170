"""The report's page: one HTML file with its style, its scripts and its data inside.

Nothing is loaded from anywhere, and the page's own content security policy says so: only the script and
the style that are in it may run, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from string import Template

from spindle_cli.report.types import ReportData

# In the order in which they are put together; later ones use earlier ones.
SCRIPTS = (
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
    "run.js",
    "main.js",
)


def render_page(data: ReportData) -> str:
    """The whole page. Same data, same bytes."""
    style = _asset("report.css")
    script = "(() => {\n'use strict';\n" + "".join(_asset(name) for name in SCRIPTS) + "})();\n"
    return Template(_asset("report.html")).substitute(
        title=html.escape(f"{data.workload}: {data.strategy} plan"),
        style=style,
        style_hash=_csp_hash(style),
        script=script,
        script_hash=_csp_hash(script),
        data=embedded_json(data),
    )


def embedded_json(data: ReportData) -> str:
    """The data as JSON that cannot end the script element it stands in, whatever names it has."""
    text = json.dumps(
        data.model_dump(mode="json", by_alias=True),
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )
    # Inside JSON these occur in strings only. U+2028 and U+2029 were line ends in older JavaScript.
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (files("spindle_cli.report") / "assets" / name).read_text(encoding="utf-8")


def _csp_hash(content: str) -> str:
    """The source expression that lets an inline element with exactly this content run."""
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
