"""Run one slice on this device's share of the batch: forward, then backward from gradients of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spindle_cli.analysis.autograd import KEEPS_GRADIENT_HOOKS
from spindle_cli.errors import WorkloadError
from spindle_cli.operators.split_op import PartialOp
from spindle_cli.operators.tensor_group import Shared, TensorGroup, mix
from spindle_cli.runtime.communication.rows import Samples
from spindle_cli.runtime.communication.wiring import WiredSlice
from spindle_cli.runtime.step.offload import SliceCopies
from spindle_cli.runtime.step.recompute import run_recomputed
from spindle_cli.workload.graph import Op

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LocalSlice:
    """A slice that this rank runs.

    Attributes:
        runnable: each op, to be called.
        modules: each op's own module; the same, unless tensor parallelism gives it parts of its parameters.
        samples: this rank's share.
        group: the devices that hold the same share, where tensor parallelism splits the slice.
        shares: the devices that run a share each, where batch norms sum their statistics over them.
    """

    wired: WiredSlice
    runnable: tuple[nn.Module, ...]
    modules: tuple[nn.Module, ...]
    samples: Samples
    group: TensorGroup | None
    shares: TensorGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for its share: the losses of the others are the same."""
        return self.group is None or self.group.member == 0

    def is_offloaded(self, op: int) -> bool:
        """Whether an op of the MetaOp has its activations in host memory from forward to backward."""
        return any(first <= op < last for first, last in self.wired.slice.offload)

    def stream_seed(self, seed: int, batch_number: int) -> int | None:
        """Seed of the random numbers that the share's devices draw alike for a batch; None: each draws its
        own.
        """
        if self.group is None:
            return None
        return mix(seed, batch_number, self.wired.index, self.samples[0])


@dataclass(frozen=True)
class ForwardRun:
    """What a slice's forward pass leaves for its backward pass.

    `inputs`: leaves of the slice's own autograd graph. `outputs`: what other slices take. `loss`: the scalar
    over this share, where the slice holds its task's loss.
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    loss: Tensor | None


def run_forward(
    local: LocalSlice,
    fields: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    watched: Mapping[int, Callable[[], None]],
    before: Callable[[int], None],
    loss_arguments: Sequence[Any] = (),
    behind: Callable[[int, Sequence[Tensor | Shared]], None] | None = None,
    copies: SliceCopies | None = None,
) -> ForwardRun:
    """Run the slice's ops in order; where the plan says so, each keeps its inputs alone and is recomputed, or
    what it keeps is moved to host memory.

    Args:
        local: the slice.
        fields, inputs: by name, cut to this share.
        watched: {op of the MetaOp: what to call}, in the later backward pass, as soon as that op and all
        after it
            in the slice are through (at the latest when the pass ends; then nothing is called).
        before: called with each op of the MetaOp before it runs.
        loss_arguments: what a loss takes that is known how to compute by shares (`LossShares`).
        behind: called with each op and what it has made, when it has run.
        copies: of what is moved; None: nothing is, whatever the plan says.
    """
    leaves = {
        spec.name: inputs[spec.name].detach().requires_grad_(spec.requires_grad)
        for spec in local.wired.inputs
    }
    values: dict[str, Tensor | Shared] = dict(leaves)
    loss: Tensor | None = None
    unused = _unused_behind(local)
    for place, (op, module) in enumerate(zip(local.wired.ops, local.runnable, strict=True)):
        index = local.wired.slice.ops[0] + place
        if copies is not None:
            copies.make_room()
        before(index)
        as_views = op.asks_gradients or not (KEEPS_GRADIENT_HOOKS or copies is None)
        taken = _take_inputs(op, module, values, watched.get(index), as_views=as_views)
        arguments = _arguments(op, fields, taken, loss_arguments)
        result = _run_op(local, place, arguments, copies)
        if op.is_loss:
            loss = result
        else:
            values.update(zip(op.outputs, result, strict=True))
        if behind is not None:
            behind(index, [] if op.is_loss else result)
        if copies is not None and not local.is_offloaded(index) and local.is_offloaded(index + 1):
            copies.watch(result)
        for name in unused[place]:
            values.pop(name, None)
    if copies is not None:
        copies.end_forward()
    outputs = {spec.name: _whole(values, spec.name) for spec in local.wired.outputs}
    check_shapes(local, outputs)
    return ForwardRun(leaves, outputs, loss)


def _take_inputs(
    op: Op,
    module: nn.Module,
    values: dict[str, Tensor | Shared],
    when_through: Callable[[], None] | None,
    *,
    as_views: bool,
) -> list[Tensor | Shared]:
    """What the op takes of other ops: as it is split over positions, where the op takes it so, else whole.

    Args:
        when_through: called in the later backward pass, when it is through the op.
        as_views: take views, so that no hook on what an op is given is called for gradients that it asks for
            itself, and none of its own hooks is one on a leaf.
    """
    as_split = module.taken if isinstance(module, PartialOp) else ()
    taken = [
        values[name] if number in as_split else _whole(values, name)
        for number, name in enumerate(op.inputs, len(op.fields))
    ]
    if when_through is not None:
        _call_when_backward_reaches(taken, when_through)
    if not as_views:
        return taken
    return [value.view_as(value) if isinstance(value, torch.Tensor) else value for value in taken]


def _arguments(
    op: Op, fields: Mapping[str, Tensor], taken: Sequence[Tensor | Shared], loss_arguments: Sequence[Any]
) -> list[Any]:
    """What an op is called with: its batch fields, what it takes of other ops, and what is counted over all
    shares where it is a loss that is known how to compute by shares.
    """
    more = loss_arguments if op.shares is not None else ()
    return [*(fields[name] for name in op.fields), *taken, *more]


def check_shapes(local: LocalSlice, outputs: Mapping[str, Tensor]) -> None:
    """Check what ops hand on that run whole, as their code may decide by values what shapes it gives.

    Raises:
        WorkloadError: one has another shape than was seen on the dataset's first samples.
    """
    if not any(op.coupled for op in local.wired.ops):
        return
    task = local.wired.task
    if task.varying:
        return
    for spec in local.wired.outputs:
        shape = tuple(outputs[spec.name].shape)
        if shape != spec.shape:
            raise WorkloadError(
                f"task {task.task.name!r}: {spec.name!r} has shape {shape} for this batch, and {spec.shape} "
                "for the dataset's first samples: what goes on to other devices has one shape",
                hint="Give packed sequences total_length, pad to a fixed length.",
            )


def _run_op(local: LocalSlice, place: int, arguments: Sequence[Any], copies: SliceCopies | None) -> Any:
    """What the slice's op at `place` makes of its arguments; it keeps what the plan says."""
    index, module = local.wired.slice.ops[0] + place, local.runnable[place]
    if copies is not None and local.is_offloaded(index):
        with copies.moving(index, (module, local.modules[place])):
            return module(*arguments)
    if local.wired.slice.recompute:
        op = local.wired.ops[place]
        return run_recomputed(
            module,
            arguments,
            selective=local.wired.slice.selective,
            may_move=op.coupled,
            moves_trained=bool(op.changes),
        )
    return module(*arguments)


