"""A difference beyond the tolerance passes where plain PyTorch's own rounding makes as large a one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from reports import report_of
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from spindle_cli.files.request import capture_path
from spindle_cli.files.runs.records import Evaluation
from spindle_cli.verify.compare import compare_evaluations, operators_may_explain
from spindle_cli.verify.comparing.captured import CapturedRun, open_run
from spindle_cli.verify.comparing.parameters import compare_buffers, compare_final, compare_gradients
from spindle_cli.verify.comparing.spread import Spreads
from spindle_cli.verify.show import render_report
from spindle_cli.verify.stepping.operator_noise import OperatorNoise
from spindle_cli.verify.types import ArithmeticName, Check, Difference, What

W = torch.linspace(1, 2, 8)
Run = Mapping[str, Tensor]


@contextmanager
def opened(
    folder: Path, runs: Sequence[Run], gradients: Sequence[Run], dtype: ArithmeticName = "float32"
) -> Iterator[tuple[CapturedRun, CapturedRun, Spreads]]:
    """The plan's run, the plain one, and draws; each has the same tensors in all stages but the gradients."""
    with ExitStack() as stack:
        found = []
        for number, (run, gradient) in enumerate(zip(runs, gradients, strict=True)):
            where = folder / str(number)
            where.mkdir()
            for stage in ("initial", "final", "initial-buffers", "final-buffers"):
                save_file({name: each.clone() for name, each in run.items()}, capture_path(where, stage, 0))  # type: ignore[arg-type]
            save_file(dict(gradient), capture_path(where, "gradients", 0))
            found.append(stack.enter_context(open_run(where, 1)))
        yield found[0], found[1], Spreads(found[2:], dtype)


def moved(by: float, element: int = 0) -> Tensor:
    tensor = W.clone()
    tensor[element] += by
    return tensor


def gradient_check(
    folder: Path, ours: Tensor, *draws: Tensor, most: ArithmeticName = "float32"
) -> tuple[Check, CapturedRun]:
    runs = [{"w": each} for each in (ours, W, *draws)]
    with opened(folder, runs, runs, most) as (plan, plain, spreads):
        return compare_gradients(plan, plain, (), 1e-5, spreads), plain


@pytest.mark.parametrize(
    ("by", "draws", "passes"),
    [
        (1e-4, (moved(1.5e-4),), True),
        (1e-4, (moved(1.1e-4),), True),
        (1e-4, (moved(0.9e-4),), False),
        (1e-4, (moved(1e-6), moved(1.5e-4), moved(0.0)), True),  # the largest counts
        (1e-4, (W + 0.9e-4,), False),  # larger by norm, and smaller in the largest element
        (1e-4, (), False),
        (1e-4, (moved(math.nan), moved(1.0)), False),
        (1e-2, (moved(2e-2),), False),  # rounding excuses no more than a thousandth in float32
    ],
)
def test_a_gradient_may_differ_by_what_a_draw_moves(
    tmp_path: Path, by: float, draws: tuple[Tensor, ...], passes: bool
) -> None:
    check, _ = gradient_check(tmp_path, moved(by), *draws)
    assert check.passed == passes
    (difference,) = check.explained or check.failures
    assert difference.relative == pytest.approx(by / 2, rel=1e-2)


def test_many_elements_may_not_each_differ_by_what_one_does(tmp_path: Path) -> None:
    check, _ = gradient_check(tmp_path, W + 1e-4, moved(1.2e-4))
    assert [str(each) for each in check.failures] == [
        "w (rank 0): relative difference 5.00e-05 (plain PyTorch's own rounding: 6.00e-05)"
    ]


def test_low_precision_may_explain_a_quarter_and_no_more(tmp_path: Path) -> None:
    for by, passes in ((0.4, True), (0.6, False)):
        (tmp_path / str(by)).mkdir()
        check, _ = gradient_check(tmp_path / str(by), moved(by), moved(1.0), most="bf16-autocast")
        assert check.passed == passes


