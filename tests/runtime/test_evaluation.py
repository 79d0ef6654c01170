"""Evaluation by the placement of training: what plain PyTorch finds, and no trace of it in training."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import eval_toys
import pytest
import torch
from alone import run_case, world_of_one
from case_runs import ADAMW, Case, asked_for, captured, marked, run_cases
from eval_cases import EVERY_TWO, ON_FOUR
from mixed_cases import TOYS
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import default_collate

from spindle_cli.errors import RunFailedError, WorkloadError
from spindle_cli.files.run_files import model_path, read_metrics
from spindle_cli.files.runs.records import Evaluation, read_evaluations
from spindle_cli.verify import plain
from spindle_cli.verify.compare import compare_evaluations
from spindle_cli.verify.rounding import RoundingNoise
from spindle_cli.workload.building.load import load
from spindle_cli.workload.types import FlowTask, Task

ALONE = Case("alone", (0,), "eval_toys", train=EVERY_TWO, steps=3)
UNWATCHED = Case("unwatched", (0,), "eval_toys", args={"evaluates": False}, train=EVERY_TWO, steps=3)


@pytest.fixture
def world() -> Iterator[None]:
    with world_of_one():
        yield


def by_plain_torch(source: Path, run_dir: Path, steps: int, num_workers: int) -> dict[str, Evaluation]:
    """What the user's own modules give, with the parameters and buffers that a run has ended with."""
    workload = load(str(source)).workload
    values = load_file(model_path(run_dir, steps))
    for rank in reversed(range(num_workers)):
        values.update(captured(run_dir, "final-buffers", num_workers)[rank])
    found = {}
    for task in workload.all_tasks:
        assert isinstance(task, Task)
        task.module.double()
    for task in workload.all_tasks:
        assert isinstance(task, Task)
        for each in workload.all_tasks:  # what an evaluation changes is put back
            _put(each, values)
        if task.eval_dataset is not None:
            found[task.name] = _plainly(task, steps)
    return found


def _put(task: Task | FlowTask, values: Mapping[str, Tensor]) -> None:
    assert isinstance(task, Task)
    named = (*task.module.named_parameters(), *task.module.named_buffers())
    with torch.no_grad():
        for name, tensor in named:
            if f"{task.name}.{name}" in values:  # else another task, which shares it, comes first
                tensor.copy_(values[f"{task.name}.{name}"])


def _plainly(task: Task, steps: int) -> Evaluation:
    task.module.eval()
    dataset, loss, parts = getattr(task.eval_dataset, "items", task.eval_dataset), 0.0, []
    with torch.no_grad():
        for first in range(0, len(dataset), task.batch_size):
            items = [dataset[index] for index in range(first, min(first + task.batch_size, len(dataset)))]
            batch = {
                name: field.double() if field.is_floating_point() else field
                for name, field in (task.collate or default_collate)(items).items()
            }
            out: Any = task.module(**batch)
            out = out if isinstance(out, dict) else {"loss": out}
            loss += out["loss"].item() * len(items)
            parts.append({key: value for key, value in out.items() if key != "loss" and value.dim() > 0})
    gathered = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    metrics = {name: float(metric(gathered)) for name, metric in task.metrics.items()}
    return Evaluation(
        step=steps,
        task=task.name,
        num_samples=len(dataset),
        loss=loss / len(dataset),
        metrics=metrics,
        seconds=0,
    )


def check_equal(found: Evaluation, expected: Evaluation) -> None:
    assert (found.step, found.num_samples) == (expected.step, expected.num_samples)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12, abs=1e-12)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-12, abs=1e-12)


def test_one_worker_evaluates_as_plain_torch(world: None, tmp_path: Path) -> None:
    request = run_case(ALONE, tmp_path / "alone")
    lines = list(read_evaluations(request.run_dir))
    assert [(line.step, line.task) for line in lines] == [
        (2, "classify"),
        (2, "pairs"),
        (3, "classify"),
        (3, "pairs"),
    ]
    expected = by_plain_torch(request.run_dir / "workload.yaml", request.run_dir, 3, 1)
    for line in lines[2:]:
        check_equal(line, expected[line.task])


