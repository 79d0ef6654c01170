"""Run one slice on this device's share of the batch: forward, then backward from gradients of its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from spindle_cli.runtime.rows import Samples
from spindle_cli.runtime.wiring import WiredSlice

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LocalSlice:
    """A slice that this rank runs: `modules`: each op's runnable graph; `samples`: this rank's share."""

    wired: WiredSlice
    modules: tuple[nn.Module, ...]
    samples: Samples


@dataclass(frozen=True)
class ForwardRun:
    """What a slice's forward pass leaves for its backward pass.

    `inputs`: leaves of the slice's own autograd graph. `outputs`: what other slices take. `loss`: the scalar
    over this share, where the slice holds its task's loss.
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    loss: Tensor | None


def run_forward(local: LocalSlice, fields: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> ForwardRun:
    """Run the slice's ops in order on its fields and inputs, both already cut to this share."""
    leaves = {
        spec.name: inputs[spec.name].detach().requires_grad_(spec.requires_grad)
        for spec in local.wired.inputs
    }
    values: dict[str, Tensor] = dict(leaves)
    loss: Tensor | None = None
    for op, module in zip(local.wired.ops, local.modules, strict=True):
        arguments = [fields[name] for name in op.fields] + [values[name] for name in op.inputs]
        result = module(*arguments)
        if op.is_loss:
            loss = result
        else:
            values.update(zip(op.outputs, result, strict=True))
    return ForwardRun(leaves, {spec.name: values[spec.name] for spec in local.wired.outputs}, loss)


def run_backward(
    run: ForwardRun, output_gradients: Mapping[str, Tensor], loss_seed: float
) -> dict[str, Tensor]:
    """Run the slice backward: parameters accumulate into `.grad`; returns the gradients of its inputs.

    Args:
        run: the forward pass; its graph is used up.
        output_gradients: of outputs that a gradient comes back for, by name.
        loss_seed: gradient of the total loss with respect to this share's loss.

    Returns:
        A gradient for every input that requires one; zeros where the ops made no use of it.
    """
    ends = [(run.outputs[name], gradient) for name, gradient in output_gradients.items()]
    if run.loss is not None:
        ends.append((run.loss, torch.full_like(run.loss, loss_seed)))
    live = [(end, gradient) for end, gradient in ends if end.requires_grad]
    if live:
        tensors, gradients = zip(*live, strict=True)
        torch.autograd.backward(tensors, gradients)
    return {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in run.inputs.items()
        if leaf.requires_grad
    }
