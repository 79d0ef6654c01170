"""Compare what the runs of a verification have left, and report on it.

Losses are compared step by step, and evaluations behind the last step; what was found of each of several
islands is put together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from spindle_cli.errors import RunFailedError
from spindle_cli.files.run_files import StepMetrics, read_metrics
from spindle_cli.files.runs.records import Evaluation, read_evaluations
from spindle_cli.verify.comparing.captured import CapturedRun, open_run
from spindle_cli.verify.comparing.parameters import (
    AVERAGE,
    BUFFERS,
    FINAL,
    GRADIENTS,
    compare_average,
    compare_buffers,
    compare_final,
    compare_gradients,
    compare_initial,
    compare_moved_by_noise,
    compare_noise,
    find_noise,
    find_unused,
    largest_change,
)
from spindle_cli.verify.comparing.sizes import Tally
from spindle_cli.verify.comparing.spread import FACTOR, Spreads
from spindle_cli.verify.rounding import LARGEST_TOLERANCE, widened
from spindle_cli.verify.runs import Runs, capture_dir_of
from spindle_cli.verify.types import (
    FINAL_TOLERANCE,
    MOST_EXPLAINED,
    MOST_EXPLAINED_OF_STATE,
    NOISE_FLOOR,
    SPLIT_FINAL_TOLERANCE,
    SPLIT_GRADIENT_TOLERANCE,
    TOLERANCE,
    Check,
    Difference,
    Noise,
    VerifyOptions,
    VerifyReport,
    What,
)

EVALUATIONS: What = "evaluations"
# Below this size differences are not relative to it: a metric may be zero.
_SMALLEST = 1e-6
# A task's loss is compared by its own size, but by no less than this share of its step's total: rounding in a
# loss that is nearly zero says nothing.
SMALLEST_SHARE = 1e-3


def rounding_may_explain(report: VerifyReport) -> bool:
    """Whether nothing but the size of differences in the final parameters, and in float64 in the buffers and
    evaluations that are made of them, speaks against the plan.
    """
    failed = [check for check in report.checks if not check.passed]
    kinds = {check.what for check in failed} - {AVERAGE}
    explained = {FINAL, BUFFERS, EVALUATIONS} if report.dtype == "float64" else {FINAL}
    return (
        bool(kinds)
        and kinds <= explained
        and all(
            difference.relative is not None and difference.relative <= LARGEST_TOLERANCE
            for check in failed
            for difference in check.failures
        )
    )


def has_values_of_noise(report: VerifyReport) -> bool:
    """Whether there are values that float64 can tell from what rounding alone makes of them, and nothing else
    speaks against the plan.
    """
    below = [entry for entry in report.noise if entry.largest_gradient < report.noise_floor]
    return report.dtype == "float64" and bool(below) and report.same


def operators_may_explain(report: VerifyReport) -> bool:
    """Whether what speaks against the plan are tensors and evaluations alone, some of them no further off
    than operators that round once more could ever explain.
    """
    failed = [check for check in report.checks if not check.passed]
    most = max(MOST_EXPLAINED[report.dtype], MOST_EXPLAINED_OF_STATE)
    sizes = [failure.relative for check in failed for failure in check.failures]
    return (
        report.dtype != "float64"
        and {check.what for check in failed} <= {GRADIENTS, FINAL, AVERAGE, BUFFERS, EVALUATIONS}
        and None not in sizes
        and any(size is not None and size <= most for size in sizes)
    )


def compare_runs(
    runs: Runs, options: VerifyOptions, *, with_rounding: bool = False, with_draws: bool = False
) -> VerifyReport:
    """Compare what two finished runs have left; `with_rounding`: so has a third, of plain PyTorch with noise;
    `with_draws`: so have those whose operators round once more.

    Raises:
        RunFailedError: one of them has not left everything.
    """
    dtype = runs.arithmetic
    tolerance, floor = TOLERANCE[dtype], NOISE_FLOOR[dtype]
    our_steps = list(read_metrics(runs.ours.run_dir))
    plain_steps = list(read_metrics(runs.plain.run_dir))
    _require_an_update(plain_steps)
    with_draws = with_draws and _all_skip_alike(runs, plain_steps)
    measured = _Measured(with_rounding, with_draws)
    by_island = [_compare_island(runs, number, measured) for number in range(runs.islands)]
    widest = max(tolerance, *(of_island.tolerance for of_island in by_island))
    evaluations = _compare_evaluations_of(runs, widest, measured)
    initial, *others = together([of_island.checks for of_island in by_island])
    checks = (
        initial,
        compare_losses(our_steps, plain_steps, tolerance),
        *((compare_scales(our_steps, plain_steps),) if dtype == "fp16-autocast" else ()),
        *others,
        *((evaluations,) if evaluations.compared else ()),
    )
    return VerifyReport(
        same=all(check.passed for check in checks),
        workload=runs.plan.workload.name,
        strategy=runs.plan.strategy,
        workers=runs.ours.processes,
        steps=options.steps,
        dtype=dtype,
        no_randomness=options.no_randomness,
        checks=checks,
        rounding=max(
            (of_island.rounding for of_island in by_island if of_island.rounding is not None), default=None
        ),
        noise_floor=floor,
        noise=tuple(dict.fromkeys(entry for of_island in by_island for entry in of_island.noise)),
        unused=by_island[0].unused,
        islands=runs.islands,
        outer_every=runs.ours.request.outer_every,
        draws=len(runs.drawn) if with_draws else 0,
    )


@dataclass(frozen=True)
class _Measured:
    """Which runs there are besides the two, to see what rounding does: `rounded` and `drawn` of `Runs`."""

    rounded: bool
    drawn: bool


@dataclass(frozen=True)
class _OfIsland:
    """What was found of what an island has left (or all devices, where there are no islands). `tolerance`: of
    its final parameters.
    """

    checks: tuple[Check, ...]
    noise: tuple[Noise, ...]
    unused: tuple[str, ...]
    rounding: float | None
    tolerance: float


def _all_skip_alike(runs: Runs, plain_steps: Sequence[StepMetrics]) -> bool:
    """Whether all runs whose operators round once more have skipped the steps that the plain one has."""
    return all(skip_alike(plain_steps, list(read_metrics(draw.run_dir))) for draw in runs.drawn)


def _compare_evaluations_of(runs: Runs, tolerance: float, measured: _Measured) -> Check:
    """Compare what runs have evaluated. Of metrics nothing is known but in float64."""
    is_float64 = runs.arithmetic == "float64"
    return compare_evaluations(
        read_evaluations(runs.ours.run_dir),
        list(read_evaluations(runs.plain.run_dir)),
        tolerance,
        metrics=is_float64,
        rounded=read_evaluations(runs.rounded.run_dir) if measured.rounded and is_float64 else (),
        drawn=[read_evaluations(draw.run_dir) for draw in runs.drawn] if measured.drawn else (),
        most=max(MOST_EXPLAINED[runs.arithmetic], MOST_EXPLAINED_OF_STATE),
    )


def _compare_island(runs: Runs, number: int, measured: _Measured) -> _OfIsland:
    dtype = runs.arithmetic
    tolerance, floor = TOLERANCE[dtype], NOISE_FLOOR[dtype]
    workers = runs.ours.processes // runs.islands
    with (
        open_run(capture_dir_of(runs.ours, number), workers, averages=runs.averages) as ours,
        open_run(capture_dir_of(runs.plain, number), 1, averages=runs.averages) as plain,
        _open_draws(runs, number, measured) as spreads,
    ):
        noise = find_noise(ours, plain, floor)
        names = [entry.name for entry in noise]
        if spreads is not None:
            noise += tuple(entry for entry in spreads.find_noise(plain) if entry.name not in names)
        unused = find_unused(ours, plain)
        left_out = [*(entry.name for entry in noise), *unused]
        rounded = measured.rounded
        trained = _compare_trained(runs, number, (ours, plain), left_out, spreads, with_rounding=rounded)
        buffers = compare_buffers(ours, plain, max(tolerance, trained.tolerance), trained.buffers, spreads)
        checks = (
            compare_initial(ours, plain, unused),
            compare_gradients(ours, plain, names, _gradient_tolerance(runs, tolerance), spreads),
            *((compare_noise(ours, plain, names, floor),) if names else ()),
            *trained.checks,
            *((buffers,) if buffers.compared else ()),
        )
    return _OfIsland(checks, (*noise, *trained.noise), unused, trained.rounding, trained.tolerance)


@contextmanager
def _open_draws(runs: Runs, island: int, measured: _Measured) -> Iterator[Spreads | None]:
    """What the runs have left whose operators round once more; None: there are none."""
    with ExitStack() as stack:
        yield (
            Spreads(
                [
                    stack.enter_context(open_run(capture_dir_of(draw, island), 1, averages=runs.averages))
                    for draw in runs.drawn
                ],
                runs.arithmetic,
            )
            if measured.drawn
            else None
        )


def _near_in(check: Check) -> tuple[str, ...]:
    """Return the buffers that differ by no more than rounding could ever explain, on every rank."""
    far = {failure.name for failure in check.failures if (failure.relative or math.inf) > LARGEST_TOLERANCE}
    return tuple(sorted({failure.name for failure in check.failures} - far))


def _require_an_update(plain: Sequence[StepMetrics]) -> None:
    if plain and all(step.skipped for step in plain):
        raise RunFailedError(
            f"gradients overflow in all {len(plain)} steps of the plain run: there is nothing to compare",
            hint="Train more --steps, until the loss scale is low enough, or set a smaller train.loss_scale.",
        )


@dataclass(frozen=True)
class _Trained:
    """What was found of the parameters after the last step: the checks, the elements set aside, how far
    rounding moves them where that was needed, the tolerance that came of it, and the buffers that were
    compared with what rounding does to them.
    """

    checks: tuple[Check, ...]
    noise: tuple[Noise, ...]
    rounding: float | None
    tolerance: float
    buffers: tuple[str, ...]


def _compare_trained(
    runs: Runs,
    island: int,
    both: tuple[CapturedRun, CapturedRun],
    left_out: Sequence[str],
    spreads: Spreads | None,
    *,
    with_rounding: bool,
) -> _Trained:
    """Compare final parameters, and averages; by what rounding alone does, only where they differ by more
    than the tolerance, and so the buffers that do.
    """
    ours, plain = both
    is_sharp = runs.arithmetic == "float64"
    tolerance = FINAL_TOLERANCE if is_sharp else TOLERANCE[runs.arithmetic]
    if runs.is_split:
        tolerance = SPLIT_FINAL_TOLERANCE.get(runs.arithmetic, tolerance)
    floor = NOISE_FLOOR[runs.arithmetic]
    final, noise = compare_final(ours, plain, left_out, tolerance, floor, spreads)
    rounding: float | None = None
    values: tuple[Check, ...] = ()
    buffers: tuple[str, ...] = ()
    widest = tolerance
    if with_rounding:
        with open_run(capture_dir_of(runs.rounded, island), 1, averages=runs.averages) as rounded:
            if not final.passed:
                rounding = largest_change(rounded, plain, left_out, floor if is_sharp else 0.0)
                widest = widened(tolerance, rounding)
                final, noise = compare_final(ours, plain, left_out, widest, floor, spreads)
            if is_sharp:
                all_buffers = compare_buffers(ours, plain, max(TOLERANCE[runs.arithmetic], widest))
                buffers = _near_in(all_buffers)
                values = compare_moved_by_noise(ours, plain, rounded, tolerance, floor, buffers)
    average = compare_average(ours, plain, left_out, widest, floor, spreads)
    return _Trained((final, *average, *values), noise, rounding, widest, buffers)


def _gradient_tolerance(runs: Runs, tolerance: float) -> float:
    """Tensor parallelism rounds once more, which shows where numbers have few bits."""
    return SPLIT_GRADIENT_TOLERANCE.get(runs.arithmetic, tolerance) if runs.is_split else tolerance


Numbers = tuple[float | None, float | None, float | None]  # by the plan, by plain PyTorch, and with noise


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
    """Compare each task's loss, how many samples it is of, and its metrics; relative to the plain run's.

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
    last, moved, draws = _by_task(plan), _by_task(rounded), [_by_task(draw) for draw in drawn]
    for expected in plain:
        evaluation, where = last.get(expected.task), f"after step {expected.step}"
        name = f"evaluation of {expected.task}"
        problem = _mismatch(evaluation, expected)
        if evaluation is None or problem is not None:
            tally.add(Difference(name=name, where=where, problem=problem))
            continue
        noisy = moved.get(expected.task, expected)
        of_draws = [draw.get(expected.task) for draw in draws]
        for key, (ours, theirs, by_noise) in _numbers(evaluation, expected, noisy, metrics=metrics):
            may = widened(tolerance, _difference(key, where, by_noise, theirs).relative or 0.0)
            difference = _difference(f"{name}: {key}", where, ours, theirs)
            if draws and key == "loss":
                rounding = _rounding_of_loss(of_draws, expected.loss)
                difference = difference.model_copy(update={"rounding": rounding})
                explained = (difference.relative or math.inf) <= min(FACTOR * rounding, most)
                tally.add(difference, may, explained=explained)
            else:
                tally.add(difference, may)
    return tally.check()


