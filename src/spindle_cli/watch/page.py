"""The live page: the report's own parts, with a head and a run that follow what happens."""

from __future__ import annotations

from typing import Any

from spindle_cli.report.page import ALL_BUT_MAIN, Page, make_page
from spindle_cli.report.types import MeasuredIteration, ReportData
from spindle_cli.watch.types import WatchData

SCRIPTS = (*ALL_BUT_MAIN, "live.js")
# What the page's script may do beyond what is in the page: ask the server that it came from.
CONNECTS = "connect-src 'self'"

# What the scripts look for in a plan, where there is none.
_NO_PLAN: dict[str, Any] = {"metaops": [], "slices": [], "memory": [], "predicted": None, "timeline": None}


def render_live_page(data: WatchData, report: ReportData | None, timeline: MeasuredIteration | None) -> Page:
    """The page as it is now; it asks for the rest itself."""
    run = data.run.model_copy(update={"timeline": timeline})
    whole = _NO_PLAN if report is None else report.model_dump(mode="json", by_alias=True)
    watch = data.model_dump(mode="json", by_alias=True)
    content = {**whole, "run": run.model_dump(mode="json"), "watch": {**watch, "run": None}}
    title = f"{data.run.folder}: {data.workload or 'a run'}"
    return make_page(content, SCRIPTS, title=title, policy=CONNECTS)
