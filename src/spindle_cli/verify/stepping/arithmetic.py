"""On which device and in which numbers the plain run computes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spindle_cli.files.request import RunRequest
from spindle_cli.training.precision import convert_module, dtype_in
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import root_of
from spindle_cli.workload.settings.updates import LossScaleSettings
from spindle_cli.workload.types import Workload


@dataclass(frozen=True)
class Arithmetic:
    """On which device and in which numbers to train.

    Attributes:
        dtype: what everything floating-point is converted to; None: nothing is.
        autocast: forward passes run in torch.autocast with it; None: in none.
        scaling: what losses are multiplied by; None: by nothing.
        has_copies: the optimizer steps float32 copies of the parameters, which are the copies rounded.
        widens_gradients: gradients are added up in float32, whatever the parameters are.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    scaling: LossScaleSettings | None = None
    has_copies: bool = False
    widens_gradients: bool = False

    @classmethod
    def of(cls, request: RunRequest, train: TrainSettings) -> Arithmetic:
        """The arithmetic of a run; a dtype that the request asks for goes before the train settings'
        precision.
        """
        device = torch.device(request.device_type)
        if request.dtype is not None:
            return cls(device, getattr(torch, request.dtype))
        if train.precision == "bf16":
            widens = train.reduce != "parameters"
            return cls(device, torch.bfloat16, has_copies=True, widens_gradients=widens)
        of_autocast = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}
        return cls(device, autocast=of_autocast.get(train.precision), scaling=train.scaling)

    def computing(self) -> AbstractContextManager[object]:
        """Return what forward passes run in."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)


def convert(field: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """A batch field where and as the model wants it; only real and complex numbers change their type."""
    return field.to(device, dtype_in(field.dtype, dtype))


def move_to(workload: Workload, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move every module, in place: parameters stay the objects that tasks share."""
    for task in workload.tasks:
        convert_module(root_of(task), device, dtype)


def float32_copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return a copy of each parameter, by its name; of complex numbers as they are."""
    return {
        name: nn.Parameter(
            parameter.detach().to(parameter.dtype if parameter.is_complex() else torch.float32, copy=True),
            parameter.requires_grad,
        )
        for name, parameter in parameters.items()
    }