def _by_task(evaluations: Iterable[Evaluation]) -> dict[str, Evaluation]:
    """Return the last evaluation of each task."""
    return {evaluation.task: evaluation for evaluation in evaluations}


def _mismatch(evaluation: Evaluation | None, expected: Evaluation) -> str | None:
    """Say that an evaluation by the plan is missing, or of other samples or another step than expected."""
    if evaluation is None:
        return "missing under the plan"
    if (evaluation.step, evaluation.num_samples) == (expected.step, expected.num_samples):
        return None
    return (
        f"of {evaluation.num_samples} samples after step {evaluation.step} under the plan, "
        f"of {expected.num_samples} in plain PyTorch"
    )


def _numbers(
    by_plan: Evaluation, plain: Evaluation, noisy: Evaluation, *, metrics: bool
) -> Iterator[tuple[str, Numbers]]:
    """Yield what is compared of evaluations: the loss, and each of the metrics that one of them has."""
    yield "loss", (by_plan.loss, plain.loss, noisy.loss)
    for metric in sorted({*by_plan.metrics, *plain.metrics}) if metrics else ():
        yield metric, (by_plan.metrics.get(metric), plain.metrics.get(metric), noisy.metrics.get(metric))


def _rounding_of_loss(draws: Sequence[Evaluation | None], loss: float) -> float:
    """Return how far runs that round once more are from a loss, at most; 0 where that is not known of all."""
    relative = [_difference("", "", None if draw is None else draw.loss, loss).relative for draw in draws]
    return 0.0 if None in relative else max(size or 0.0 for size in relative)


