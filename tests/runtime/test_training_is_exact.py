"""Whatever the plan, workers train the same model as a plain loop: losses, gradients, updated parameters."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from hand_plans import Placement, place, whole
from plain_loop import PlainRun, train_plainly
from safetensors.torch import load_file
from torch import Tensor

from spindle_cli.artifact import write_json
from spindle_cli.plan.file import write_plan
from spindle_cli.request import CaptureStage, DtypeName, RunRequest, capture_path
from spindle_cli.run_files import PREDICTED_FILE, PredictedVsMeasured, read_metrics
from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.load import load

HERE = Path(__file__).parent
STEPS = 3


@dataclass(frozen=True)
class Case:
    """A workload, how it is trained, and where its parts run."""

    name: str
    placements: tuple[Placement, ...] | tuple[int, ...]  # (device, ...): all of it on these
    args: tuple[tuple[str, object], ...] = ()
    train: tuple[tuple[str, object], ...] = (("optimizer", "SGD"), ("lr", 0.1))
    dtype: DtypeName = "float64"

    def source(self, folder: Path) -> str:
        path = folder / "workload.yaml"
        content = {
            "schema": "spindle.workload/1",
            "model": f"{HERE / 'runtime_toys.py'}:build",
            "args": dict(self.args),
            "train": dict(self.train),
        }
        path.write_text(yaml.safe_dump(content))
        return str(path)


# Shares, slices of one MetaOp on different devices, two inputs from different devices, shared parameters of
# tasks on different devices, the same devices in another order, devices that are idle in between.
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
"""Every task on devices of its own, as far as there are devices."""
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
ADAM = (("optimizer", "AdamW"), ("lr", 1e-2), ("optimizer_args", {"weight_decay": 0.1}))

ON_FOUR = (
    Case("scattered", SCATTERED),
    Case("scattered-adam", SCATTERED, train=ADAM),
    Case("scattered-float32", SCATTERED, train=ADAM, dtype="float32"),
    Case("summed-loss", SCATTERED, args=(("reduction", "sum"),)),
    Case("frozen-tower", SCATTERED, args=(("frozen_tower", True),), train=ADAM),
    Case("by-task", BY_TASK, train=ADAM),
    Case("all-on-four", (0, 1, 2, 3)),
)
ON_TWO = (
    Case("all-on-two", (0, 1), train=ADAM, dtype="float32"),
    Case("all-on-second", (1,)),
)
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


def prepare(case: Case, num_devices: int, folder: Path) -> RunRequest:
    folder.mkdir()
    source = case.source(folder)
    graph = analyse(load(source).workload)
    scattered = case.placements if isinstance(case.placements[0], tuple) else None
    placements = scattered if scattered else whole(graph, case.placements)  # type: ignore[arg-type]
    write_plan(folder / "plan.yaml", place(graph, num_devices, placements))  # type: ignore[arg-type]
    request = RunRequest(
        plan=folder / "plan.yaml",
        workload=source,
        steps=STEPS,
        run_dir=folder,
        timeout_s=60,
        dtype=case.dtype,
        capture_dir=folder,
    )
    write_json(folder / "request.json", request)
    return request


def run_workers(script: Path, argument: Path, num_workers: int) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_workers}",
    ]
    done = subprocess.run([*command, str(script), str(argument)], capture_output=True, text=True, timeout=120)
    logs = "\n".join(path.read_text()[-3000:] for path in sorted(argument.glob("workers/*.log")))
    assert done.returncode == 0, f"{done.stderr[-2000:]}\n{logs}"


def captured(folder: Path, stage: CaptureStage, num_devices: int) -> dict[str, list[Tensor]]:
    """Every rank's copy of every parameter, by canonical name."""
    found: dict[str, list[Tensor]] = {}
    for rank in range(num_devices):
        for name, tensor in load_file(capture_path(folder, stage, rank)).items():
            found.setdefault(name, []).append(tensor)
    return found


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    scale = max(expected.abs().max().item(), 1e-3)
    return (found - expected).abs().max().item() <= tolerance * scale


def check(case: Case, folder: Path, num_devices: int, plain: PlainRun) -> None:
    tolerance = TOLERANCE[case.dtype]
    metrics = list(read_metrics(folder))
    assert [line.step for line in metrics] == [1, 2, 3]
    for line, expected in zip(metrics, plain.losses, strict=True):
        assert line.task_losses == pytest.approx(expected, rel=tolerance)
    gradients = captured(folder, "gradients", num_devices)
    assert set(gradients) == set(plain.gradients), "the same parameters have a gradient"
    for stage, expectation in (("gradients", plain.gradients), ("final", plain.final)):
        found = captured(folder, stage, num_devices)  # type: ignore[arg-type]
        for name, copies in found.items():
            for copy in copies:
                assert close(copy, expectation[name], tolerance), f"{case.name}: {stage} of {name}"
    assert PredictedVsMeasured.read(folder / PREDICTED_FILE).steps == STEPS - 1


@pytest.mark.processes
@pytest.mark.parametrize(("num_devices", "cases"), [(4, ON_FOUR), (2, ON_TWO)], ids=["four", "two"])
def test_workers_train_the_model_of_a_plain_loop(
    num_devices: int, cases: tuple[Case, ...], tmp_path: Path
) -> None:
    for case in cases:
        prepare(case, num_devices, tmp_path / case.name)
    run_workers(HERE / "many_worker.py", tmp_path, num_devices)
    for case in cases:
        folder = tmp_path / case.name
        plain = train_plainly(str(folder / "workload.yaml"), STEPS, getattr(torch, case.dtype))
        check(case, folder, num_devices, plain)