def test_where_low_precision_is_measured_its_tolerance_hides_no_more_than_rounding(tmp_path: Path) -> None:
    """1e-2 is within 3e-2: so a stale parameter would pass beside what rounding explains."""
    cases: list[tuple[float, ArithmeticName, bool]] = [
        (1e-2, "bf16-autocast", True),
        (1e-3, "bf16-autocast", False),
        (1e-3, "float32", True),
    ]
    for number, (draw, dtype, passes) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        tolerance = 3e-2
        runs = [{"w": each} for each in (moved(2e-2), W, moved(draw))]
        with opened(tmp_path / str(number), runs, runs, dtype) as (plan, plain, spreads):
            assert compare_gradients(plan, plain, (), tolerance).passed
            check = compare_gradients(plan, plain, (), tolerance, spreads)
            assert check.passed == (passes)
            final, _ = compare_final(plan, plain, (), tolerance, 0.0, spreads)
            assert final.passed == check.passed


def test_what_rounding_alone_makes_of_a_gradient_may_differ_wholly_and_its_value_is_set_aside(
    tmp_path: Path,
) -> None:
    """5e-6 of the model's largest gradient: above the floor, and another number in every draw."""
    values = [{"w": W, "zero": torch.full((8,), each)} for each in (3.0, 1.0, 2.0)]
    noise = [{"w": W, "zero": torch.full((8,), each)} for each in (-1e-5, 1e-5, -2e-5)]
    with opened(tmp_path, values, noise) as (plan, plain, spreads):
        assert not compare_gradients(plan, plain, (), 1e-5).passed
        check = compare_gradients(plan, plain, (), 1e-5, spreads)
        assert [each.name for each in check.explained] == ["zero"] and check.passed
        assert [(each.name, each.left_out) for each in spreads.find_noise(plain)] == [("zero", 8)]
    large = [{"w": W, "zero": 1e3 * each["zero"]} for each in noise]
    (tmp_path / "large").mkdir()
    with opened(tmp_path / "large", values, large) as (plan, plain, spreads):
        assert not compare_gradients(plan, plain, (), 1e-5, spreads).passed
        assert not spreads.find_noise(plain)


def test_of_final_parameters_the_elements_with_a_gradient_count(tmp_path: Path) -> None:
    """What moves an element whose gradient is nearly zero is no excuse for its neighbour."""
    gradient = {"w": torch.ones(8)}
    gradient["w"][3] = 1e-5
    for name, draw, passes in (("own", moved(3e-4), True), ("other", moved(3e-4, element=3), False)):
        (tmp_path / name).mkdir()
        runs = [{"w": each} for each in (moved(2e-4), W, draw)]
        with opened(tmp_path / name, runs, [gradient] * 3) as (plan, plain, spreads):
            check, _ = compare_final(plan, plain, (), 1e-5, 1e-6, spreads)
            assert (check.passed, len(check.explained)) == (passes, passes)


def test_a_buffer_may_differ_by_what_a_draw_moves_and_a_count_may_not(tmp_path: Path) -> None:
    runs = [
        {"mean": each, "count": torch.tensor(count)}
        for each, count in ((moved(5e-2), 7), (W, 6), (moved(3e-2), 6))
    ]
    with opened(tmp_path, runs, runs) as (plan, plain, spreads):
        check = compare_buffers(plan, plain, 1e-5, (), spreads)
    assert [each.name for each in check.failures] == ["count"]
    assert [each.name for each in check.explained] == ["mean"]


def test_an_evaluation_may_differ_by_what_a_draw_moves_it() -> None:
    def evaluation(loss: float) -> Evaluation:
        return Evaluation(step=3, task="t", num_samples=7, loss=loss, metrics={}, seconds=1.0)

    def passes(loss: float, *draws: float) -> bool:
        drawn = [[evaluation(each)] for each in draws]
        ours, theirs = [evaluation(loss)], [evaluation(1.0)]
        return compare_evaluations(ours, theirs, 1e-5, metrics=False, drawn=drawn, most=1e-3).passed

    assert passes(1 + 1e-4, 1.0, 1 - 2e-4) and not passes(1 + 1e-4, 1 + 4e-5)
    assert not passes(1.1, 1.2) and not passes(1 + 1e-4)
    assert not passes(math.nan, 1.0)


