"""The Python file that `spindle init` writes: the workload's function over the user's own model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from spindle_cli.init.types import Block, FieldSpec, ModelSource, TaskDraft

_FUNCTIONAL = "import torch.nn.functional as functional"


@dataclass(frozen=True)
class Draft:
    """All that a stub is written from. `named_by`: what the user called the model by."""

    named_by: str
    workload: str
    source: ModelSource
    tasks: tuple[TaskDraft, ...]
    is_alone: bool
    operators: tuple[Block, ...]
    batch_size: int


def stub_text(draft: Draft) -> str:
    """The file's text, as `ruff format` leaves it but for the length of lines."""
    names = _class_names(draft.operators)
    parts = [f"{_head(draft)}\n\n{_imports(draft, names)}"]
    parts += [_dataset(draft, task) for task in draft.tasks]
    parts += [_loss_module(draft, task) for task in draft.tasks if not task.loss.is_the_models]
    return "\n\n\n".join([*parts, _build(draft, names)]) + "\n"


def _head(draft: Draft) -> str:
    return f'''"""The workload {draft.workload!r}: how {draft.named_by} is trained. Yours to change.

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
        own = outer if taken[outer] == 1 else f"{outer}{taken[outer]}"
        names.append((outer if own == outer else f"{outer} as {own}", f"{own}{dot}{inner}"))
    return names


def _imports(draft: Draft, names: Sequence[tuple[str, str]]) -> str:
    needs_functional = any(task.loss.function for task in draft.tasks)
    needs_modules = any(not task.loss.is_the_models for task in draft.tasks)
    lines = ["from typing import Any", "", "import torch"]
    lines += [_FUNCTIONAL] if needs_functional else []
    lines.append(f"from torch import Tensor{', nn' if needs_modules else ''}")
    lines.append("from torch.utils.data import Dataset")
    own = {(draft.source.module, draft.source.name)}
    if draft.source.config is not None:
        own.add((draft.source.config.__module__, draft.source.config.__name__))
    own |= {(block.module, imported) for block, (imported, _) in zip(draft.operators, names, strict=True)}
    for module in sorted({module for module, _ in own}):
        lines.append(f"from {module} import {', '.join(sorted(name for of, name in own if of == module))}")
    return "\n".join([*lines, "", "from spindle_cli import Task, Workload"])


def _class_name(draft: Draft, task: TaskDraft, what: str) -> str:
    """A class's name that no other task's is, whatever the tasks are called."""
    spelled = [re.sub(r"[^A-Za-z0-9]+", " ", other.name).title().replace(" ", "") for other in draft.tasks]
    own = spelled[draft.tasks.index(task)]
    if not own or own[0].isdigit() or spelled.count(own) > 1:
        own = f"Task{draft.tasks.index(task) + 1}{own}"
    return own + what


def _dataset(draft: Draft, task: TaskDraft) -> str:
    fields = [*task.fields, *([task.loss.target] if task.loss.target else [])]
    items = "\n".join(f"            {spec.name!r}: {_drawn(spec)},".replace("'", '"') for spec in fields)
    return f'''class {_class_name(draft, task, "Samples")}(Dataset[dict[str, Tensor]]):
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


def _loss_module(draft: Draft, task: TaskDraft) -> str:
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
    return f'''class {_class_name(draft, task, "Loss")}(nn.Module):
    """The loss of the task {task.name!r}."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, {takes}) -> Tensor:
{body}'''


def _build(draft: Draft, names: Sequence[tuple[str, str]]) -> str:
    source = draft.source
    if source.config is not None:
        made = f"{source.name}({source.config.__name__}(**settings))"
    else:
        made = f"{source.name}(**settings)"
    lines = [f"def build(batch_size: int = {draft.batch_size}, **settings: Any) -> Workload:"]
    lines.append('    """The workload; what the workload file has under `args` comes in here."""')
    if source.has_cache:
        lines.append('    settings.setdefault("use_cache", False)  # of no use in training')
    lines.append(f"    {'model' if draft.is_alone else 'models'} = {made}")
    lines.append("    return Workload(")
    lines.append(f"        name={_quoted(draft.workload)},")
    lines.append("        tasks=[")
    lines += [f"            {_task(draft, task)}," for task in draft.tasks]
    lines.append("        ],")
    if names:
        classes = ", ".join(name for _, name in names)
        lines.append(f"        operators=({classes}{',' if len(names) == 1 else ''}),")
    return "\n".join([*lines, "    )"])


def _task(draft: Draft, task: TaskDraft) -> str:
    model = "model" if draft.is_alone else f"models[{_quoted(task.name)}]"
    module = model if task.loss.is_the_models else f"{_class_name(draft, task, 'Loss')}({model})"
    samples = _class_name(draft, task, "Samples")
    return f"Task({_quoted(task.name)}, {module}, batch_size=batch_size, dataset={samples}())"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
