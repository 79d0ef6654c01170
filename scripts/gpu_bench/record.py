"""What a check of a device has found: a line for each thing that was looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from spindle_cli.costs.flops import Arithmetic
from spindle_cli.profile.machine.devices import device_peak, listed_devices
from spindle_cli.profile.types import MetaOp, Profile
from spindle_cli.units import GIB, format_bytes, format_seconds

# `off`: a prediction that is further from what was measured than it should be; nothing is broken.
Status = Literal["ok", "off", "failed", "skipped", "not reached"]

# A backward pass works twice as much as the forward pass: gradients of inputs and of parameters.
PASSES = 3
# What a prediction of time may be off, either way, and of memory: no more than predicted may be taken, and
# much less would keep plans from what fits.
TIME_OFF = 0.25
MEMORY_OVER, MEMORY_UNDER = 0.02, 0.30


@dataclass(frozen=True)
class Line:
    """One thing that was looked at.

    `values`: numbers as they are, in seconds, bytes and shares, by name.
    """

    section: str
    subject: str
    status: Status
    said: str
    values: dict[str, float]


def time_line(workload: str, predicted_s: float, measured_s: float) -> Line:
    """An iteration as predicted and as measured."""
    off = predicted_s / measured_s - 1
    return Line(
        section="time",
        subject=workload,
        status="ok" if abs(off) <= TIME_OFF else "off",
        said=f"predicted {format_seconds(predicted_s)}, measured {format_seconds(measured_s)}, {off:+.1%}",
        values={"predicted_s": predicted_s, "measured_s": measured_s},
    )


def memory_line(workload: str, predicted: int, measured: int) -> Line:
    """The peak of a device as predicted and as measured: to take more than predicted is a failure."""
    over = (measured - predicted) / predicted
    status: Status = "failed" if over > MEMORY_OVER else "off" if over < -MEMORY_UNDER else "ok"
    return Line(
        section="memory",
        subject=workload,
        status=status,
        said=f"predicted {format_bytes(predicted)}, measured {format_bytes(measured)}, {over:+.1%}",
        values={"predicted_bytes": predicted, "measured_bytes": measured},
    )


def curve_lines(workload: str, device: str, profile: Profile) -> Iterator[Line]:
    """Each MetaOp's op on its whole share, with the share of the device's peak where that is known."""
    precision: Arithmetic = "float32" if profile.environment.get("precision") == "float32" else "bfloat16"
    for metaop in profile.metaops:
        op_s = metaop.curve[0].op_s
        share = share_of_peak(device, precision, metaop, metaop.curve[0].num_devices, op_s)
        of_peak = "" if share is None else f", {share:.0%} of the peak"
        values = {"op_s": op_s} | ({} if share is None else {"share_of_peak": share})
        yield Line(
            "curve", f"{workload} {metaop.name}", "ok", f"{format_seconds(op_s)} an op{of_peak}", values
        )


def share_of_peak(
    device: str, precision: Arithmetic, metaop: MetaOp, num_devices: int, op_s: float
) -> float | None:
    """What an op reaches of the device's peak, both ways; None where one of them is not known."""
    flops = getattr(metaop, "flops_per_op", None)
    if device not in listed_devices() or not flops or op_s <= 0:
        return None
    return PASSES * float(flops) / num_devices / op_s / device_peak(device).flops_per_s[precision]


def table(device: str, lines: Sequence[Line]) -> str:
    """All lines, aligned; the worst of all last."""
    heads = ("section", "subject", "status", "what was found")
    rows = [heads, *((line.section, line.subject, line.status, line.said) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    text = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    counts = {status: sum(line.status == status for line in lines) for status in ("ok", "off", "failed")}
    rest = len(lines) - sum(counts.values())
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    return "\n".join([device, "", *text, "", f"{summary}, {rest} not looked at"])


def document(device: str, memory_bytes: int, seconds: float, lines: Sequence[Line]) -> dict[str, object]:
    """The same as JSON."""
    return {
        "schema": "spindle.gpu-check/1",
        "device": device,
        "memory_gib": memory_bytes / GIB,
        "seconds": seconds,
        "passed": passed(lines),
        "lines": [asdict(line) for line in lines],
    }


def passed(lines: Sequence[Line]) -> bool:
    """Nothing has failed."""
    return all(line.status != "failed" for line in lines)
