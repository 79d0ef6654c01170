"""Whatever the plan, workers train the same model as a plain loop: losses, gradients, updated parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import runtime_toys
from case_runs import Case, captured, dtype_of, marked
from plain_loop import PlainRun, train_plainly
from runtime_cases import CLIPPED, EXACT_ON_FOUR, EXACT_ON_TWO, OWN_NOISE
from torch import Tensor

from helpers.analysed import analysed
from spindle_cli.files.run_files import PREDICTED_FILE, PredictedVsMeasured, read_metrics

pytestmark = pytest.mark.processes

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Equal to `tolerance` of the tensor's largest element (or of 1e-3: what is smaller is rounding)."""
    scale = max(expected.abs().max().item(), 1e-3)
    return (found - expected).abs().max().item() <= tolerance * scale


def check_against(plain: PlainRun, case: Case, num_workers: int, folder: Path) -> None:
    tolerance = TOLERANCE[case.dtype]
    metrics = list(read_metrics(folder))
    assert [line.step for line in metrics] == list(range(1, case.steps + 1))
    for line, expected in zip(metrics, plain.losses, strict=True):
        assert line.task_losses == pytest.approx(expected, rel=tolerance), case.name
    gradients = captured(folder, "gradients", num_workers)
    assert {name for rank in gradients for name in rank} == set(plain.gradients), case.name
    final = captured(folder, "final", num_workers)
    for found, expectation in ((gradients, plain.gradients), (final, plain.final)):
        for rank, tensors in enumerate(found):
            for name, tensor in tensors.items():
                assert close(tensor, expectation[name], tolerance), f"{case.name}: {name} on rank {rank}"
    assert PredictedVsMeasured.read(folder / PREDICTED_FILE).steps == case.steps - 1


@pytest.mark.parametrize("case", marked(EXACT_ON_FOUR))
def test_four_workers_train_the_model_of_a_plain_loop(case: Case, four_workers: Path) -> None:
    folder = four_workers / case.name
    check_against(train_plainly(str(folder / "workload.yaml"), case.steps, dtype_of(case)), case, 4, folder)


@pytest.mark.parametrize("case", EXACT_ON_TWO, ids=lambda case: case.name)
def test_two_workers_train_the_model_of_a_plain_loop(case: Case, two_workers: Path) -> None:
    folder = two_workers / case.name
    check_against(train_plainly(str(folder / "workload.yaml"), case.steps, dtype_of(case)), case, 2, folder)


def test_noise_of_a_generator_is_another_in_every_share_and_the_same_when_recomputed(
    two_workers: Path,
) -> None:
    """The loss is the square of `scale` times the noise, and 1000 for each sample that repeats another."""
    folder = two_workers / OWN_NOISE.name
    losses = [line.loss for line in read_metrics(folder)]
    assert len(set(losses)) == OWN_NOISE.steps and max(losses) < 20
    for rank in captured(folder, "gradients", 2):
        for gradient in rank.values():
            assert gradient.item() == pytest.approx(2 * losses[0] / 2.0, rel=1e-9)


def test_the_clipped_case_clips(four_workers: Path) -> None:
    """Its first gradients, as captured before clipping, have a larger norm than its limit."""
    by_name = {
        name: t for rank in captured(four_workers / "clipped", "gradients", 4) for name, t in rank.items()
    }
    norm = sum(tensor.square().sum() for tensor in by_name.values()) ** 0.5
    assert norm > 2 * CLIPPED["clip_norm"]


@pytest.mark.parametrize("case", marked(case for case in EXACT_ON_FOUR if case.name.startswith("random")))
def test_a_worker_holds_the_parameters_of_its_own_ops_alone(case: Case, four_workers: Path) -> None:
    graph = analysed(runtime_toys.build())
    assert callable(case.placements)
    placements = case.placements(graph)
    layer = graph.tasks["pairs"].root.get_submodule("vision.blocks.0")
    layer_size = sum(parameter.numel() for parameter in layer.parameters())
    for rank, held in enumerate(captured(four_workers / case.name, "initial", 4)):
        count = sum(tensor.numel() for name, tensor in held.items() if name.startswith("pairs.vision.blocks"))
        layers = {
            op
            for name, ops, devices in placements
            if name.endswith("/vision") and rank in devices
            for op in range(*ops)
        }
        assert count == len(layers) * layer_size
