"""Each way in which two runs can differ is a failure with the parameter's name and place; rounding is not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spindle_cli.errors import RunFailedError
from spindle_cli.files.request import capture_path
from spindle_cli.files.run_files import StepMetrics
from spindle_cli.verify.compare import compare_losses, compare_scales, skip_alike
from spindle_cli.verify.comparing.captured import CapturedRun, open_run
from spindle_cli.verify.comparing.parameters import (
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

W = torch.linspace(1, 2, 8)
Stages = Mapping[str, Mapping[str, Tensor]]


def stages(final: Mapping[str, Tensor], gradients: Mapping[str, Tensor] | None = None) -> Stages:
    initial = {name: torch.ones_like(tensor) for name, tensor in final.items()}
    given = {name: torch.ones_like(tensor) for name, tensor in final.items()}
    given = given if gradients is None else gradients
    buffers: dict[str, Mapping[str, Tensor]] = {"initial-buffers": {}, "final-buffers": {}}
    return {"initial": initial, "gradients": given, "final": final, **buffers}


@contextmanager
def runs(
    folder: Path, plan: list[Stages], plain: Stages, *, averages: bool = False
) -> Iterator[tuple[CapturedRun, CapturedRun]]:
    """Write and open a plan's run, by rank, and a plain one."""
    for name, ranks in (("plan", plan), ("plain", [plain])):
        (folder / name).mkdir()
        for rank, written in enumerate(ranks):
            for stage, tensors in written.items():
                copies = {key: tensor.clone() for key, tensor in tensors.items()}
                save_file(copies, capture_path(folder / name, stage, rank))  # type: ignore[arg-type]
    with (
        open_run(folder / "plan", len(plan), averages=averages) as ours,
        open_run(folder / "plain", 1, averages=averages) as theirs,
    ):
        yield ours, theirs


def test_rounding_passes_and_what_is_more_does_not(tmp_path: Path) -> None:
    near, far = stages({"w": W * (1 + 5e-6)}), stages({"w": W * (1 + 2e-5)})
    with runs(tmp_path, [near, far], stages({"w": W})) as (plan, plain):
        check, noise = compare_final(plan, plain, (), 1e-5)
    assert (check.compared, len(check.failures), noise) == (2, 1, ())
    assert check.failures[0].where == "rank 1"
    assert check.failures[0].relative == pytest.approx(2e-5, rel=0.05)


def test_initial_values_are_compared_bit_by_bit(tmp_path: Path) -> None:
    off = stages({"w": W})
    off = {**off, "initial": {"w": torch.nextafter(torch.ones(8), torch.zeros(8))}}
    with runs(tmp_path, [stages({"w": W}), off], stages({"w": W})) as (plan, plain):
        check = compare_initial(plan, plain, ())
    assert [failure.where for failure in check.failures] == ["rank 1"]


def test_a_difference_whose_norm_is_too_small_for_a_number_is_one(tmp_path: Path) -> None:
    plain = stages({"w": W.double()})
    off = {**plain, "initial": {"w": torch.tensor([1.0] * 7 + [1e-200], dtype=torch.float64)}}
    whole = {**plain, "initial": {"w": torch.tensor([1.0] * 7 + [2e-200], dtype=torch.float64)}}
    with runs(tmp_path, [whole, off], whole) as (ours, theirs):
        check = compare_initial(ours, theirs, ())
    assert [failure.where for failure in check.failures] == ["rank 1"]


def test_the_largest_failures_come_first(tmp_path: Path) -> None:
    plan = stages({"near": W * 1.1, "far": W * 2, "none": W, "lost": W * math.nan})
    with runs(tmp_path, [plan], stages(dict.fromkeys(("near", "far", "none", "lost"), W))) as (ours, theirs):
        check, _ = compare_final(ours, theirs, (), 1e-5)
    assert [failure.name for failure in check.failures] == ["lost", "far", "near"]