def _difference(name: str, where: str, ours: float | None, theirs: float | None) -> Difference:
    if ours == theirs or all(value is not None and math.isnan(value) for value in (ours, theirs)):
        return Difference(name=name, where=where, relative=0.0)
    if ours is None or theirs is None or not (math.isfinite(ours) and math.isfinite(theirs)):
        return Difference(name=name, where=where, problem=f"{ours} under the plan, {theirs} in plain PyTorch")
    return Difference(name=name, where=where, relative=abs(ours - theirs) / max(abs(theirs), _SMALLEST))


def together(by_island: Sequence[Sequence[Check]]) -> tuple[Check, ...]:
    """Join the checks of all islands, each kind of comparison once.

    Args:
        by_island: its checks; each kind once, in one order.
    """
    if len(by_island) == 1:
        return tuple(by_island[0])
    kinds = dict.fromkeys(check.what for checks in by_island for check in checks)
    numbered = [(number, check) for number, checks in enumerate(by_island) for check in checks]
    return tuple(
        _joined([numbered_check for numbered_check in numbered if numbered_check[1].what == kind])
        for kind in kinds
    )


def _joined(numbered: Sequence[tuple[int, Check]]) -> Check:
    named = [_of_island(difference, number) for number, check in numbered if (difference := check.largest)]
    compared = [difference for difference in named if difference.relative is not None]
    return numbered[0][1].model_copy(
        update={
            "compared": sum(check.compared for _, check in numbered),
            "tolerance": max(check.tolerance for _, check in numbered),
            "largest": max(compared, key=lambda difference: difference.relative or 0.0, default=None),
            "failures": tuple(
                _of_island(difference, number) for number, check in numbered for difference in check.failures
            ),
            "explained": tuple(
                _of_island(difference, number) for number, check in numbered for difference in check.explained
            ),
        }
    )


