"""What a workload's function may return, checked before anything is traced; and parts of a model that users'
code has torch.compile make something of, which run as they were instead.

Plans trace what is between operators, run operators in shares of many sizes, and compile them themselves
(`train.compile`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Constraint, FlowTask, Follows, Moment, Task, Workload

_MARK = "__is_left_uncompiled__"


@contextmanager
def functions_uncompiled() -> Iterator[None]:
    """Inside, torch.compile gives functions back as they are. Of modules it makes others (`uncompile`)."""
    real = torch.compile

    def compile_(model: Any = None, **settings: Any) -> Any:
        if model is None:
            return lambda given: compile_(given, **settings)
        if isinstance(model, nn.Module):
            return real(model, **settings)
        if not model.__module__.startswith("torch."):  # nn.Module.compile gives a method of torch's
            setattr(getattr(model, "__func__", model), _MARK, True)
        return model

    torch.compile = compile_
    try:
        yield
    finally:
        torch.compile = real


def uncompile(workload: Workload) -> tuple[str, ...]:
    """Put modules that were compiled in the places of what torch.compile has made of them, in all of a
    workload.

    Returns:
        The names of what is so left uncompiled, functions in the modules' files among them.
    """
    originals = _Originals()
    for task in workload.all_tasks:
        if isinstance(task, Task):
            originals.put_into(task, "module")
        for flow in task.flows if isinstance(task, FlowTask) else ():
            originals.put_into(flow, "producer", "consumer")
    for constraint in workload.constraints:
        originals.put_into(constraint, "of")
    for follows in workload.follows:
        originals.put_into(follows, "slow", "fast")
    return tuple(sorted({*originals.names, *_functions_marked(originals.by_module)}))


class _Originals:
    """The modules that torch.compile was given, in the place of what it has made of them.

    Attributes:
        by_module: every module that was looked at -> its original; these themselves, too.
        names: the classes of those that were compiled.
    """

    def __init__(self) -> None:
        self.by_module: dict[nn.Module, nn.Module] = {}
        self.names: set[str] = set()

    def put_into(self, holder: Any, *names: str) -> None:
        """Let attributes of a holder, where they are modules, be the originals."""
        for name in names:
            value = getattr(holder, name, None)  # a holder may be anything: it is not checked yet
            if isinstance(value, nn.Module):
                setattr(holder, name, self._of(value))

    def _of(self, module: nn.Module) -> nn.Module:
        """Return a module's original, whose parts are originals, too."""
        if module not in self.by_module:
            original = _original(module)
            self.by_module[module] = self.by_module[original] = original
            if original is not module or original._compiled_call_impl is not None:
                self.names.add(type(original).__name__)
                original._compiled_call_impl = None
            for name, part in original._modules.items():
                original._modules[name] = None if part is None else self._of(part)
        return self.by_module[module]


def _functions_marked(modules: Iterable[nn.Module]) -> Iterator[str]:
    """Yield the names of functions in the modules' classes, and in the files of these, that torch.compile was
    given.
    """
    bases = {base for module in modules for base in type(module).__mro__}
    files = {sys.modules.get(base.__module__) for base in bases}
    for holder in (*bases, *files):
        for name, value in vars(holder).items() if holder is not None else ():
            if _MARK in getattr(value, "__dict__", {}):
                yield name