def test_a_parameter_that_one_side_lacks_is_a_failure(tmp_path: Path) -> None:
    with runs(tmp_path, [stages({"w": W, "extra": W})], stages({"w": W, "lost": W})) as (plan, plain):
        check, _ = compare_final(plan, plain, find_unused(plan, plain), 1e-5)
    assert {(failure.name, failure.problem) for failure in check.failures} == {
        ("extra", "missing in plain PyTorch's run"),
        ("lost", "missing in the plan's run"),
    }


def test_what_no_operator_uses_and_nothing_changes_may_be_left_out(tmp_path: Path) -> None:
    plain = stages({"w": W, "unused": torch.ones(3)}, gradients={"w": torch.ones(8)})
    with runs(tmp_path, [stages({"w": W})], plain) as (ours, theirs):
        unused = find_unused(ours, theirs)
        assert unused == ("unused",)
        assert compare_final(ours, theirs, unused, 1e-5)[0].passed


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (W.reshape(2, 4), "float32 of shape (2, 4) under the plan, float32 of shape (8,) in plain PyTorch"),
        (W.double(), "float64 of shape (8,) under the plan, float32 of shape (8,) in plain PyTorch"),
        (W * math.nan, "not finite, or not zero where plain PyTorch's is"),
    ],
)
def test_another_shape_or_type_or_no_number_is_a_failure(
    tmp_path: Path, tensor: Tensor, problem: str
) -> None:
    ours = stages({"w": tensor}, gradients={"w": torch.ones(8)})
    with runs(tmp_path, [ours], stages({"w": W})) as (plan, plain):
        check, noise = compare_final(plan, plain, (), 1e-5)
    assert [failure.problem for failure in check.failures] == [problem]
    assert noise == ()


def test_a_gradient_that_plain_pytorch_has_not_is_a_failure(tmp_path: Path) -> None:
    zero = stages({"w": W}, gradients={"w": torch.zeros(8)})
    with runs(tmp_path, [stages({"w": W})], zero) as (plan, plain):
        check = compare_gradients(plan, plain, (), 1e-5)
    assert not check.passed


def test_elements_with_nearly_no_gradient_may_differ_and_are_counted(tmp_path: Path) -> None:
    gradient = torch.ones(8)
    gradient[3] = 1e-5
    moved = W.clone()
    moved[3] += 1e-3  # a whole step of Adam
    ours, theirs = stages({"w": moved}, {"w": gradient}), stages({"w": W}, {"w": gradient})
    with runs(tmp_path, [ours], theirs) as (plan, plain):
        check, noise = compare_final(plan, plain, (), 1e-5)
    assert check.passed
    assert [(entry.name, entry.left_out, entry.elements) for entry in noise] == [("w", 1, 8)]
    assert noise[0].largest_gradient == pytest.approx(1e-5)


def test_an_element_with_a_gradient_may_not_differ(tmp_path: Path) -> None:
    moved = W.clone()
    moved[3] += 1e-3
    with runs(tmp_path, [stages({"w": moved})], stages({"w": W})) as (plan, plain):
        check, noise = compare_final(plan, plain, (), 1e-5)
    assert not check.passed
    assert noise == ()


def test_a_tensor_of_noise_is_held_to_the_floor(tmp_path: Path) -> None:
    def with_noise(size: float) -> Stages:
        return stages({"w": W, "b": W}, {"w": torch.ones(8), "b": torch.full((8,), size)})

    with runs(tmp_path, [with_noise(-2e-8)], with_noise(3e-8)) as (plan, plain):
        noise = find_noise(plan, plain, 1e-6)
        assert [(entry.name, entry.left_out) for entry in noise] == [("b", 8)]
        assert compare_noise(plan, plain, ["b"], 1e-6).passed
        assert compare_gradients(plan, plain, ["b"], 1e-5).passed


