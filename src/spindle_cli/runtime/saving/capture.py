"""What `verify` compares: the parameters and buffers of this rank, and gradients, as safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from spindle_cli.errors import InputError
from spindle_cli.files.request import CaptureStage, capture_path


def capture(capture_dir: Path, stage: CaptureStage, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of this rank by canonical name.

    Raises:
        InputError: the folder is not writable, or the disk is full.
    """
    # A copy of its own each: safetensors takes no two tensors that share memory, as views of a bucket do.
    copies = {
        name: _real(tensor.detach()).to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    path = capture_path(capture_dir, stage, rank)
    try:
        save_file(copies, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error}") from error


def _real(tensor: Tensor) -> Tensor:
    """What safetensors can hold: a complex tensor as pairs of numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class FirstGradients:
    """The first gradient of each parameter in a step that was not skipped; `kept`: by name."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self._unread: dict[int, dict[str, Tensor]] = {}  # by steps that nobody has looked at

    def add(self, step: int, parameters: Mapping[str, Tensor], unscaled: Callable[[Tensor], Tensor]) -> None:
        """Take copies of what a step has found for parameters that have none yet. `unscaled`: makes them."""
        self._unread[step] = {
            name: unscaled(parameter.grad)
            for name, parameter in parameters.items()
            if parameter.grad is not None and name not in self.kept
        }

    def keep(self, step: int, *, skipped: bool) -> bool:
        """Whether a step that is looked at is one whose new gradients are to be kept, if there are any."""
        gradients = self._unread.pop(step, None)
        if gradients is None or skipped:
            return False
        self.kept = gradients | self.kept
        return True