def test_one_worker_evaluates_what_it_does_not_train(world: None, tmp_path: Path) -> None:
    case = Case("only", (0,), "only_evaluated_toys", train=EVERY_TWO, steps=3)
    request = run_case(case, tmp_path / "only")
    lines = {line.task: line for line in read_evaluations(request.run_dir) if line.step == 3}
    expected = by_plain_torch(request.run_dir / "workload.yaml", request.run_dir, 3, 1)
    assert list(lines) == ["classify", "pairs", "probe", "across"]
    for task, line in lines.items():
        check_equal(line, expected[task])
    assert not any(
        name.startswith(("probe.", "across.")) for name in load_file(model_path(request.run_dir, 3))
    )


@pytest.mark.parametrize(
    "case",
    [
        Case("only", (0,), "only_evaluated_toys", train=EVERY_TWO, steps=1),
        Case("mixed", (0,), args={"held_out": 5}, steps=1, **{**TOYS, "train": EVERY_TWO}),
    ],
    ids=lambda case: case.name,
)
def test_the_plain_run_of_a_verification_finds_the_same(world: None, tmp_path: Path, case: Case) -> None:
    """All of its evaluations, with tasks in the explicit form and such as are only evaluated; and with noise
    that says how far rounding moves them as many.
    """
    request = run_case(case, tmp_path / "ours", no_randomness=True)
    (tmp_path / "plain").mkdir()
    places = {"run_dir": tmp_path / "plain", "capture_dir": tmp_path / "plain"}
    plain.train(request.model_copy(update=places))
    theirs = list(read_evaluations(tmp_path / "plain"))
    check = compare_evaluations(read_evaluations(request.run_dir), theirs, 1e-11, metrics=True)
    assert check.passed, check.failures
    assert check.compared == sum(1 + len(each.metrics) for each in theirs) > 3
    (tmp_path / "noisy").mkdir()
    places = {"run_dir": tmp_path / "noisy", "capture_dir": tmp_path / "noisy"}
    plain.train(request.model_copy(update=places), RoundingNoise(1e-13))
    assert [each.task for each in read_evaluations(tmp_path / "noisy")] == [each.task for each in theirs]


def same_training(one: Path, other: Path, num_workers: int) -> None:
    for stage in ("final", "final-buffers"):
        for rank in range(num_workers):
            first, second = (captured(folder, stage, num_workers)[rank] for folder in (one, other))
            assert first.keys() == second.keys()
            assert all(torch.equal(first[name], second[name]) for name in first), stage
    losses = [[line.task_losses for line in read_metrics(folder)] for folder in (one, other)]
    assert losses[0] == losses[1]


def test_training_is_bit_for_bit_what_it_is_without_evaluations(world: None, tmp_path: Path) -> None:
    watched, unwatched = (run_case(case, tmp_path / case.name) for case in (ALONE, UNWATCHED))
    assert not list(read_evaluations(unwatched.run_dir))
    same_training(watched.run_dir, unwatched.run_dir, 1)


@pytest.mark.parametrize(
    ("count", "cut"), [(1, {}), (4, {}), (5, {}), (1, {"classify": 2}), (7, {"classify": 2})]
)
def test_any_number_of_samples_is_evaluated(
    world: None, tmp_path: Path, count: int, cut: dict[str, int]
) -> None:
    """Also where micro-batches of the last batch have few samples, or none."""
    args = {"held_out": count, "batch_norms": not cut}
    case = Case("some", (0,), "eval_toys", args=args, train=ADAMW, steps=1, micro_batches=cut, apart=3)
    request = run_case(case, tmp_path / "some")
    expected = by_plain_torch(request.run_dir / "workload.yaml", request.run_dir, 1, 1)
    for line in read_evaluations(request.run_dir):
        assert line.num_samples == count
        check_equal(line, expected[line.task])


READ_APART = {**EVERY_TWO, "loader": {"workers": 2, "prefetch": 1}}


@pytest.mark.parametrize("streams", [False, True])
def test_data_that_another_process_reads_are_evaluated_as_plain_torch(
    world: None, tmp_path: Path, streams: bool
) -> None:
    """Evaluated twice: the second pass begins with the first sample again."""
    train = EVERY_TWO if streams else READ_APART
    case = Case("apart", (0,), "eval_toys", args={"streams": streams}, train=train, steps=3)
    request = run_case(case, tmp_path / "apart")
    expected = by_plain_torch(request.run_dir / "workload.yaml", request.run_dir, 3, 1)
    lines = list(read_evaluations(request.run_dir))
    assert [(line.step, line.num_samples) for line in lines] == [(2, 11), (2, 11), (3, 11), (3, 11)]
    for line in lines[2:]:
        check_equal(line, expected[line.task])
    unwatched = run_case(UNWATCHED, tmp_path / "unwatched")
    if streams:  # else the loaders of training are others, too
        same_training(request.run_dir, unwatched.run_dir, 1)