def test_the_floor_is_a_share_of_the_largest_gradient_of_all(tmp_path: Path) -> None:
    def with_noise(size: float) -> Stages:
        return stages({"w": W, "b": W}, {"w": torch.full((8,), 1e-3), "b": torch.full((8,), size)})

    with runs(tmp_path, [with_noise(-6e-10)], with_noise(9e-10)) as (plan, plain):
        assert [entry.name for entry in find_noise(plan, plain, 1e-6)] == ["b"]
        check = compare_noise(plan, plain, ["b"], 1e-6)
    assert check.largest is not None and check.largest.relative == pytest.approx(1.5)
    assert not check.passed


# Of eight elements the first four have a gradient of rounding's size; noise alone moves each of them by 1e-6.
KEYS = torch.tensor([1e-16] * 4 + [0.5] * 4, dtype=torch.float64)
MOVED = torch.tensor([1e-6] * 4 + [0.0] * 4, dtype=torch.float64)


def near_zero(final: Tensor) -> Stages:
    whole = W.double()
    return {
        **stages({"bias": final, "w": whole}, {"bias": KEYS, "w": torch.ones(8, dtype=torch.float64)}),
        "average": {"bias": final, "w": whole},
    }


@pytest.mark.parametrize(
    ("off", "passes_final", "passes_values"),
    [
        (MOVED * -3.9, True, True),  # up to four times what noise does
        (MOVED * 4.1, True, False),  # more: no noise
        (MOVED.flip(0) * 1e-3, False, True),  # the neighbours have a gradient: a missing sum, say
    ],
)
def test_noise_excuses_what_it_explains_and_nothing_beside_it(
    off: Tensor, passes_final: bool, passes_values: bool, tmp_path: Path
) -> None:
    start = torch.zeros(8, dtype=torch.float64) + torch.tensor([0.0] * 4 + [1.0] * 4)
    ours, theirs, moved = near_zero(start + off), near_zero(start), near_zero(start + MOVED)
    (tmp_path / "rounded").mkdir()
    with (
        runs(tmp_path, [ours], theirs, averages=True) as (plan, plain),
        runs(tmp_path / "rounded", [moved], moved, averages=True) as (_, rounded),
    ):
        final, noise = compare_final(plan, plain, (), 1e-12, floor=1e-13)
        (average,) = compare_average(plan, plain, (), 1e-12, floor=1e-13)
        (values,) = compare_moved_by_noise(plan, plain, rounded, 1e-12, 1e-13)
        assert largest_change(rounded, plain, (), 1e-13) == 0
        assert largest_change(rounded, plain, ()) == pytest.approx(1e-6)
    assert (final.passed, average.passed, values.passed) == (passes_final, passes_final, passes_values)
    assert values.compared == 2  # the final value and the average
    assert [(entry.left_out, entry.elements) for entry in noise] == ([(4, 8)] if passes_final else [])


def test_small_gradients_are_set_aside_only_as_far_as_needed(tmp_path: Path) -> None:
    """Elements below the noise floor first; those below a thousandth of the tensor's largest if need be."""
    gradient = torch.tensor([1e-16, 1e-16, 1e-5, 1.0], dtype=torch.float64)
    values = torch.ones(4, dtype=torch.float64)
    moved = values + torch.tensor([1e-9, 0, 0, 0], dtype=torch.float64)
    more = values + torch.tensor([1e-9, 0, 1e-9, 0], dtype=torch.float64)
    for number, (final, left_out) in enumerate([(moved, 2), (more, 3)]):
        (folder := tmp_path / str(number)).mkdir()
        ours, theirs = stages({"w": final}, {"w": gradient}), stages({"w": values}, {"w": gradient})
        with runs(folder, [ours], theirs) as (plan, plain):
            check, noise = compare_final(plan, plain, (), 1e-12, floor=1e-13)
        assert check.passed
        assert [entry.left_out for entry in noise] == [left_out]


