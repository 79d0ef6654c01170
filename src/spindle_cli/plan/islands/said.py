"""What is said of islands that average now and then alone: in the plan, by its report and at launch."""

from __future__ import annotations

from spindle_cli.files.artifact import Model
from spindle_cli.plan.types import Plan
from spindle_cli.units import counted, format_bytes, format_seconds


class IslandsReport(Model):
    """What outer steps take. Bytes are what an island sends to all others together.

    Attributes:
        islands: How many islands there are.
        devices_each: Devices of each.
        every: Steps from one outer step to the next.
        bits: Bits of each number that is sent.
        outer_step_bytes: Bytes of an outer step.
        outer_step_s: Seconds of an outer step.
        bytes_per_step: A step's part of these bytes.
        s_per_step: A step's part of these seconds.
        iteration_s: Mean seconds of an iteration, with its part of an outer step.
        without_s: Where gradients are summed over all devices in every step; None: there is no such plan.
        saved_s: The difference; below 0 where outer steps cost time.
    """

    islands: int
    devices_each: int
    every: int
    bits: int
    outer_step_bytes: int
    outer_step_s: float
    bytes_per_step: float
    s_per_step: float
    iteration_s: float
    without_s: float | None
    saved_s: float | None


def islands_report(plan: Plan) -> IslandsReport | None:
    """None where all devices train one model."""
    if plan.islands is None or plan.local_sgd is None:
        return None
    local_sgd, sent = plan.local_sgd, sum(plan.islands.outer_step_bytes)
    without_s = plan.islands.without_s
    return IslandsReport(
        islands=local_sgd.islands,
        devices_each=plan.cluster.num_devices,
        every=local_sgd.every,
        bits=local_sgd.bits,
        outer_step_bytes=sent,
        outer_step_s=plan.islands.outer_step_s,
        bytes_per_step=sent / local_sgd.every,
        s_per_step=plan.islands.outer_step_s / local_sgd.every,
        iteration_s=plan.mean_iteration_s,
        without_s=without_s,
        saved_s=None if without_s is None else without_s - plan.mean_iteration_s,
    )


def consent_line(plan: Plan) -> str | None:
    """That another model is trained, and which; None where it is not."""
    report, local_sgd = islands_report(plan), plan.local_sgd
    if report is None or local_sgd is None:
        return None
    outer = f"SGD with lr {local_sgd.outer.lr:g}"
    if local_sgd.outer.momentum:
        kind = "Nesterov momentum" if local_sgd.outer.nesterov else "momentum"
        outer += f" and {kind} {local_sgd.outer.momentum:g}"
    devices = counted(report.devices_each, "device")
    return (
        f"not the model that plain PyTorch trains on whole batches (train.local_sgd): {report.islands} "
        f"islands of {devices} train a copy each, on equal parts of every batch, and average after "
        f"every {report.every} steps by {outer}, in {report.bits} bits"
    )


def lines_of(plan: Plan) -> tuple[str, ...]:
    """That, and what it takes and saves, for people."""
    report, consent = islands_report(plan), consent_line(plan)
    if report is None or consent is None:
        return ()
    outer = (
        f"an outer step takes {format_seconds(report.outer_step_s)}, and each island sends "
        f"{format_bytes(report.outer_step_bytes)}: {format_seconds(report.s_per_step)} and "
        f"{format_bytes(round(report.bytes_per_step))} of each step"
    )
    mean = f"an iteration takes {format_seconds(report.iteration_s)} in the mean"
    return consent, outer, f"{mean}, {_saved(report)}"


def _saved(report: IslandsReport) -> str:
    if report.without_s is None or report.saved_s is None:
        return "and there is no plan for all devices together to compare it with"
    change = (
        f"{format_seconds(report.saved_s)} saved"
        if report.saved_s >= 0
        else f"{format_seconds(-report.saved_s)} lost"
    )
    return (
        f"and would take {format_seconds(report.without_s)} with gradients summed over all devices in every "
        f"step: {change}"
    )
