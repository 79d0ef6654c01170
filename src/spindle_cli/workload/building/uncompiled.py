"""What users' code has torch.compile make of parts of a model, and the parts themselves, which run instead.

Plans trace what is between operators, run operators in shares of many sizes, and compile them themselves
(`train.compile`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spindle_cli.workload.graph import COMPILE_OPERATORS
from spindle_cli.workload.types import FlowTask, Task, Workload

_MARK = "__is_left_uncompiled__"
# What torch says of a compiled function that is traced.
_OF_DYNAMO = "symbolically trace a dynamo-optimized function"
CALLS_COMPILED = "forward calls what torch.compile has made of a function, which a trace cannot follow"
LEAVE_OUT = (
    f"Call the function itself; {COMPILE_OPERATORS}. Or compile it in the workload's own file, or where the "
    "workload is built: there torch.compile is left out by itself."
)


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
    workload; what is so left uncompiled, by its name, functions in the modules' files among it.
    """
    names: dict[str, None] = {}
    seen: dict[nn.Module, nn.Module] = {}

    def plain(module: Any) -> Any:
        if not isinstance(module, nn.Module):
            return module
        if module not in seen:
            original = _original(module)
            seen[module] = seen[original] = original
            if original is not module or original._compiled_call_impl is not None:
                names[type(original).__name__] = None
                original._compiled_call_impl = None
            for name, part in original._modules.items():
                original._modules[name] = plain(part)
        return seen[module]

    for task in workload.all_tasks:
        for flow in task.flows if isinstance(task, FlowTask) else ():
            flow.producer, flow.consumer = plain(flow.producer), plain(flow.consumer)
        if isinstance(task, Task):
            task.module = plain(task.module)
    for setting in (*workload.constraints, *workload.follows):
        for name in ("of", "slow", "fast"):
            if hasattr(setting, name):
                setattr(setting, name, plain(getattr(setting, name)))
    files = {sys.modules.get(base.__module__) for module in seen for base in type(module).__mro__}
    holders: list[Any] = [vars(file) for file in files if file is not None]
    holders += [vars(base) for module in seen for base in type(module).__mro__]
    for held in holders:
        names |= {name: None for name, value in held.items() if _MARK in getattr(value, "__dict__", {})}
    return tuple(sorted(names))


def _original(module: nn.Module) -> nn.Module:
    """The module that torch.compile was given; of one that it has not made, itself."""
    is_made = type(module).__module__.startswith("torch._dynamo.")
    inner = module._modules.get("_orig_mod") if is_made else None
    return module if inner is None else _original(inner)


def is_of_compiled(error: Exception) -> bool:
    """Whether a trace has met what torch.compile has made of a function."""
    return _OF_DYNAMO in str(error)
