"""A verification for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from spindle_cli.verify.types import Check, VerifyReport

SHOWN = 5


def render_report(report: VerifyReport) -> RenderableType:
    """The verdict, a table of the checks, and what failed or was set aside by name."""
    parts: list[RenderableType] = [_table(report)]
    for check in report.checks:
        parts.extend(_failures(check))
    parts.extend(_set_aside(report))
    parts.append(_verdict(report))
    return Group(*parts)


def _verdict(report: VerifyReport) -> str:
    over = f"over {report.steps} steps on {report.workers} workers, against one plain PyTorch process"
    if report.same:
        return f"same model: {report.workload} under the {report.strategy} plan, {over}"
    failed = ", ".join(check.what for check in report.checks if not check.passed)
    return f"NOT the same model ({failed}): {report.workload} under the {report.strategy} plan, {over}"


def _table(report: VerifyReport) -> Table:
    table = Table(title=f"plan against plain PyTorch ({report.dtype})", title_justify="left")
    table.add_column("what")
    table.add_column("compared", justify="right")
    table.add_column("largest difference", justify="right")
    table.add_column("of at most", justify="right")
    table.add_column("where", overflow="fold")
    table.add_column("")
    for check in report.checks:
        table.add_row(check.what, str(check.compared), *_largest(check), "ok" if check.passed else "DIFFERS")
    return table


def _largest(check: Check) -> tuple[str, str, str]:
    allowed = "bitwise" if check.tolerance == 0 else f"{check.tolerance:.0e}"
    largest = check.largest
    if largest is None:
        return "nothing compared", allowed, ""
    if largest.relative == 0:
        return "0", allowed, ""
    size = "-" if largest.relative is None else f"{largest.relative:.1e}"
    return size, allowed, f"{largest.name} ({largest.where})"


def _failures(check: Check) -> list[str]:
    lines = [f"  {check.what}: {failure}" for failure in check.failures[:SHOWN]]
    if len(check.failures) > SHOWN:
        lines.append(f"  {check.what}: and {len(check.failures) - SHOWN} more")
    return lines


def _set_aside(report: VerifyReport) -> list[str]:
    lines: list[str] = []
    if report.noise:
        lines.append(
            f"compared by gradient alone: it is under {report.noise_floor:.0e} of the model's largest, "
            "where rounding is all there may be:"
        )
        lines += [f"  {entry.name} ({entry.largest_gradient:.1e})" for entry in report.noise]
    if report.unused:
        lines.append("used by no operator, and unchanged:")
        lines += [f"  {name}" for name in report.unused]
    return lines