MIXED = {**TOYS, "train": EVERY_TWO}


@pytest.mark.parametrize(
    ("task", "streams", "percentile", "train"),
    [
        ("match", False, 100, EVERY_TWO),
        ("write", True, 1, EVERY_TWO),
        ("write", False, 50, READ_APART),
    ],
    ids=["by index", "streams", "read apart"],
)
def test_batches_of_other_lengths_are_evaluated_as_plain_torch(
    world: None, tmp_path: Path, task: str, streams: bool, percentile: float, train: dict[str, Any]
) -> None:
    """Longer and shorter ones than what is planned for, and a last smaller one."""
    args = {"tasks": [task], "held_out": 15, "streams": streams}
    case = Case("mixed", (0,), args=args, percentile=percentile, steps=1, **{**MIXED, "train": train})
    request = run_case(case, tmp_path / "mixed")
    (line,) = read_evaluations(request.run_dir)
    check_equal(line, by_plain_torch(request.run_dir / "workload.yaml", request.run_dir, 1, 1)[task])


def test_results_whose_size_follows_the_length_are_refused_before_training(
    world: None, tmp_path: Path
) -> None:
    args = {"tasks": ["write"], "held_out": 8, "ragged": True}
    with pytest.raises(WorkloadError, match="task 'write': metrics are given one tensor with 'ends'"):
        run_case(Case("ragged", (0,), args=args, **MIXED), tmp_path / "ragged")
    assert not list(read_metrics(tmp_path / "ragged"))


@pytest.mark.parametrize("streams", [False, True])
def test_an_empty_dataset_is_refused(world: None, tmp_path: Path, streams: bool) -> None:
    case = Case("none", (0,), "eval_toys", args={"held_out": 0, "streams": streams}, train=ADAMW, steps=1)
    with pytest.raises(WorkloadError, match="task 'classify': the dataset to evaluate it on is empty"):
        run_case(case, tmp_path / "none")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "build_failing",
            r"the metric 'broken' of task 'classify' failed: KeyError: 'nothing', at .*eval_toys",
        ),
        ("build_tensor", r"the metric 'rows' of task 'classify' gave a Tensor, expected one number"),
    ],
)
def test_a_metric_that_fails_ends_the_run_with_one_message(
    world: None, tmp_path: Path, function: str, message: str
) -> None:
    case = Case("broken", (0,), "eval_toys", function, train=ADAMW, steps=1)
    with pytest.raises(RunFailedError, match=message) as caught:
        run_case(case, tmp_path / "broken")
    if function == "build_failing":
        assert re.search(
            r"gives logits, best, label beside its loss; left out, .*: scale", caught.value.message
        )


LOOKED_AT_BELOW = ("unwatched", "averaged", "averaged-by-replica_groups")


@pytest.fixture(scope="module")
def four(
    forker: socket.socket, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    run_cases(forker, asked_for(ON_FOUR, pytestconfig), 4, folder, fails=False)
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("case", marked(case for case in ON_FOUR if case.name not in LOOKED_AT_BELOW))
def test_four_workers_evaluate_as_plain_torch(four: Path, case: Case) -> None:
    folder = four / case.name
    lines = {line.task: line for line in read_evaluations(folder) if line.step == case.steps}
    expected = by_plain_torch(folder / "workload.yaml", folder, case.steps, 4)
    assert lines.keys() == expected.keys()
    for task, line in lines.items():
        check_equal(line, expected[task])


@pytest.mark.processes
def test_averages_are_the_same_in_all_replica_groups(four: Path) -> None:
    """As where devices have all of them, and not what was trained last."""
    name = "pairs.other.linear.weight"
    found, expected = (
        captured(four / case, "average", 4) for case in ("averaged-by-replica_groups", "averaged")
    )
    last = captured(four / "averaged", "final", 4)
    for rank in range(4):
        torch.testing.assert_close(found[rank][name], expected[rank][name], rtol=0, atol=1e-9)
        assert (found[rank][name] - last[rank][name]).abs().min() > 1e-6


@pytest.mark.processes
def test_four_workers_train_bit_for_bit_as_without_evaluations(four: Path) -> None:
    same_training(four / "watched", four / "unwatched", 4)
    same_training(four / "only-evaluated", four / "unwatched", 4)


def test_the_last_batch_leaves_a_share_without_samples() -> None:
    assert eval_toys.HELD_OUT % eval_toys.BATCH == 3
