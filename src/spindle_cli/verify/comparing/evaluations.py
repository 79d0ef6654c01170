"""Compare the evaluations behind the last step with those in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from spindle_cli.files.runs.evaluations import Evaluation
from spindle_cli.verify.comparing.spread import FACTOR
from spindle_cli.verify.comparing.tally import Tally
from spindle_cli.verify.rounding import widened
from spindle_cli.verify.types import Check, Difference, What

EVALUATIONS: What = "evaluations"

Numbers = tuple[float | None, float | None, float | None]  # by the plan, by plain PyTorch, and with noise

# Below this size differences are not relative to it: a metric may be zero.
_SMALLEST = 1e-6


def compare_evaluations(
    plan: Iterable[Evaluation],
    plain: Sequence[Evaluation],
    tolerance: float,
    *,
    metrics: bool,
    rounded: Iterable[Evaluation] = (),
    drawn: Sequence[Iterable[Evaluation]] = (),
    most: float = 0.0,
) -> Check:
    """Each task's loss and how many samples it is of, and its metrics; relative to the plain run's.

    Args:
        plan: of all steps; the last of each task counts.
        plain: one of each task.
        metrics: whether these are compared: not where rounding may move a sample from one side to the other.
        rounded: the same of plain PyTorch with noise in its gradients, if it was trained: each number may
            differ by what that has moved, as `widened` says. In eval mode a bias whose gradient is rounding
            is not taken off again by the running mean of the batch norm behind it.
        drawn: the same of runs whose operators round once more: a loss may differ as a tensor may
            (comparing/spread.py), and by `most`.
    """
    tally = Tally(EVALUATIONS, tolerance)
    last = {found.task: found for found in plan}
    moved = {found.task: found for found in rounded}
    draws = [{found.task: found.loss for found in draw} for draw in drawn]
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
        noisy = moved.get(found.task, expected)
        compared: list[tuple[str, Numbers]] = [("loss", (found.loss, expected.loss, noisy.loss))]
        for metric in sorted({*found.metrics, *expected.metrics}) if metrics else ():
            ours, theirs, by_noise = (each.metrics.get(metric) for each in (found, expected, noisy))
            compared.append((metric, (ours, theirs, by_noise)))
        for key, (ours, theirs, by_noise) in compared:
            may = widened(tolerance, _difference(key, where, by_noise, theirs).relative or 0.0)
            difference = _difference(f"{name}: {key}", where, ours, theirs)
            if draws and key == "loss":
                by_draw = [
                    _difference(key, where, draw.get(expected.task), theirs).relative for draw in draws
                ]
                rounding = 0.0 if None in by_draw else max(each or 0.0 for each in by_draw)
                difference = difference.model_copy(update={"rounding": rounding})
                explained = (difference.relative or math.inf) <= min(FACTOR * rounding, most)
                tally.add(difference, may, explained=explained)
                continue
            tally.add(difference, may)
    return tally.check()


def _difference(name: str, where: str, ours: float | None, theirs: float | None) -> Difference:
    if ours == theirs or all(value is not None and math.isnan(value) for value in (ours, theirs)):
        return Difference(name=name, where=where, relative=0.0)
    if ours is None or theirs is None or not (math.isfinite(ours) and math.isfinite(theirs)):
        return Difference(name=name, where=where, problem=f"{ours} under the plan, {theirs} in plain PyTorch")
    return Difference(name=name, where=where, relative=abs(ours - theirs) / max(abs(theirs), _SMALLEST))
