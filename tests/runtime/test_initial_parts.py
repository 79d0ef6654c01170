"""What ranks read of a file of initial values: the bytes of their own parts, and no others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from case_runs import HERE
from hand_plans import place
from safetensors.torch import save_file
from torch import Tensor

from helpers.analysed import analysed
from spindle_cli.files.request import DtypeName, RunRequest
from spindle_cli.plan.types import Plan
from spindle_cli.runtime.part.localise import LocalModel, localise
from spindle_cli.workload.building.load import load
from spindle_cli.workload.initial import tensor_files
from spindle_cli.workload.types import Task

TOYS = HERE.parent / "workload" / "init_toys.py"
CPU = torch.device("cpu")


def saved() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    shapes = {"up.weight": (8, 4), "up.bias": (8,), "down.weight": (4, 8), "down.bias": (4,)}
    return {
        f"{i}.{name}": torch.randn(shape, generator=drawn) for i in range(2) for name, shape in shapes.items()
    }


def parts(
    folder: Path, placements: list[Any], ranks: int, computed_in: DtypeName | None = None, **args: str
) -> tuple[Plan, list[LocalModel]]:
    """What every rank holds, by a plan of these placements."""
    save_file(saved(), folder / "base.safetensors")
    rules = [{"path": "base.safetensors", "names": {"*": "alone.layers.*"}, "round": True}]
    content = {
        "schema": "spindle.workload/1",
        "model": f"{TOYS}:build_split",
        "args": args,
        "init_from": rules,
    }
    source = folder / "workload.yaml"
    source.write_text(yaml.safe_dump(content))
    plan = place(analysed(load(str(source)).workload), ranks, placements)
    request = RunRequest(plan=folder / "plan.yaml", workload=str(source), run_dir=folder, dtype=computed_in)
    return plan, [localise(request, plan, rank, CPU) for rank in range(ranks)]


def halves(name: str, rank: int) -> Tensor:
    """What one of two tensor-parallel ranks has of a tensor."""
    whole, kind = saved()[name], name.partition(".")[2]
    if kind == "down.bias":
        return whole
    return whole[:, 4 * rank : 4 * rank + 4] if kind == "down.weight" else whole[4 * rank : 4 * rank + 4]


def test_a_rank_of_a_tensor_parallel_group_reads_its_half_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    box = tensor_files._box

    def counting(*asked: Any) -> Tensor:
        found = box(*asked)
        read.append(found.numel())
        return found

    save_file(saved(), tmp_path / "base.safetensors")
    placements = [("alone/layers", (0, 2), (0, 1), 2)]
    parts(tmp_path, placements, 2)  # imports and traces
    monkeypatch.setattr(tensor_files, "_box", counting)
    monkeypatch.setattr("spindle_cli.workload.building.load.fill_whole", lambda *_, **__: None)
    _, models = parts(tmp_path, placements, 2)
    for rank, model in enumerate(models):
        found = by_plain_name(model.parameters)
        assert set(found) == set(saved())
        assert all(torch.equal(found[name], halves(name, rank)) for name in found)
    per_rank = 2 * (16 + 4 + 16 + 4)  # of two layers; biases of rowwise maps are whole
    assert sum(read) == 2 * per_rank


def by_plain_name(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("alone.layers.").partition("[")[0]: value for key, value in held.items()}


def test_ranks_read_the_layers_that_they_run(tmp_path: Path) -> None:
    placements = [("alone/layers", (0, 1), (0,)), ("alone/layers", (1, 2), (1,))]
    _, models = parts(tmp_path, placements, 2)
    for rank, model in enumerate(models):
        found = by_plain_name(model.parameters)
        assert set(found) == {name for name in saved() if name.startswith(f"{rank}.")}
        assert all(torch.equal(found[name], saved()[name]) for name in found)


def test_values_are_rounded_to_the_builds_dtype_whatever_a_run_computes_in(tmp_path: Path) -> None:
    """As plain PyTorch has them, which loads before it converts."""
    _, (model,) = parts(tmp_path, [("alone/layers", (0, 2), (0,))], 1, "float64", dtype="bfloat16")
    found = by_plain_name(model.parameters)
    for name, value in saved().items():
        assert found[name].dtype == torch.float64
        assert torch.equal(found[name], value.bfloat16().double())
        assert not torch.equal(found[name], value.double())


def test_what_only_a_task_has_that_is_not_trained_starts_from_its_file_where_it_is_evaluated(
    tmp_path: Path,
) -> None:
    head = {"probe.head.weight": torch.full((1, 4), 7.0), "probe.head.bias": torch.full((1,), 8.0)}
    save_file(head, tmp_path / "head.safetensors")
    missing = {"path": "head.safetensors", "missing": ["*"]}
    content = {"schema": "spindle.workload/1", "model": f"{TOYS}:build_evaluated", "init_from": missing}
    source = tmp_path / "workload.yaml"
    source.write_text(yaml.safe_dump(content))
    graph = analysed(load(str(source)).workload)
    placements = [(metaop.name, (0, len(metaop.ops)), (1,)) for metaop in graph.metaops]
    plan = place(graph, 2, placements)
    request = RunRequest(plan=tmp_path / "plan.yaml", workload=str(source), run_dir=tmp_path)
    for rank in range(2):
        model = localise(request, plan, rank, CPU)
        (task,) = model.graph.workload.evaluated
        assert isinstance(task, Task)
        found = {f"probe.head.{name}": p for name, p in task.module.get_submodule("head").named_parameters()}
        assert not found.keys() & model.parameters.keys()
        if rank == 1:
            assert all(torch.equal(found[name], value) for name, value in head.items())
        assert all(parameter.is_meta == (rank == 0) for parameter in found.values())