def _original(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile was given; of one that it has not made, itself."""
    is_made = type(module).__module__.startswith("torch._dynamo.")
    inner = module._modules.get("_orig_mod") if is_made else None
    return module if inner is None else _original(inner)


_CLASSES = ("operators", "coupled", "contrastive")
_LISTS = {
    "tasks": "tasks",
    "evaluated": "tasks",
    **dict.fromkeys(_CLASSES, "classes"),
    "constraints": "spindle_cli.Constraint",
    "follows": "spindle_cli.Follows",
}


def check_workload(workload: Any, where: str) -> Workload:
    """Refuse what is not a usable workload, before anything is traced; its modules are uncompiled then.

    Raises:
        WorkloadError: naming the task, the value and what was expected.
    """
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"{where}: returned a {type(workload).__name__}, expected a spindle_cli.Workload",
            hint="Let the function end with `return Workload(name=..., tasks=[...], ...)`.",
        )
    _check_lists(workload, where)
    workload.uncompiled = uncompile(workload)
    _check_tasks(workload, where)
    _check_splitting(workload, where)
    for constraint in workload.constraints:
        _check_constraint(constraint, where)
    for follows in workload.follows:
        _check_follows(follows, where)
    return workload


def _check_lists(workload: Workload, where: str) -> None:
    for key, of_what in _LISTS.items():
        given = getattr(workload, key)
        if not isinstance(given, Collection) or isinstance(given, str | Mapping):
            raise WorkloadError(
                f"{where}: {key}: found {given!r:.80}, expected a list of {of_what}",
                hint=f"Write {key}=[...], also around a single one; leave it out where there is none.",
            )


def _check_tasks(workload: Workload, where: str) -> None:
    if not workload.tasks:
        raise WorkloadError(f"{where}: the workload {workload.name!r} has no tasks")
    for key in ("tasks", "evaluated"):
        for task in getattr(workload, key):
            _check_task(task, where, key)
    for task in workload.tasks:
        if task.dataset is None:
            raise WorkloadError(
                f"{where}: task {task.name!r} has no dataset to be trained on",
                hint="Give it one; a task that is only evaluated belongs in the workload's `evaluated`.",
            )
    for task in workload.evaluated:
        _check_only_evaluated(task, where)
    names = [task.name for task in workload.all_tasks]
    for name in names:
        if names.count(name) > 1:
            raise WorkloadError(
                f"{where}: {names.count(name)} tasks are named {name!r}", hint="Give each task its own name."
            )


def _check_splitting(workload: Workload, where: str) -> None:
    """What the workload says of its layers."""
    for key in _CLASSES:
        for item in getattr(workload, key):
            if not _is_module_class(item):
                raise WorkloadError(
                    f"{where}: {key}: found {item!r}, expected classes derived from nn.Module"
                )
    plans = workload.tp_plans
    if not isinstance(plans, Mapping) or not all(map(_is_module_class, plans)):
        raise WorkloadError(
            f"{where}: tp_plans: found {plans!r:.80}, expected a plan by class",
            hint="Such as tp_plans={EncoderLayer: {'mlp.up': 'colwise', 'mlp.down': 'rowwise'}}.",
        )
    words = workload.tp_vocabulary
    if words is not None and (not isinstance(words, int) or isinstance(words, bool) or words < 1):
        raise WorkloadError(
            f"{where}: tp_vocabulary is {words!r}, expected a whole number of words, at least 1, or None",
            hint="Heads over at least so many words are split; with None, none is.",
        )
    if not isinstance(workload.tp_sequence, bool):
        raise WorkloadError(f"{where}: tp_sequence is {workload.tp_sequence!r}, expected True or False")


def _is_module_class(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, nn.Module)


def _check_only_evaluated(task: Task | FlowTask, where: str) -> None:
    where = f"{where}: evaluated: task {task.name!r}"
    if task.eval_dataset is None:
        raise WorkloadError(f"{where} has no eval_dataset", hint="Give it what it is to be evaluated on.")
    if task.dataset is not None:
        raise WorkloadError(
            f"{where} has a dataset, and is never trained",
            hint="Leave its dataset out; or list it in the workload's `tasks`, to train it.",
        )


# What a task has by name: what an entry is, what is expected, and an example.
_MAPPINGS: Mapping[str, tuple[Callable[[str, Any], bool], str, str]] = {
    "absent": (
        lambda _, value: isinstance(value, Tensor),
        "a tensor of one sample by field",
        "absent={'image': torch.zeros(3, 224, 224)}",
    ),
    "metrics": (
        lambda _, value: callable(value),
        "a function by name",
        "metrics={'mean_score': lambda out: out['score'].mean()}",
    ),
    "step_values": (
        lambda path, _: bool(path),
        "a schedule by attribute",
        "step_values={'beta': lambda step: min(1.0, step / 1000)}",
    ),
}


def _check_module(module: Any, where: str) -> None:
    if not isinstance(module, nn.Module):
        raise WorkloadError(f"{where}: module is a {type(module).__name__}, expected an nn.Module")
    if isinstance(module, ScriptModule):
        raise WorkloadError(
            f"{where}: module is compiled by torch.jit, and hides what its forward takes and is made of",
            hint="Give the module itself, which is then planned layer by layer; or one whose forward calls "
            "it (def forward(self, x, y): return self.compiled(x, y)), which runs whole.",
        )
    if getattr(type(module), "forward", None) is nn.Module.forward:
        raise WorkloadError(
            f"{where}: module is a {type(module).__name__}, whose class defines no forward",
            hint="Give a module whose own class, or one that it derives from, has a forward.",
        )


def _check_task(task: Any, where: str, key: str) -> None:
    if not isinstance(task, Task | FlowTask):
        raise WorkloadError(
            f"{where}: {key}: found a {type(task).__name__}, expected spindle_cli.Task or FlowTask"
        )
    if not isinstance(task.name, str) or not task.name or "/" in task.name:
        raise WorkloadError(f"{where}: a task is named {task.name!r}; expected a name without '/'")
    where = f"{where}: task {task.name!r}"
    if isinstance(task, Task):
        _check_module(task.module, where)
    if not isinstance(task.batch_size, int) or isinstance(task.batch_size, bool) or task.batch_size < 1:
        raise WorkloadError(
            f"{where}: batch_size is {task.batch_size!r}, expected a whole number of samples, at least 1"
        )
    is_number = isinstance(task.weight, int | float) and not isinstance(task.weight, bool)
    if not is_number or not math.isfinite(task.weight):
        raise WorkloadError(f"{where}: weight is {task.weight!r}, expected a finite number")
    for key, (is_entry, expected, example) in _MAPPINGS.items():
        mapping = getattr(task, key)
        if not isinstance(mapping, Mapping) or not all(
            isinstance(name, str) and is_entry(name, value) for name, value in mapping.items()
        ):
            raise WorkloadError(
                f"{where}: {key} is {mapping!r:.80}, expected {expected}", hint=f"Such as {example}."
            )
    if task.collate is not None and not callable(task.collate):
        raise WorkloadError(
            f"{where}: collate is {task.collate!r:.80}, expected a function from a list of items to a batch"
        )
    if task.reduction not in ("mean", "sum"):
        raise WorkloadError(f"{where}: reduction is {task.reduction!r}, expected 'mean' or 'sum'")


def _check_constraint(constraint: Any, where: str) -> None:
    if not isinstance(constraint, Constraint):
        raise WorkloadError(
            f"{where}: constraints: found a {type(constraint).__name__}, expected spindle_cli.Constraint"
        )
    _require_parameters(constraint.of, f"{where}: constraints: of")
    clamp, unit_norm = constraint.clamp, constraint.unit_norm
    if (clamp is None) == (unit_norm is None):
        raise WorkloadError(
            f"{where}: constraints: clamp is {clamp!r} and unit_norm {unit_norm!r}, expected one of them",
            hint="Such as Constraint(model.logit_scale, clamp=(0, 4.6)) or "
            "Constraint(model.prototypes.weight, unit_norm=1); give several in a list.",
        )
    if clamp is not None and not _is_interval(clamp):
        raise WorkloadError(
            f"{where}: constraints: clamp is {clamp!r:.80}, expected (low, high) with low <= high, "
            "one of which may be None",
        )
    if unit_norm is not None and (not isinstance(unit_norm, int) or isinstance(unit_norm, bool)):
        raise WorkloadError(
            f"{where}: constraints: unit_norm is {unit_norm!r:.80}, expected a dimension, such as 1"
        )


def _is_interval(clamp: Any) -> bool:
    if not isinstance(clamp, tuple | list) or len(clamp) != 2:
        return False
    given = [end for end in clamp if end is not None]
    if not given or not all(_is_number(end) for end in given):
        return False
    return len(given) < 2 or given[0] <= given[1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _require_parameters(of: Any, key: str) -> None:
    if not isinstance(of, nn.Parameter | nn.Module):
        raise WorkloadError(f"{key} is a {type(of).__name__}, expected an nn.Parameter or an nn.Module")


def _check_follows(follows: Any, where: str) -> None:
    if not isinstance(follows, Follows):
        raise WorkloadError(
            f"{where}: follows: found a {type(follows).__name__}, expected spindle_cli.Follows"
        )
    for key in ("slow", "fast"):
        _require_parameters(getattr(follows, key), f"{where}: follows: {key}")
    if isinstance(follows.slow, nn.Parameter) != isinstance(follows.fast, nn.Parameter):
        raise WorkloadError(
            f"{where}: follows: slow is a {type(follows.slow).__name__} and fast a "
            f"{type(follows.fast).__name__}, expected two parameters or two modules"
        )
    decay = follows.decay
    if not callable(decay) and not (_is_number(decay) and 0 <= decay <= 1):
        raise WorkloadError(
            f"{where}: follows: decay is {decay!r:.80}, expected a number from 0 to 1, or a function of the "
            "step that gives one"
        )
    if follows.when not in get_args(Moment):
        raise WorkloadError(
            f"{where}: follows: when is {follows.when!r:.80}, expected one of {', '.join(get_args(Moment))}"
        )