def _of_island(difference: Difference, number: int) -> Difference:
    return difference.model_copy(update={"where": f"island {number}, {difference.where}"})


def compare_losses(plan: Sequence[StepMetrics], plain: Sequence[StepMetrics], tolerance: float) -> Check:
    """Return the total and every task's loss of every step; relative to the plain run's. Of a step that both
    runs skipped a loss may be no finite number in both.
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
        tally.add(_loss_difference("loss", where, ours.loss, theirs.loss, 0.0, may_be_broken=both))
        smallest = abs(theirs.loss) * SMALLEST_SHARE
        for name in sorted({*ours.task_losses, *theirs.task_losses}):
            pair = ours.task_losses.get(name, math.nan), theirs.task_losses.get(name, math.nan)
            tally.add(_loss_difference(f"loss of {name}", where, *pair, smallest, may_be_broken=both))
    return tally.check()


def compare_scales(plan: Sequence[StepMetrics], plain: Sequence[StepMetrics]) -> Check:
    """Return the loss scale of every step, and whether it was too large; steps that one run lacks are named
    with the losses.
    """
    tally = Tally("loss scales", 0.0)
    for ours, theirs in zip(plan, plain, strict=False):
        where = f"step {theirs.step}"
        if ours.loss_scale is None or theirs.loss_scale is None or ours.skipped is not theirs.skipped:
            said = f"{_told(ours)} under the plan, {_told(theirs)} in plain PyTorch"
            tally.add(Difference(name="loss scale", where=where, problem=said))
        else:
            tally.add(_loss_difference("loss scale", where, ours.loss_scale, theirs.loss_scale, 0.0))
    return tally.check()


def skip_alike(first: Sequence[StepMetrics], second: Sequence[StepMetrics]) -> bool:
    """Whether two runs have skipped the same steps: else the first gradients of each are of another batch."""
    return [step.skipped for step in first] == [step.skipped for step in second]


def _told(metrics: StepMetrics) -> str:
    if metrics.loss_scale is None:
        return "none"
    return f"{metrics.loss_scale:g}, {'skipped' if metrics.skipped else 'not skipped'}"


def _loss_difference(
    name: str, where: str, ours: float, theirs: float, smallest: float, *, may_be_broken: bool = False
) -> Difference:
    """`may_be_broken`: both may be no finite numbers."""
    if may_be_broken and not (math.isfinite(ours) or math.isfinite(theirs)):
        return Difference(name=name, where=where, relative=0.0)
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return Difference(name=name, where=where, problem=f"{ours} under the plan, {theirs} in plain PyTorch")
    gap, size = abs(ours - theirs), max(abs(theirs), smallest)
    return Difference(name=name, where=where, relative=gap / size if size > 0 else float(gap > 0))
