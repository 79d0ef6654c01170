"""The Python file that `spindle init` writes: the workload's function over the user's own model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from spindle_cli.init.types import Block, FieldSpec, ModelSource, TaskStub

_FUNCTIONAL = "import torch.nn.functional as functional"


@dataclass(frozen=True)
class Stub:
    """All that a stub is written from. `named_by`: what the user called the model by."""

    named_by: str
    workload: str
    source: ModelSource
    tasks: tuple[TaskStub, ...]
    is_alone: bool
    operators: tuple[Block, ...]
    batch_size: int


def stub_text(stub: Stub) -> str:
    """The file's text, as `ruff format` leaves it but for the length of lines."""
    names = _class_names(stub.operators)
    parts = [f"{_head(stub)}\n\n{_imports(stub, names)}"]
    parts += [_dataset(stub, task) for task in stub.tasks]
    parts += [_loss_module(stub, task) for task in stub.tasks if not task.loss.is_the_models]
    return "\n\n\n".join([*parts, _build(stub, names)]) + "\n"


def _head(stub: Stub) -> str:
    return f'''"""The workload {stub.workload!r}: how {stub.named_by} is trained. Yours to change.

The datasets are random numbers of the right shapes: put your own in their place.
"""

from __future__ import annotations'''


def _class_names(blocks: Sequence[Block]) -> list[tuple[str, str]]:
    """For each class what is imported and by which name it goes: another where two have the same."""
    taken: dict[str, int] = {}
    names: list[tuple[str, str]] = []
    for block in blocks:
        outer, dot, inner = block.name.partition(".")
        taken[outer] = taken.get(outer, 0) + 1
        imported_as = outer if taken[outer] == 1 else f"{outer}{taken[outer]}"
        names.append(
            (outer if imported_as == outer else f"{outer} as {imported_as}", f"{imported_as}{dot}{inner}")
        )
    return names


def _imports(stub: Stub, names: Sequence[tuple[str, str]]) -> str:
    needs_functional = any(task.loss.function for task in stub.tasks)
    needs_modules = any(not task.loss.is_the_models for task in stub.tasks)
    lines = ["from typing import Any", "", "import torch"]
    lines += [_FUNCTIONAL] if needs_functional else []
    lines.append(f"from torch import Tensor{', nn' if needs_modules else ''}")
    lines.append("from torch.utils.data import Dataset")
    imports = {(stub.source.module, stub.source.name)}
    if stub.source.config is not None:
        imports.add((stub.source.config.__module__, stub.source.config.__name__))
    imports |= {(block.module, imported) for block, (imported, _) in zip(stub.operators, names, strict=True)}
    for module in sorted({module for module, _ in imports}):
        lines.append(
            f"from {module} import {', '.join(sorted(name for of, name in imports if of == module))}"
        )
    return "\n".join([*lines, "", "from spindle_cli import Task, Workload"])


def _class_name(stub: Stub, task: TaskStub, what: str) -> str:
    """A class's name that no other task's is, whatever the tasks are called."""
    spelled = [re.sub(r"[^A-Za-z0-9]+", " ", peer.name).title().replace(" ", "") for peer in stub.tasks]
    spelling = spelled[stub.tasks.index(task)]
    if not spelling or spelling[0].isdigit() or spelled.count(spelling) > 1:
        spelling = f"Task{stub.tasks.index(task) + 1}{spelling}"
    return spelling + what


def _dataset(stub: Stub, task: TaskStub) -> str:
    fields = [*task.fields, *([task.loss.target] if task.loss.target else [])]
    items = "\n".join(f"            {spec.name!r}: {_drawn(spec)},".replace("'", '"') for spec in fields)
    return f'''class {_class_name(stub, task, "Samples")}(Dataset[dict[str, Tensor]]):
    """Random samples of the task {task.name!r}."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)
        return {{
{items}
        }}'''


def _drawn(spec: FieldSpec) -> str:
    shape = f"({', '.join(map(str, spec.shape))}{',' if len(spec.shape) == 1 else ''})"
    if spec.is_binary:
        return f"torch.randint(2, {shape}, generator=random).float()"
    if spec.below is None:
        return f"torch.randn({shape}, generator=random)"
    return f"torch.randint({spec.below}, {shape}, generator=random)"


def _loss_module(stub: Stub, task: TaskStub) -> str:
    loss = task.loss
    names = [spec.name for spec in task.fields]
    given = ", ".join(f"{name}={name}" for name in names)
    takes = ", ".join(f"{name}: Tensor" for name in [*names, *([loss.target.name] if loss.target else [])])
    if loss.asks_for_loss:
        body = f'        return self.model({given}, return_loss=True)["loss"]'
    else:
        assert loss.target is not None
        scores = "" if loss.output is None else f'["{loss.output}"]'
        body = f"        scores = self.model({given}){scores}\n"
        body += f"        return functional.{loss.function}(scores, {loss.target.name})"
    return f'''class {_class_name(stub, task, "Loss")}(nn.Module):
    """The loss of the task {task.name!r}."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, {takes}) -> Tensor:
{body}'''


def _build(stub: Stub, names: Sequence[tuple[str, str]]) -> str:
    source = stub.source
    if source.config is not None:
        made = f"{source.name}({source.config.__name__}(**settings))"
    else:
        made = f"{source.name}(**settings)"
    lines = [f"def build(batch_size: int = {stub.batch_size}, **settings: Any) -> Workload:"]
    lines.append('    """The workload; what the workload file has under `args` comes in here."""')
    if source.has_cache:
        lines.append('    settings.setdefault("use_cache", False)  # of no use in training')
    lines.append(f"    {'model' if stub.is_alone else 'models'} = {made}")
    lines.append("    return Workload(")
    lines.append(f"        name={_quoted(stub.workload)},")
    lines.append("        tasks=[")
    lines += [f"            {_task(stub, task)}," for task in stub.tasks]
    lines.append("        ],")
    if names:
        classes = ", ".join(name for _, name in names)
        lines.append(f"        operators=({classes}{',' if len(names) == 1 else ''}),")
    return "\n".join([*lines, "    )"])


def _task(stub: Stub, task: TaskStub) -> str:
    model = "model" if stub.is_alone else f"models[{_quoted(task.name)}]"
    module = model if task.loss.is_the_models else f"{_class_name(stub, task, 'Loss')}({model})"
    samples = _class_name(stub, task, "Samples")
    return f"Task({_quoted(task.name)}, {module}, batch_size=batch_size, dataset={samples}())"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