def test_a_gradient_that_only_one_side_calls_noise_is_compared(tmp_path: Path) -> None:
    plain_noise = stages({"w": W, "b": W}, {"w": torch.ones(8), "b": torch.full((8,), 3e-8)})
    real = stages({"w": W, "b": W})
    with runs(tmp_path, [real], plain_noise) as (plan, plain):
        assert find_noise(plan, plain, 1e-6) == ()
        assert not compare_gradients(plan, plain, (), 1e-5).passed


def test_a_rank_that_has_not_written_its_tensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    with pytest.raises(RunFailedError, match="rank 0 has not written"), open_run(tmp_path / "plan", 1):
        pass


def test_a_rank_whose_tensors_are_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.initial.safetensors").write_bytes(b"x" * 20)
    with (
        pytest.raises(RunFailedError, match=r"rank-00000\.initial\.safetensors: not what rank 0 has"),
        open_run(tmp_path, 1),
    ):
        pass


def metrics(step: int, loss: float, small: float) -> StepMetrics:
    return StepMetrics(step=step, loss=loss, task_losses={"a": loss, "b": small}, iteration_s=1)


def test_losses_are_compared_by_their_size_or_their_steps() -> None:
    plain = [metrics(1, 2.0, 1e-9), metrics(2, 1.0, 0.5)]
    assert compare_losses([metrics(1, 2.00001, 3e-9), metrics(2, 1.0, 0.5)], plain, 1e-5).passed
    off = compare_losses([metrics(1, 2.0, 1e-9), metrics(2, 1.0, 0.50001)], plain, 1e-5)
    assert [(failure.name, failure.where) for failure in off.failures] == [("loss of b", "step 2")]


def test_a_missing_step_task_or_number_is_a_failure() -> None:
    plain = [metrics(1, 2.0, 1.0), metrics(2, 1.0, 0.5)]
    short = compare_losses(plain[:1], plain, 1e-5)
    assert [failure.problem for failure in short.failures] == ["missing in the plan's run"]
    without_b = StepMetrics(step=1, loss=2.0, task_losses={"a": 2.0}, iteration_s=1)
    assert [failure.name for failure in compare_losses([without_b], plain[:1], 1e-5).failures] == [
        "loss of b"
    ]
    assert not compare_losses([metrics(1, math.nan, 1.0)], plain[:1], 1e-5).passed
    assert not compare_losses([], [], 1e-5).passed  # nothing compared is nothing proved


