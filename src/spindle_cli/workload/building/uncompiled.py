"""What users' code has torch.compile make of parts of a model, and the parts themselves, which run instead.

Plans trace what is between operators, run operators in shares of many sizes, and compile them themselves
(`train.compile`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spindle_cli.workload.types import FlowTask, Task, Workload

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
