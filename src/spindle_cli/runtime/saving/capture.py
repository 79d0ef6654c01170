"""What `verify` compares: the parameters and buffers of this rank, and gradients, as safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
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