def test_a_rounding_that_cancels_is_told_from_a_sample_that_is_lost(tmp_path: Path) -> None:
    """The bias's gradient is a small difference of large sums: shares of the batch make another rounding."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 16), torch.randn(64, 1)
    y -= y.mean()
    model = nn.Linear(16, 1)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, 2e-4)

    def gradients(shares: Sequence[tuple[int, int]], draw: int | None = None) -> Run:
        model.zero_grad()
        for first, last in shares:
            with OperatorNoise(draw).in_passes() if draw else ExitStack():
                loss = mse_loss(model(x[first:last]), y[first:last], reduction="sum") / 64
                loss.backward()  # type: ignore[no-untyped-call]
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    plain = gradients([(0, 64)])
    draws = [gradients([(0, 64)], draw) for draw in (1, 2, 3)]
    for name, ours in (("split", gradients([(0, 27), (27, 64)])), ("lost", gradients([(0, 27), (27, 63)]))):
        (tmp_path / name).mkdir()
        runs = [ours, plain, *draws]
        with opened(tmp_path / name, runs, runs) as (plan, theirs, spreads):
            assert not compare_gradients(plan, theirs, (), 1e-5).passed
            assert compare_gradients(plan, theirs, (), 1e-5, spreads).passed == (name == "split")


def test_what_a_norm_loses_in_low_precision_is_told_from_what_a_plan_loses(tmp_path: Path) -> None:
    """The norm's own gradients are off by percents where its rows are added up in bfloat16."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 400, 16), torch.randint(0, 16, (8, 400))
    norm = nn.LayerNorm(16)
    model = nn.Sequential(nn.Linear(16, 16), norm, nn.Linear(16, 16))

    def gradients(*ends: int, draw: int | None = None, lost_sum: bool = False, labels: Tensor = y) -> Run:
        model.zero_grad()
        for first, last in pairwise((0, *ends)):
            before = None if norm.weight.grad is None else norm.weight.grad.clone()
            with OperatorNoise(draw).in_passes() if draw else ExitStack():
                with torch.autocast("cpu", torch.bfloat16):
                    scores = model(x[first:last]).flatten(0, 1)
                    loss = cross_entropy(scores, labels[first:last].flatten(), reduction="sum") / y.numel()
                loss.backward()  # type: ignore[no-untyped-call]
            if lost_sum and before is not None:
                norm.weight.grad = before
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    plain, draws = gradients(8), [gradients(8, draw=draw) for draw in (1, 2, 3)]
    right = gradients(3, 6, 8)
    for name, ours in {
        "right": right,
        "a sample is lost": gradients(3, 6, 7),
        "labels are of the next place": gradients(3, 6, 8, labels=y.roll(1, 1)),
        "a sum is lost": gradients(3, 6, 8, lost_sum=True),
        "a factor is lost": {name: 3 * each for name, each in right.items()},
    }.items():
        (tmp_path / name).mkdir()
        runs = [ours, plain, *draws]
        with opened(tmp_path / name, runs, runs, "bf16-autocast") as (plan, theirs, spreads):
            assert not compare_gradients(plan, theirs, (), 3e-2).passed
            assert compare_gradients(plan, theirs, (), 3e-2, spreads).passed == (name == "right"), name


@pytest.mark.parametrize(
    ("what", "dtype", "relative", "may"),
    [
        ("gradients of step 1", "float32", 1e-4, True),
        ("final parameters", "bf16-autocast", 1e-1, True),
        ("gradients of step 1", "float32", 1e-1, False),
        ("buffers", "float32", 1e-2, True),
        ("gradients of step 1", "float64", 1e-8, False),
        ("losses", "float32", 1e-4, False),
        ("gradients of step 1", "float32", None, False),
    ],
)
def test_rounding_is_measured_where_it_could_explain_all_that_differs(
    what: What, dtype: ArithmeticName, relative: float | None, may: bool
) -> None:
    off = Difference(name="w", where="rank 0", relative=relative, problem=None if relative else "missing")
    assert operators_may_explain(report_of(what, (off,), dtype)) == may


def test_what_rounding_explains_is_listed_with_its_figure() -> None:
    off = Difference(name="w", where="rank 0", relative=9.9e-5, rounding=2.4e-4)
    report = report_of("gradients of step 1", (), explained=(off,)).model_copy(update={"draws": 3})
    console = Console(record=True, width=200)
    console.print(render_report(report))
    said = console.export_text()
    assert "ok, rounding" in said and "trained 3 times more" in said
    assert "w (rank 0): relative difference 9.90e-05 (plain PyTorch's own rounding: 2.40e-04)" in said
