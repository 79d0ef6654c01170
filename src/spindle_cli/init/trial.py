"""What a model's forward returns, found by running it without its numbers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.analysis.tracing.observe import Observer
from spindle_cli.errors import UsageError, WorkloadError
from spindle_cli.init.types import FieldSpec, LossName, StubLoss
from spindle_cli.workload.refuse import place_of_error

_SAMPLES = 2
_SCORES = ("logits", "logits_per_image", "scores", "output")
TARGET = "target"


@dataclass(frozen=True)
class Returned:
    """What forward gave for two samples.

    `has_loss`: it is a scalar, or has one under "loss". `scores`: the tensor that a loss could be made of,
    `output` its attribute in what is returned, None where it is all of it. `what`: in words.
    """

    has_loss: bool
    scores: Tensor | None
    output: str | None
    what: str


def choose_loss(
    task: str, model: nn.Module, fields: Sequence[FieldSpec], function: LossName | None
) -> StubLoss:
    """How the task's loss comes about: as the model returns it, or by `function` of what it returns.

    Raises:
        UsageError: it returns no loss and none is given, or `function` does not fit what it returns.
        WorkloadError: forward fails on such fields.
    """
    returned = _returned(task, model, fields)
    if returned.has_loss:
        return StubLoss()
    if (
        "return_loss" in inspect.signature(model.forward).parameters
        and _returned(task, model, fields, return_loss=True).has_loss
    ):
        return StubLoss(asks_for_loss=True)
    if function is None:
        raise UsageError(
            f"task {task!r}: {type(model).__name__}.forward returns {returned.what}, expected a scalar loss",
            hint="Name a loss of it with --loss (cross_entropy, mse_loss, ...), name the field that makes "
            "it return one with --field (labels=...), or name a module of yours that does.",
        )
    if returned.scores is None:
        raise UsageError(
            f"--loss {function}: task {task!r} returns {returned.what}, in which there is no one tensor of "
            "scores",
            hint="Name a module of yours that returns the loss.",
        )
    return StubLoss(function, returned.output, target=_target(task, function, tuple(returned.scores.shape)))


def _target(task: str, function: LossName, shape: tuple[int, ...]) -> FieldSpec:
    """The field that a loss of scores of this shape, two samples', compares with."""
    sample_shape = shape[1:]
    if not shape or shape[0] != _SAMPLES:
        raise UsageError(
            f"--loss {function}: task {task!r} returns scores of shape {shape} for {_SAMPLES} samples",
            hint="The first dimension has to be the sample's. Name a module of yours that returns the loss.",
        )
    if function != "cross_entropy":
        return FieldSpec(TARGET, sample_shape, is_binary=function.startswith("binary"))
    if not sample_shape:
        raise UsageError(
            f"--loss cross_entropy: task {task!r} returns one number for each sample, expected one for "
            "each class",
            hint="Use --loss binary_cross_entropy_with_logits or mse_loss.",
        )
    return FieldSpec(TARGET, sample_shape[1:], sample_shape[0])  # classes are the second dimension


def _returned(task: str, model: nn.Module, fields: Sequence[FieldSpec], **more: bool) -> Returned:
    observer = Observer()
    with observer.mode:
        batch: dict[str, Any] = {spec.name: _stand_in(spec) for spec in fields}
    try:
        value = observer.call(model, (), batch | more)
    except Exception as error:
        place = place_of_error(error)
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
        raise WorkloadError(
            f"{f'{place}: ' if place else ''}task {task!r}: forward fails for {shapes}: "
            f"{type(error).__name__}: {error}",
            hint="Say with --field what one sample has; a forward that reads the values of its tensors "
            "has to be put into a workload by hand.",
        ) from error
    return _described(value)


def _stand_in(spec: FieldSpec) -> Tensor:
    dtype = torch.float32 if spec.below is None else torch.int64
    return torch.empty((_SAMPLES, *spec.shape), dtype=dtype)


def _described(value: Any) -> Returned:
    if isinstance(value, Tensor):
        return Returned(_is_loss(value), value, None, f"a tensor of shape {tuple(value.shape)}")
    if isinstance(value, Mapping):
        what = f"{type(value).__name__} with {', '.join(map(str, value))}"
        if _is_loss(value.get("loss")):
            return Returned(True, None, None, what)
        name = next((name for name in _SCORES if isinstance(value.get(name), Tensor)), None)
        return Returned(False, None if name is None else value[name], name, what)
    return Returned(False, None, None, f"a {type(value).__name__}")


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()
