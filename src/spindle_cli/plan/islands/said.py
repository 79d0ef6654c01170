"""What is said of islands that average now and then alone: in the plan, by its report and at launch, and of
what they would take with other `every` and `bits`. Both are part of what is trained, so the workload file
says them, and no planner chooses; the plan of an island is the same with any.
"""

from __future__ import annotations

from typing import get_args

from spindle_cli.account.traffic import outer_step_bytes, outer_step_s
from spindle_cli.files.artifact import Model
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import LocalSgd
from spindle_cli.units import counted, format_bytes, format_seconds

# Steps from one outer step to the next that are shown, beside the plan's own.
EVERY = (1, 10, 50, 100, 200, 500, 1000)


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


class OuterSteps(Model):
    """With an outer step after every `every` steps, mean figures of an iteration. What is saved is below 0
    where it takes longer.

    Attributes:
        every: Steps from one outer step to the next.
        iteration_s: Mean seconds of an iteration.
        bytes_per_iteration: Bytes that the device that sends most sends to all its peer replicas.
        saved_s: Seconds saved against gradients that are summed over all devices in every step; null: nobody
            knows.
        saved_to_every_step_s: Seconds saved against an outer step after every step.
    """

    every: int
    iteration_s: float
    bytes_per_iteration: float
    saved_s: float | None
    saved_to_every_step_s: float


class InBits(Model):
    """What outer steps take with so many bits of each number that is sent.

    Attributes:
        bits: Bits of each number.
        outer_step_s: Seconds of an outer step.
        outer_step_bytes: Bytes that the device that sends most sends in it.
        saves_from: The smallest `every` that takes less time than to sum gradients over all devices in every
            step; null: none does, or nobody knows.
        steps: The figures for several values of `every`.
    """

    bits: int
    outer_step_s: float
    outer_step_bytes: int
    saves_from: int | None
    steps: tuple[OuterSteps, ...]


class OtherSettings(Model):
    """What outer steps take as the plan has them, and with other settings.

    Attributes:
        islands: How many islands there are.
        every: The plan's `every`.
        bits: The plan's `bits`.
        step_iterations: Batches of every task in a step (`train.accumulate`).
        inner_s: Seconds of an iteration without outer steps.
        without_s: Seconds of an iteration with gradients summed over all devices; null: nobody knows.
        of_bits: The figures for each number of bits.
    """

    islands: int
    every: int
    bits: int
    step_iterations: int
    inner_s: float
    without_s: float | None
    of_bits: tuple[InBits, ...]


def other_settings(plan: Plan) -> OtherSettings | None:
    """None without islands, and where these are not the plan's cluster over and over, which `check` tells."""
    if plan.islands is None or plan.local_sgd is None:
        return None
    local_sgd = plan.local_sgd
    if plan.islands.cluster.node_sizes != plan.cluster.node_sizes * local_sgd.islands:
        return None
    every_bits = sorted(get_args(LocalSgd.model_fields["bits"].annotation), reverse=True)
    return OtherSettings(
        islands=local_sgd.islands,
        every=local_sgd.every,
        bits=local_sgd.bits,
        step_iterations=plan.accumulate,
        inner_s=plan.predicted.iteration_s,
        without_s=plan.islands.without_s,
        of_bits=tuple(
            _in_bits(plan, local_sgd.model_copy(update={"bits": bits}), plan.islands.without_s)
            for bits in every_bits
        ),
    )


def _in_bits(plan: Plan, local_sgd: LocalSgd, without_s: float | None) -> InBits:
    sent = max(outer_step_bytes(plan, local_sgd))
    took_s = outer_step_s(plan, local_sgd, plan.whole_cluster)
    inner_s = plan.predicted.iteration_s
    per_step = took_s / plan.accumulate
    steps = tuple(
        OuterSteps(
            every=every,
            iteration_s=inner_s + per_step / every,
            bytes_per_iteration=sent / (every * plan.accumulate),
            saved_s=None if without_s is None else without_s - (inner_s + per_step / every),
            saved_to_every_step_s=per_step - per_step / every,
        )
        for every in sorted({*EVERY, local_sgd.every})
    )
    saves = without_s is not None and inner_s < without_s
    return InBits(
        bits=local_sgd.bits,
        outer_step_s=took_s,
        outer_step_bytes=sent,
        saves_from=int(per_step / (without_s - inner_s)) + 1 if saves and without_s is not None else None,
        steps=steps,
    )
