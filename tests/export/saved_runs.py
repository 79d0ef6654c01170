"""Runs with one checkpoint, of a workload whose tensors have been changed, without training them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from torch import Tensor
from torch.distributed import checkpoint as dcp

from helpers.analysed import analysed
from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.checkpoint.index import Checkpoint, Region, buffer_key, model_key
from spindle_cli.checkpoint.tensors import HeldTensors, plain_errors
from spindle_cli.runtime.saving.checkpoint_writer import PartsSavePlanner, ShardWriter
from spindle_cli.workload.building.load import load
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import ParameterTable


def doubled(name: str, value: Tensor) -> Tensor:
    """What training is here."""
    return value * 2 + 1


def save_run(
    folder: Path,
    model: str,
    trained: Callable[[str, Tensor], Tensor] = doubled,
    cut: frozenset[str] = frozenset(),
    **content: object,
) -> Path:
    """A run with its checkpoint after step 1, and its workload file beside it; its folder.

    Args:
        model: as the workload file has it. `content`: more of that file.
        trained: the values of every parameter and buffer that some op uses, from its initial ones.
        cut: tensors that are saved in two parts.
    """
    source = folder / "workload.yaml"
    source.write_text(yaml.safe_dump({"schema": "spindle.workload/1", "model": model, **content}))
    graph = analysed(load(str(source)).workload)
    table = ParameterTable.of(graph)
    held = HeldTensors()
    with torch.no_grad():
        for tensors, key_of in ((table.parameters, model_key), (table.buffers, lambda n: buffer_key(n, 0))):
            for name, tensor in tensors.items():
                if not table.users[name]:
                    continue
                value = trained(name, tensor)
                if name in cut:
                    half = len(value) // 2
                    for first, last in ((0, half), (half, len(value))):
                        region = Region.whole(value.shape).within(0, first, last)
                        held.add_part(key_of(name), tuple(value.shape), region, value[first:last].clone())
                else:
                    held.add(key_of(name), value)
    draft = Checkpoint(
        step=1, plan_sha256="", workload=str(source), train=TrainSettings(), aliases=table.aliases
    )
    writer = ShardWriter(checkpoint_folder(folder / "run", 1), 0, lambda: draft, 1)
    with plain_errors():
        dcp.save({}, storage_writer=writer, planner=PartsSavePlanner(held.by_name(), {}))
    return folder / "run"
