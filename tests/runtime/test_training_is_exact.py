"""Whatever the plan, workers train the same model as a plain loop: losses, gradients, updated parameters."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import runtime_toys
from case_runs import ADAMW, STEPS, Case, captured, dtype_of, run_cases
from hand_plans import Placement
from plain_loop import PlainRun, train_plainly
from torch import Tensor

from spindle_cli.run_files import PREDICTED_FILE, PredictedVsMeasured, read_metrics
from spindle_cli.workload.analyse import analyse

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}

# Shares, slices of one MetaOp on different devices, two inputs from different devices, shared parameters of
# tasks on different devices, the same devices in another order.
SCATTERED: tuple[Placement, ...] = (
    ("pairs/vision", (0, 2), (0, 1)),
    ("pairs/text", (0, 2), (2,)),
    ("classify/vision", (0, 3), (3,)),
    ("classify/text", (0, 1), (2, 0)),
    ("pairs/vision", (2, 4), (1, 3, 2, 0)),
    ("pairs/text", (2, 3), (1, 0)),
    ("classify/text", (1, 3), (0, 1, 2)),
    ("classify/vision", (3, 4), (1, 0)),
    ("caption/vision", (0, 1), (3, 2)),
    ("caption/vision", (1, 4), (2,)),
    ("pairs/contrast", (0, 1), (3,)),
    ("classify/mix", (0, 1), (1, 2)),
    ("classify/mix-2", (0, 1), (2, 3, 1)),
    ("caption/layers", (0, 1), (2,)),
    ("caption/layers", (1, 3), (0, 2, 1, 3)),
    ("classify/fuse", (0, 1), (3, 0, 1, 2)),
)
# Every task on devices of its own, as far as there are devices.
BY_TASK: tuple[Placement, ...] = (
    ("pairs/vision", (0, 4), (0,)),
    ("pairs/text", (0, 3), (1,)),
    ("classify/text", (0, 3), (2, 3)),
    ("classify/mix", (0, 1), (3,)),
    ("classify/mix-2", (0, 1), (3,)),
    ("classify/vision", (0, 4), (2,)),
    ("classify/fuse", (0, 1), (2, 3)),
    ("pairs/contrast", (0, 1), (0,)),
    ("caption/vision", (0, 4), (0, 1)),
    ("caption/layers", (0, 3), (1, 0)),
)


def scatter_at_random(seed: int, num_devices: int) -> tuple[Placement, ...]:
    """A random plan: each MetaOp cut at random, each part on random devices in random order."""
    draw = random.Random(seed)
    graph = analyse(runtime_toys.build())
    placements: list[Placement] = []
    for metaop in graph.metaops:
        batch_size = graph.tasks[metaop.task].task.batch_size
        most = 1 if metaop.coupled else num_devices
        degrees = [count for count in range(1, most + 1) if batch_size % count == 0]
        first = 0
        while first < len(metaop.ops):
            last = draw.randint(first + 1, len(metaop.ops))
            devices = draw.sample(range(num_devices), draw.choice(degrees))
            placements.append((metaop.name, (first, last), tuple(devices)))
            first = last
    return tuple(placements)


ON_FOUR = (
    Case("scattered", SCATTERED),
    Case("scattered-float32", SCATTERED, train=ADAMW, dtype="float32"),
    Case("summed-loss", SCATTERED, args={"reduction": "sum"}),
    Case("frozen-tower", SCATTERED, args={"frozen_tower": True}, train=ADAMW),
    Case("by-task", BY_TASK, train=ADAMW),
    Case("all-on-four", (0, 1, 2, 3)),
    *(Case(f"random-{seed}", scatter_at_random(seed, 4), train=ADAMW) for seed in range(6)),
)
ON_TWO = (
    Case("all-on-two", (0, 1), train=ADAMW, dtype="float32"),
    Case("all-on-second", (1,), train={"optimizer": "RMSprop", "lr": 1e-3}),
)


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Equal to `tolerance` of the tensor's largest element (or of 1e-3: what is smaller is rounding)."""
    scale = max(expected.abs().max().item(), 1e-3)
    return (found - expected).abs().max().item() <= tolerance * scale


def check_against(plain: PlainRun, case: Case, num_workers: int, folder: Path) -> None:
    tolerance = TOLERANCE[case.dtype]
    metrics = list(read_metrics(folder))
    assert [line.step for line in metrics] == [1, 2, 3]
    for line, expected in zip(metrics, plain.losses, strict=True):
        assert line.task_losses == pytest.approx(expected, rel=tolerance), case.name
    gradients = captured(folder, "gradients", num_workers)
    assert {name for rank in gradients for name in rank} == set(plain.gradients), case.name
    final = captured(folder, "final", num_workers)
    for found, expectation in ((gradients, plain.gradients), (final, plain.final)):
        for rank, tensors in enumerate(found):
            for name, tensor in tensors.items():
                assert close(tensor, expectation[name], tolerance), f"{case.name}: {name} on rank {rank}"
    assert PredictedVsMeasured.read(folder / PREDICTED_FILE).steps == STEPS - 1


@pytest.mark.processes
@pytest.mark.parametrize(("num_workers", "cases"), [(4, ON_FOUR), (2, ON_TWO)], ids=["four", "two"])
def test_workers_train_the_model_of_a_plain_loop(
    num_workers: int, cases: tuple[Case, ...], tmp_path: Path
) -> None:
    run_cases(cases, num_workers, tmp_path)
    for case in cases:
        folder = tmp_path / case.name
        plain = train_plainly(str(folder / "workload.yaml"), STEPS, dtype_of(case))
        check_against(plain, case, num_workers, folder)
        if not isinstance(case.placements[0], int):
            check_held_parameters(case.placements, num_workers, folder)


def check_held_parameters(placements: tuple[Placement, ...], num_workers: int, folder: Path) -> None:
    """A rank holds the parameters of its own ops and no others."""
    graph = analyse(runtime_toys.build())
    held = captured(folder, "initial", num_workers)
    for rank in range(num_workers):
        count = sum(
            tensor.numel() for name, tensor in held[rank].items() if name.startswith("pairs.vision.blocks")
        )
        layers = {
            op
            for name, ops, devices in placements
            if name.endswith("/vision") and rank in devices
            for op in range(*ops)
        }
        layer = graph.tasks["pairs"].root.get_submodule("vision.blocks.0")
        layer_size = sum(parameter.numel() for parameter in layer.parameters())
        assert count == len(layers) * layer_size
