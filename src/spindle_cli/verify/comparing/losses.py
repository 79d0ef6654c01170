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
    """The total and every task's loss of every step; relative to the plain run's."""
    tally = Tally("losses", tolerance)
    for step in range(max(len(plan), len(plain))):
        where = f"step {step + 1}"
        if step >= len(plan) or step >= len(plain):
            run = "plan's" if step >= len(plan) else "plain"
            tally.add(Difference(name="loss", where=where, problem=f"missing in the {run} run"))
            continue
        ours, theirs = plan[step], plain[step]
        tally.add(_difference("loss", where, ours.loss, theirs.loss, 0.0))
        smallest = abs(theirs.loss) * SMALLEST_SHARE
        for name in sorted({*ours.task_losses, *theirs.task_losses}):
            pair = ours.task_losses.get(name, math.nan), theirs.task_losses.get(name, math.nan)
            tally.add(_difference(f"loss of {name}", where, *pair, smallest))
    return tally.check()


def _difference(name: str, where: str, ours: float, theirs: float, smallest: float) -> Difference:
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return Difference(name=name, where=where, problem=f"{ours} under the plan, {theirs} in plain PyTorch")
    gap, size = abs(ours - theirs), max(abs(theirs), smallest)
    return Difference(name=name, where=where, relative=gap / size if size > 0 else float(gap > 0))
