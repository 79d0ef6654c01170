"""From a model to the three files that a new user starts with.

The workload's stub lists repeated blocks of a model as operators.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from spindle_cli.analysis.analyse import analyse, repeated_modules, shape_of
from spindle_cli.errors import UsageError, WorkloadError
from spindle_cli.files.writing import write_new, write_text
from spindle_cli.init.fields import GivenFields, fields_of, parse_fields, require_used
from spindle_cli.init.model import build_model, import_path
from spindle_cli.init.stub import Stub, stub_text
from spindle_cli.init.trial import choose_loss
from spindle_cli.init.types import Block, CoupledOp, InitReport, InitTask, LossName, TaskStub
from spindle_cli.profile.machine.cluster_file import machine_text
from spindle_cli.workload.building.load import load_abstract
from spindle_cli.workload.file import WorkloadFile
from spindle_cli.workload.graph import WorkloadGraph


@dataclass(frozen=True)
class InitRequest:
    """What the command was given.

    Attributes:
        model: 'package.module:name' or 'path/to/file.py:name'.
        folder: where the files go; None: beside the model's file, or the current one.
        arguments: of the model, or of its configuration.
        fields: as `--field` has them.
        loss: of what the model returns, if that is no loss.
        overwrite: files that are there. Else a cluster file that is there stays, and others are refused.
    """

    model: str
    folder: Path | None
    arguments: Mapping[str, Any]
    fields: tuple[str, ...]
    loss: LossName | None
    batch_size: int
    num_devices: int | None
    overwrite: bool


@dataclass(frozen=True)
class Files:
    """Where the files go."""

    stub: Path
    workload: Path
    cluster: Path


def write_start(request: InitRequest) -> InitReport:
    """Write a workload file, its Python stub and a cluster file of this machine, and analyse the workload.

    Raises:
        InputError: there is no such model, or a file cannot be written.
        UsageError: the model needs arguments, fields or a loss that are not given, or files are there.
        WorkloadError: the model cannot be built or run; or, once the files are there, not be taken by
            `spindle profile` as it is, with the place in the user's code and what to do.
    """
    given = parse_fields(request.fields)
    folder = _folder(request)
    stub = _stub_of(request, given)
    files = _files(folder, stub.workload, overwrite=request.overwrite)
    _write(files.stub, stub_text(stub), request)
    _write(files.workload, _workload_text(request, files.stub), request)
    measures = request.overwrite or not files.cluster.exists()
    if measures:
        _write(files.cluster, machine_text(request.num_devices), request)
    try:
        graph = analyse(load_abstract(str(files.workload)).workload)
    except WorkloadError as error:
        error.message = f"wrote {files.stub} and {files.workload}, but: {error.message}"
        raise
    return _report(stub, files, graph, has_measured=measures)


def _write(path: Path, text: str, request: InitRequest) -> None:
    if request.overwrite:
        write_text(path, text)
    elif not write_new(path, text):
        raise _exists(path)


def _folder(request: InitRequest) -> Path:
    """Where the files go.

    Raises:
        UsageError: not where the stub can import the model from.
    """
    module = request.model.rpartition(":")[0]
    model_folder = Path(module).parent if module.endswith(".py") else None
    folder = request.folder or model_folder or Path()
    if model_folder is not None and folder.resolve() != model_folder.resolve():
        raise UsageError(
            f"-o {folder}: what is written there imports {Path(module).name}, which is in {model_folder}",
            hint="Leave out -o, or give the folder of the model's file.",
        )
    return folder


def _files(folder: Path, workload: str, *, overwrite: bool) -> Files:
    stem = re.sub(r"\W", "_", workload.lower()) + "_workload"
    files = Files(folder / f"{stem}.py", folder / f"{stem}.yaml", folder / "cluster.yaml")
    for path in (files.stub, files.workload):
        if path.exists() and not overwrite:
            raise _exists(path)
    return files


def _exists(path: Path) -> UsageError:
    return UsageError(
        f"{path} is there already", hint="Give another folder with -o, or --force to replace it."
    )


def _stub_of(request: InitRequest, given: GivenFields) -> Stub:
    built = build_model(request.model, request.arguments)
    require_used(given, built.models)
    tasks = []
    for name, model in built.models.items():
        fields = fields_of(name, model, given)
        tasks.append(TaskStub(name, fields, choose_loss(name, model, fields, request.loss)))
    return Stub(
        named_by=request.model,
        workload=next(iter(built.models)) if built.is_alone else built.source.name,
        source=built.source,
        tasks=tuple(tasks),
        is_alone=built.is_alone,
        operators=repeated_blocks(built.models),
        batch_size=request.batch_size,
    )


def _workload_text(request: InitRequest, stub: Path) -> str:
    file = WorkloadFile(model=f"{stub.name}:build", args=dict(request.arguments))
    data = file.model_dump(mode="json", by_alias=True, include={"schema_", "model", "args"})
    data["train"] = {"optimizer": "AdamW", "lr": 1e-4, "steps": 200, "seed": 0}
    return f"# How {stub.name} is trained.\n{yaml.safe_dump(data, sort_keys=False, width=110)}"


def _report(stub: Stub, files: Files, graph: WorkloadGraph, *, has_measured: bool) -> InitReport:
    coupled = [
        CoupledOp(task=name, op=op.target or "loss", because=op.coupled_because)
        for name, task in graph.tasks.items()
        for op in task.ops
        if op.coupled_because is not None
    ]
    return InitReport(
        workload=str(files.workload),
        stub=str(files.stub),
        cluster=str(files.cluster),
        has_measured=has_measured,
        tasks=[
            InitTask(
                name=task.name,
                fields={spec.name: spec.shape for spec in task.fields},
                loss=task.loss.function or "the model's own",
            )
            for task in stub.tasks
        ],
        operators=list(stub.operators),
        coupled=coupled,
        metaops={metaop.name: len(metaop.ops) for metaop in graph.metaops},
    )


def repeated_blocks(models: Mapping[str, nn.Module]) -> tuple[Block, ...]:
    """The outermost classes of which some list of modules in the models holds two equal ones or more."""
    modules_by_class: dict[type[nn.Module], list[tuple[str, nn.Module]]] = {}
    for task, model in models.items():
        for name, module in repeated_modules(model, task):
            modules_by_class.setdefault(type(module), []).append((name, module))
    return tuple(_as_block(cls, modules) for cls, modules in modules_by_class.items() if import_path(cls))


def _as_block(cls: type[nn.Module], modules: list[tuple[str, nn.Module]]) -> Block:
    distinct = {id(module): module for _, module in modules}
    parameters = {id(p): p.numel() for module in distinct.values() for p in module.parameters()}
    path = import_path(cls)
    assert path is not None
    return Block(
        module=path[0],
        name=path[1],
        count=len(distinct),
        equal=max(Counter(shape_of(module) for module in distinct.values()).values()),
        first=modules[0][0],
        parameters=sum(parameters.values()),
    )
