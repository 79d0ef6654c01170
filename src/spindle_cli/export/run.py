"""`spindle export`: a run's newest checkpoint as one safetensors file that the user's own modules load.

The workload is built as plain PyTorch would build it, the checkpoint's tensors are put into it by name, and
the tasks' state dicts are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from spindle_cli.checkpoint.files import FoundCheckpoint, find_checkpoint
from spindle_cli.checkpoint.names import every_name, model_key
from spindle_cli.checkpoint.reader import CheckpointReader, load_parts
from spindle_cli.checkpoint.tensor_file import TensorSpec
from spindle_cli.checkpoint.tensors import HeldTensors
from spindle_cli.errors import UsageError
from spindle_cli.export.types import Exported
from spindle_cli.runtime.saving.save import write_model
from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.building.load import load
from spindle_cli.workload.parameters import ParameterTable


def export_run(run_dir: Path, output: Path, *, task: str | None, workload: str | None) -> Exported:
    """Write a run's model.

    Args:
        run_dir: the run's folder.
        output: the file. Its keys are those of the tasks' `state_dict()`: `<task>.<dotted name>`, a shared
            parameter under each of its names; with `task`, that task's alone and without its name.
        workload: where the workload is, if not where the run found it.

    Raises:
        InputError: the run has no whole checkpoint, or it is not of this workload; the file cannot be
            written.
        WorkloadError: the workload cannot be built.
        UsageError: there is no such task.
    """
    found = find_checkpoint(run_dir, reads_all=True)
    modules = trained_modules(found, workload or found.checkpoint.workload)
    if task is not None and task not in modules:
        raise UsageError(f"--task {task}: the tasks are {', '.join(modules)}")
    tensors = (
        dict(_state(modules[task]))
        if task is not None
        else {f"{name}.{key}": value for name, root in modules.items() for key, value in _state(root).items()}
    )
    write_model(output, {key: TensorSpec.of(tensor) for key, tensor in tensors.items()}, tensors.__getitem__)
    return Exported(
        file=str(output),
        run_dir=str(run_dir),
        step=found.checkpoint.step,
        tasks=(task,) if task is not None else tuple(modules),
        tensors=len(tensors),
        num_bytes=output.stat().st_size,
        skipped=found.skipped,
    )


def trained_modules(found: FoundCheckpoint, workload: str) -> dict[str, nn.Module]:
    """Each task's module with the checkpoint's parameters and buffers.

    What no operator uses is in no checkpoint; it keeps its initial value, as in the run.

    Raises:
        InputError: the checkpoint lacks something that the workload uses, or has it in another shape.
        WorkloadError: the workload cannot be built or traced.
    """
    graph = analyse(load(workload).workload)
    table = ParameterTable.of(graph)
    wanted = HeldTensors()
    for name, parameter in table.parameters.items():
        if table.users[name]:
            wanted.add(model_key(name), parameter)
    saved = every_name(found.checkpoint.tensors, found.checkpoint.aliases)
    for name, buffer in table.buffers.items():
        if model_key(name) in saved:
            wanted.add(model_key(name), buffer)
    load_parts(CheckpointReader(found.folder, found.checkpoint), wanted.by_name(), found.folder)
    return {name: task.root for name, task in graph.tasks.items()}


def _state(root: nn.Module) -> Mapping[str, Tensor]:
    """A module's state dict; no copy."""
    return {key: value.detach() for key, value in root.state_dict().items() if isinstance(value, Tensor)}