def _unused_behind(local: LocalSlice) -> list[list[str]]:
    """For each op, the values that nothing needs when it has run: they stay as long as autograd keeps
    them.
    """
    handed_on = {spec.name for spec in local.wired.outputs}
    last: dict[str, int] = {}
    for place, op in enumerate(local.wired.ops):
        last |= dict.fromkeys((*op.inputs, *op.outputs), place)
    unused: list[list[str]] = [[] for _ in local.wired.ops]
    for name, place in last.items():
        if name not in handed_on:
            unused[place].append(name)
    return unused


def _whole(values: dict[str, Tensor | Shared], name: str) -> Tensor:
    """A value with all positions of its sequence, joined once."""
    value = values[name]
    if isinstance(value, Shared):
        value = values[name] = value.whole()
    return value


def _call_when_backward_reaches(values: Collection[Tensor | Shared], call: Callable[[], None]) -> None:
    """Call back when the gradient of one of these tensors is complete.

    They come from the op before. Autograd runs what was made later first, and a parameter's accumulation as
    soon as
    it can: when it comes to the op before, all later ops have added to their parameters' gradients.
    """
    for value in values:
        tensor = value.tensor if isinstance(value, Shared) else value
        if tensor.grad_fn is not None:
            tensor.register_hook(lambda _: call())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def run_backward(
    run: ForwardRun, output_gradients: Mapping[str, Tensor], loss_seed: float, scale: Tensor | None = None
) -> dict[str, Tensor]:
    """Run the slice backward: parameters accumulate into `.grad`; returns the gradients of its inputs.

    Args:
        run: the forward pass; its graph is used up.
        output_gradients: of outputs that a gradient comes back for, by name.
        loss_seed: gradient of the total loss with respect to this share's loss, or its part of the loss.
        scale: what the total loss is multiplied by, a scalar on the device; None: 1.

    Returns:
        A gradient for every input that one has come to.
    """
    outputs = run.outputs
    # What comes over a link has the value's own dtype; under autocast that made here may have another.
    ends = [(outputs[name], gradient.to(outputs[name].dtype)) for name, gradient in output_gradients.items()]
    if run.loss is not None:
        ends.append((run.loss, _seed(run.loss, loss_seed, scale)))
    live = [(end, gradient) for end, gradient in ends if end.requires_grad]
    if live:
        tensors, gradients = zip(*live, strict=True)
        torch.autograd.backward(tensors, gradients)
    return {name: leaf.grad for name, leaf in run.inputs.items() if leaf.grad is not None}


def require_planned_gradients(wired: WiredSlice, gradients: Collection[str]) -> None:
    """Refuse a backward pass that gives gradients for other inputs than the trace says: those are all that
    the producers take, and zeros in the place of none would let their parameters decay. Of those that values
    decide of, none may come.

    Raises:
        WorkloadError: with the value, and what to do.
    """
    planned = {spec.name for edge in wired.incoming for spec in edge.differentiable}
    may_lack = {name for edge in wired.incoming for name in edge.may_lack}
    differing = planned.symmetric_difference(gradients) - may_lack
    if not differing:
        return
    unexpected = min(differing)
    op = next(op for op in wired.ops if unexpected in op.inputs)
    came = "none comes in this step" if unexpected in planned else "one comes in this step"
    had = "it gave one" if unexpected in planned else "it gave none"
    raise WorkloadError(
        f"{wired.slice.label}: {op.target or 'the loss'} gives other gradients than when it was traced: for "
        f"{unexpected!r} {had}, and {came}",
        hint="Let its forward use the same values in every step: where one is left out, multiply it by 0 "
        "(x = x + keep * y in place of `if keep:`), as its gradient is then zeros in every step.",
    )


def _seed(loss: Tensor, seed: float, scale: Tensor | None) -> Tensor:
    """The gradient of a loss, rounded as plain PyTorch does it: a float16 loss cannot take every scale."""
    if scale is None:
        return torch.full_like(loss, seed)
    return (scale.to(loss.dtype) * seed).expand_as(loss)
