"""Compare the losses of a plan's run with those of the plain one, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spindle_cli.files.run_files import StepMetrics
from spindle_cli.verify.comparing.tally import Tally
from spindle_cli.verify.types import Check, Difference

# A task's loss is compared by its own size, but by no less than this share of its step's total: rounding in a
# loss that is nearly zero says nothing.
SMALLEST_SHARE = 1e-3


def compare_losses(plan: Sequence[StepMetrics], plain: Sequence[StepMetrics], tolerance: float) -> Check:
    """The total and every task's loss of every step; relative to the plain run's. Of a step that both runs
    skipped a loss may be no finite number in both.
    """
    tally = Tally("losses", tolerance)
    for step in range(max(len(plan), len(plain))):
        where = f"step {step + 1}"
        if step >= len(plan) or step >= len(plain):
            run = "plan's" if step >= len(plan) else "plain"
            tally.add(Difference(name="loss", where=where, problem=f"missing in the {run} run"))
            continue
        ours, theirs = plan[step], plain[step]
        both = bool(ours.skipped and theirs.skipped)
        tally.add(_difference("loss", where, ours.loss, theirs.loss, 0.0, may_be_broken=both))
        smallest = abs(theirs.loss) * SMALLEST_SHARE
        for name in sorted({*ours.task_losses, *theirs.task_losses}):
            pair = ours.task_losses.get(name, math.nan), theirs.task_losses.get(name, math.nan)
            tally.add(_difference(f"loss of {name}", where, *pair, smallest, may_be_broken=both))
    return tally.check()


def compare_scales(plan: Sequence[StepMetrics], plain: Sequence[StepMetrics]) -> Check:
    """The loss scale of every step, and whether it was too large; steps that one run lacks are named with the
    losses.
    """
    tally = Tally("loss scales", 0.0)
    for ours, theirs in zip(plan, plain, strict=False):
        where = f"step {theirs.step}"
        if ours.loss_scale is None or theirs.loss_scale is None or ours.skipped is not theirs.skipped:
            said = f"{_told(ours)} under the plan, {_told(theirs)} in plain PyTorch"
            tally.add(Difference(name="loss scale", where=where, problem=said))
        else:
            tally.add(_difference("loss scale", where, ours.loss_scale, theirs.loss_scale, 0.0))
    return tally.check()


def skip_alike(run: Sequence[StepMetrics], other: Sequence[StepMetrics]) -> bool:
    """Whether two runs have skipped the same steps: else the first gradients of each are of another batch."""
    return [step.skipped for step in run] == [step.skipped for step in other]


def _told(metrics: StepMetrics) -> str:
    if metrics.loss_scale is None:
        return "none"
    return f"{metrics.loss_scale:g}, {'skipped' if metrics.skipped else 'not skipped'}"


def _difference(
    name: str, where: str, ours: float, theirs: float, smallest: float, *, may_be_broken: bool = False
) -> Difference:
    """`may_be_broken`: both may be no finite numbers."""
    if may_be_broken and not (math.isfinite(ours) or math.isfinite(theirs)):
        return Difference(name=name, where=where, relative=0.0)
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return Difference(name=name, where=where, problem=f"{ours} under the plan, {theirs} in plain PyTorch")
    gap, size = abs(ours - theirs), max(abs(theirs), smallest)
    return Difference(name=name, where=where, relative=gap / size if size > 0 else float(gap > 0))
