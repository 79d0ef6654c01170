"""The paper's workloads: sizes as published, structure as described, arguments refused with their choices."""

from __future__ import annotations

from pathlib import Path

import paper_profiles
import pytest
import torch
from torch.utils.data import default_collate

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.file import WorkloadFile
from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo import multitask_clip, ofasys, qwen_val

LAPTOP = {
    "clip-10": lambda: multitask_clip.build(tasks=10, size="laptop"),
    "ofasys-7": lambda: ofasys.build(tasks=7, size="laptop"),
    "qwen-val": lambda: qwen_val.build(size="laptop"),
}


def tasks_of(workload: Workload) -> list[Task]:
    return [task for task in workload.tasks if isinstance(task, Task)]


def num_parameters(workload: Workload) -> int:
    distinct = {id(p): p.numel() for task in tasks_of(workload) for p in task.module.parameters()}
    return sum(distinct.values())


def one_loss(task: Task, samples: int = 4) -> torch.Tensor:
    batch = default_collate([task.dataset[index] for index in range(samples)])
    loss: torch.Tensor = task.module(**batch)
    return loss


@pytest.mark.parametrize("tasks", [4, 7, 10])
def test_clip_has_the_published_number_of_parameters(tasks: int) -> None:
    with torch.device("meta"):
        assert num_parameters(multitask_clip.build(tasks=tasks)) == pytest.approx(1.20e9, rel=0.01)


def test_ofasys_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        assert num_parameters(ofasys.build(tasks=7)) == pytest.approx(0.66e9, rel=0.02)
        assert num_parameters(ofasys.build(tasks=4)) == pytest.approx(0.66e9, rel=0.06)


def test_qwen_val_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        assert num_parameters(qwen_val.build()) == pytest.approx(9.25e9, rel=0.01)


def test_clip_encoders_see_as_many_tokens_as_imagebinds() -> None:
    with torch.device("meta"):
        tasks = {task.name: task.module for task in tasks_of(multitask_clip.build(tasks=10))}
    published = {"vision": 257, "text": 77, "audio": 229, "thermal": 197, "depth": 197, "motion": 251}
    for modality, tokens in published.items():
        task = next(module for name, module in tasks.items() if modality in name.split("_"))
        assert task.get_submodule(modality).position.shape[0] == tokens


@pytest.mark.parametrize("name", LAPTOP)
def test_tasks_share_components_and_every_parameter_learns(name: str) -> None:
    torch.manual_seed(0)
    workload = LAPTOP[name]()
    assert num_parameters(workload) < 2_000_000
    for task in tasks_of(workload):
        loss = one_loss(task)
        assert loss.shape == () and torch.isfinite(loss)
        loss.backward()
    per_task = [{id(p) for p in task.module.parameters()} for task in tasks_of(workload)]
    for index, own in enumerate(per_task):
        others = set().union(*(ids for other, ids in enumerate(per_task) if other != index))
        assert own & others, "a task that shares nothing"
    for task in tasks_of(workload):
        for parameter_name, parameter in task.module.named_parameters():
            assert parameter.grad is not None and parameter.grad.any(), f"{task.name}: {parameter_name}"


@pytest.mark.parametrize("name", ["ofasys-7", "qwen-val"])
def test_losses_other_than_contrastive_are_means_over_samples(name: str) -> None:
    torch.manual_seed(0)
    workload = LAPTOP[name]()
    for task in tasks_of(workload):
        items = [task.dataset[index] for index in range(4)]
        whole = task.module(**default_collate(items))
        halves = [task.module(**default_collate(items[k : k + 2])) for k in (0, 2)]
        torch.testing.assert_close(whole, torch.stack(halves).mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAPTOP)
def test_items_depend_on_their_index_alone(name: str) -> None:
    for task in tasks_of(LAPTOP[name]()):
        first, again, other = task.dataset[7], task.dataset[7], task.dataset[8]
        assert first.keys() == other.keys()
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert not any(torch.equal(first[key], other[key]) for key in first)


def test_batch_sizes_can_be_chosen_per_task() -> None:
    workload = qwen_val.build(size="laptop", batch_sizes={"audio_language": 6})
    sizes = {task.name: task.batch_size for task in tasks_of(workload)}
    assert sizes == {"vision_language": 16, "audio_language": 6, "vision_audio_language": 8}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (
            lambda: multitask_clip.build(tasks=11, size="laptop"),
            "multitask_clip: tasks: found 11, expected one of 1, 2",
        ),
        (lambda: ofasys.build(tasks=0, size="laptop"), "ofasys: tasks: found 0"),
        (lambda: qwen_val.build(size="huge"), "qwen_val: size: found 'huge', expected one of paper, laptop"),
        (
            lambda: qwen_val.build(size="laptop", batch_sizes={"smell": 4}),
            "qwen_val: batch_sizes: found 'smell', expected one of vision_language",
        ),
    ],
)
def test_wrong_arguments_are_refused_with_the_choices(build, expected: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WorkloadError) as refused:
        build()
    assert expected in str(refused.value)


def test_benchmarks_on_more_devices_have_larger_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper_profiles, "FOLDER", tmp_path)
    source = paper_profiles.ROOT / "configs" / "workloads" / "clip-4-laptop.yaml"
    scaled = WorkloadFile.read(paper_profiles._scaled(source, "clip-4-laptop", 4))
    before = {
        task.name: task.batch_size for task in multitask_clip.build(**WorkloadFile.read(source).args).tasks
    }
    after = {task.name: task.batch_size for task in multitask_clip.build(**scaled.args).tasks}
    assert after == {name: 4 * size for name, size in before.items()}