def with_buffers(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Stages:
    return {**stages({"w": W}), "initial-buffers": before, "final-buffers": after}


def test_every_copy_of_a_buffer_is_compared_and_named(tmp_path: Path) -> None:
    start = {"norm.mean": torch.zeros(8), "norm.seen": torch.tensor(0)}
    plain = with_buffers(start, {"norm.mean": W, "norm.seen": torch.tensor(6)})
    near = with_buffers(start, {"norm.mean": W * (1 + 1e-6), "norm.seen": torch.tensor(6)})
    stale = with_buffers(start, {"norm.mean": W, "norm.seen": torch.tensor(3)})
    with runs(tmp_path, [near, stale], plain) as (ours, theirs):
        check = compare_buffers(ours, theirs, 1e-5)
    assert check.compared == 4
    assert [(each.name, each.where, each.relative) for each in check.failures] == [
        ("norm.seen", "rank 1", 0.5)
    ]


def test_a_buffer_that_no_operator_uses_may_be_left_out_unless_plain_training_changes_it(
    tmp_path: Path,
) -> None:
    start = {"mask": torch.ones(2), "seen": torch.tensor(0)}
    with runs(tmp_path, [stages({"w": W})], with_buffers(start, {**start, "seen": torch.tensor(1)})) as pair:
        check = compare_buffers(*pair, 1e-5)
    assert [(each.name, each.problem) for each in check.failures] == [("seen", "missing in the plan's run")]


def test_a_buffer_that_plain_training_leaves_alone_is_compared_where_a_rank_holds_it(tmp_path: Path) -> None:
    start = {"scale": torch.ones(2)}
    changed = with_buffers(start, {"scale": torch.tensor([1.0, 2.0])})
    with runs(tmp_path, [changed], with_buffers(start, start)) as pair:
        check = compare_buffers(*pair, 1e-5)
    assert [(each.name, each.where) for each in check.failures] == [("scale", "rank 0")]


def scaled(number: int, scale: float | None, skipped: bool | None, loss: float = 1.0) -> StepMetrics:
    return StepMetrics(step=number, loss=loss, iteration_s=1.0, loss_scale=scale, skipped=skipped)


def test_scales_and_skipped_steps_have_to_be_the_same() -> None:
    plain = [scaled(1, 8.0, True), scaled(2, 4.0, False), scaled(3, 4.0, False)]
    assert compare_scales(plain, plain).passed
    assert compare_scales(plain, plain).compared == 3
    ours = [scaled(1, 8.0, False), scaled(2, 8.0, False), scaled(3, None, None)]
    failures = {failure.where: str(failure) for failure in compare_scales(ours, plain).failures}
    assert "8, not skipped under the plan, 8, skipped in plain PyTorch" in failures["step 1"]
    assert "relative difference 1.00e+00" in failures["step 2"]
    assert "none under the plan, 4, not skipped in plain PyTorch" in failures["step 3"]


def test_runs_that_skip_other_steps_are_told_apart() -> None:
    one, other = [scaled(1, 8.0, True), scaled(2, 4.0, False)], [scaled(1, 8.0, False), scaled(2, 8.0, False)]
    assert skip_alike(one, one) and not skip_alike(one, other) and not skip_alike(one, one[:1])


@pytest.mark.parametrize(("ours", "theirs", "same"), [(True, True, True), (False, False, False)])
def test_a_loss_may_be_no_number_in_a_step_that_both_skip(ours: bool, theirs: bool, same: bool) -> None:
    steps = [scaled(1, 8.0, ours, math.inf)], [scaled(1, 8.0, theirs, math.nan)]
    assert compare_losses(*steps, 1e-3).passed == same
    one_alone = [scaled(1, 8.0, True, math.inf)], [scaled(1, 8.0, True, 1.0)]
    assert not compare_losses(*one_alone, 1e-3).passed


@pytest.mark.parametrize(
    ("mean", "seen", "passes"),
    [
        (MOVED * -3.9, 6, True),
        (MOVED * 4.1, 6, False),  # more than noise explains
        (MOVED, 5, False),  # a count is moved by no noise
    ],
)
def test_a_buffer_of_what_noise_moves_is_compared_with_what_noise_does_to_it(
    mean: Tensor, seen: int, passes: bool, tmp_path: Path
) -> None:
    """The running mean behind a layer whose bias has no gradient, as a batch norm takes it away again."""
    start, zeros = torch.tensor([0.0] * 4 + [1.0] * 4, dtype=torch.float64), torch.zeros(8)

    def after(moved: Tensor, count: int) -> Stages:
        kept = {"mean": start + moved, "seen": torch.tensor(count)}
        return {**near_zero(start), "initial-buffers": {"mean": zeros, "seen": zeros}, "final-buffers": kept}

    (tmp_path / "rounded").mkdir()
    noisy = after(MOVED, 6)
    with (
        runs(tmp_path, [after(mean, seen)], after(zeros, 6), averages=True) as (plan, plain),
        runs(tmp_path / "rounded", [noisy], noisy, averages=True) as (_, rounded),
    ):
        (values,) = compare_moved_by_noise(plan, plain, rounded, 1e-12, 1e-13, ("mean", "seen"))
        rest = compare_buffers(plan, plain, 1e-9, ("mean", "seen"))
    assert values.passed == passes
    assert rest.compared == 0
