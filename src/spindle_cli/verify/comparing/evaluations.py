"""Compare the evaluations behind the last step with those in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from spindle_cli.files.runs.evaluations import Evaluation
from spindle_cli.verify.comparing.tally import Tally
from spindle_cli.verify.types import Check, Difference

# Below this size differences are not relative to it: a metric may be zero.
_SMALLEST = 1e-6


def compare_evaluations(
    plan: Iterable[Evaluation], plain: Sequence[Evaluation], tolerance: float, *, metrics: bool
) -> Check:
    """Each task's loss and how many samples it is of, and its metrics; relative to the plain run's.

    Args:
        plan: of all steps; the last of each task counts.
        plain: one of each task.
        metrics: whether these are compared: not where rounding may move a sample from one side to the other.
    """
    tally = Tally("evaluations", tolerance)
    last = {found.task: found for found in plan}
    for expected in plain:
        found, where = last.get(expected.task), f"after step {expected.step}"
        name = f"evaluation of {expected.task}"
        if found is None or (found.step, found.num_samples) != (expected.step, expected.num_samples):
            said = (
                "missing under the plan"
                if found is None
                else f"of {found.num_samples} samples after step {found.step} under the plan, "
                f"of {expected.num_samples} in plain PyTorch"
            )
            tally.add(Difference(name=name, where=where, problem=said))
            continue
        tally.add(_difference(f"{name}: loss", where, found.loss, expected.loss))
        for metric in sorted({*found.metrics, *expected.metrics}) if metrics else ():
            pair = found.metrics.get(metric), expected.metrics.get(metric)
            tally.add(_difference(f"{name}: {metric}", where, *pair))
    return tally.check()


def _difference(name: str, where: str, ours: float | None, theirs: float | None) -> Difference:
    if ours == theirs or all(value is not None and math.isnan(value) for value in (ours, theirs)):
        return Difference(name=name, where=where, relative=0.0)
    if ours is None or theirs is None or not (math.isfinite(ours) and math.isfinite(theirs)):
        return Difference(name=name, where=where, problem=f"{ours} under the plan, {theirs} in plain PyTorch")
    return Difference(name=name, where=where, relative=abs(ours - theirs) / max(abs(theirs), _SMALLEST))
