"""Pages to open in a browser, and where things are in their schedule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from helpers.browser import Browser
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.plan.types import Plan
from spindle_cli.report.build import build_report
from spindle_cli.report.page import render_page

CANVAS = "#schedule-canvas"


def write_page(path: Path, plan: Plan) -> Path:
    """The plan's report without profile and run."""
    path.write_text(render_page(build_report(plan)), encoding="utf-8")
    return path


def thousand_devices() -> Plan:
    """1,024 devices, by hand: `a` on the lower half and `b` on the upper for 1 s, then `c` on device 700."""
    op_s = {1: 0.5, 512: 1.0}
    a, b, c = (metaop_of(f"task/{name}", 1, op_s, batch_size=512) for name in "abc")
    waves = (
        (slice_of(a, (0, 1), range(512), 0.0), slice_of(b, (0, 1), range(512, 1024), 0.0)),
        (slice_of(c, (0, 1), (700,), 1.0),),
    )
    return plan_of(profile_of(a, b, c), cluster_of(1024, devices_per_node=8), waves, lower_bound_s=1.0)


@dataclass(frozen=True)
class Picture:
    """The schedule's canvas as it is now: what it shows, and where in the window."""

    left: float
    top: float
    width: float
    height: float
    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def of(cls, browser: Browser) -> Picture:
        """Scrolled into the middle of the window first."""
        script = """
            const canvas = document.querySelector(arguments[0]);
            const box = canvas.getBoundingClientRect();
            const [left, top, width, height] = canvas.dataset.area.split(' ').map(Number);
            const view = canvas.dataset.view.split(' ').map(Number);
            return [box.left + left, box.top + top, width, height, ...view];
        """
        browser.show(CANVAS)
        return cls(*browser.run(script, CANVAS))

    @property
    def view(self) -> tuple[float, float, float, float]:
        """Seconds from and to, rows from and to."""
        return self.x0, self.x1, self.y0, self.y1

    def at(self, seconds: float, row: float) -> tuple[float, float]:
        """The window's coordinates of a time and the middle of a row."""
        x = self.left + (seconds - self.x0) / (self.x1 - self.x0) * self.width
        y = self.top + (row + 0.5 - self.y0) / (self.y1 - self.y0) * self.height
        return x, y
