"""A verification for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from spindle_cli.verify.types import Check, Difference, Noise, VerifyReport, What

SHOWN = 5
NEAR_ZERO: What = "values near zero gradients"
_OWN_BUFFERS = (
    "  Each device that runs an operator keeps its own copy of the buffers that its forward changes; plain\n"
    "  PyTorch has one, which all tasks and samples go through. List such operators in the workload's\n"
    "  `coupled`, and give each task its own; several calls in one task go into one operator."
)


def render_report(report: VerifyReport) -> RenderableType:
    """Return the verdict, a table of the checks, and what failed or was set aside by name."""
    parts: list[RenderableType] = [_verdict(report), _table(report)]
    for check in report.checks:
        parts.extend(_failures(check))
        if check.what == "buffers" and check.failures:
            parts.append(_OWN_BUFFERS)
    parts.extend(_set_aside(report))
    return Group(*parts)


def _verdict(report: VerifyReport) -> str:
    over = f"over {report.steps} steps on {report.workers} workers, against one plain PyTorch process"
    if report.islands > 1:
        over += f", of {report.islands} islands that average after every {report.outer_every} steps"
    if report.no_randomness:
        over += ", both without randomness"
    if report.same:
        return f"same model: {report.workload} under the {report.strategy} plan, {over}"
    failed = ", ".join(check.what for check in report.checks if not check.passed)
    if report.dtype == "float32" and "initial" not in failed:
        why = "The first gradients agree, so rounding may have grown since"
        if report.draws:
            why = "Plain PyTorch's own rounding, as measured, does not explain all of it"
        elif "gradients" in failed:
            why = "Where much cancels, rounding alone may be as large as this in float32"
        over += f"\n  {why}: `--dtype float64` decides."
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
        verdict = "DIFFERS" if not check.passed else "ok, rounding" if check.explained else "ok"
        table.add_row(check.what, str(check.compared), *_largest(check), verdict)
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
    return _lines(check, check.failures)


def _lines(check: Check, differences: Sequence[Difference]) -> list[str]:
    """Return the largest, one line for all ranks' copies of a parameter."""
    by_name: dict[str, list[Difference]] = {}
    for failure in differences:
        by_name.setdefault(failure.name, []).append(failure)
    lines: list[str] = []
    for largest, *others in list(by_name.values())[:SHOWN]:
        more = f" and {len(others)} more of it" if others else ""
        lines.append(f"  {check.what}: {largest}{more}")
    if len(by_name) > SHOWN:
        lines.append(f"  {check.what}: and {len(by_name) - SHOWN} others")
    return lines


def _noise_line(entry: Noise) -> str:
    count = "whole" if entry.left_out == entry.elements else f"{entry.left_out} of {entry.elements} elements"
    return f"{entry.name}: {count}, gradient at most {entry.largest_gradient:.1e} of the model's largest"


def _set_aside(report: VerifyReport) -> list[str]:
    lines: list[str] = []
    if report.rounding is not None:
        lines.append(
            f"rounding alone moves final parameters by {report.rounding:.1e} here "
            "(plain PyTorch trained again, with noise of its size in the gradients)"
        )
    if explained := [line for check in report.checks for line in _lines(check, check.explained)]:
        lines.append(
            "beyond the tolerance, and within what rounding alone moves in plain PyTorch "
            f"(trained {report.draws} times more, every operator's result off in the last place):"
        )
        lines += explained
    if report.noise:
        what = "by gradient alone"
        if any(check.what == NEAR_ZERO for check in report.checks):
            what = "by gradient, and by value with what such gradients alone do in plain PyTorch"
        lines.append(f"compared {what}: gradients so close to zero that rounding decides the step:")
        lines += [f"  {_noise_line(entry)}" for entry in report.noise]
    if report.unused:
        lines.append("used by no operator, and unchanged:")
        lines += [f"  {name}" for name in report.unused]
    return lines
