"""Layers whose code runs once more in their backward pass, as with `torch.utils.checkpoint`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from spindle_cli.operators.sequence.calling import called_on_meta
from spindle_cli.operators.sequence.recording import NotBySequenceError
from spindle_cli.workload.graph import Op, TaskGraph
from spindle_cli.workload.tracing.behaviour import behaviour_of
from spindle_cli.workload.unread import Unread


def runs_again(task: TaskGraph, op: Op) -> bool:
    """Whether some part of an op's layer with parameters does: it would run without the parts of parameters,
    and the sums around them, that a device has in the forward pass alone.
    """
    if op.target is None:
        return False
    layer = task.root.get_submodule(op.target)
    key = "runs again", behaviour_of(layer)
    if key not in task.findings:
        task.findings[key] = _runs_again(task, op, layer)
    return bool(task.findings[key])


def _runs_again(task: TaskGraph, op: Op, layer: nn.Module) -> bool:
    found = False

    def called(*_: Any) -> None:
        nonlocal found
        # With `use_reentrant=True` the first pass has no gradients, else hooks for what it saves.
        saving = torch._C._autograd._top_saved_tensors_default_hooks(False)
        found = found or saving is not None or not torch.is_grad_enabled()

    specs = [task.fields[name] for name in op.fields] + [task.values[name] for name in op.inputs]
    holders = [module for module in layer.modules() if module._parameters]
    try:
        with called_on_meta(task, op, specs) as (args, kwargs), Unread():
            hooks = [module.register_forward_pre_hook(called) for module in holders]
            try:
                layer(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
    except NotBySequenceError:
        return False
    except Exception:  # the user's code, which may not do without data
        return found
    return found
