"""What `verify` compares: the parameters of this rank, and their gradients, as safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from spindle_cli.errors import InputError
from spindle_cli.files.request import CaptureStage, capture_path


def capture(
    capture_dir: Path, stage: CaptureStage, rank: int, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Write this rank's parameters (for 'gradients': the gradients of those that have one) by canonical name.

    Raises:
        InputError: the folder is not writable, or the disk is full.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensor = parameter.grad if stage == "gradients" else parameter
        if tensor is not None:
            # A copy of its own each: safetensors takes no two tensors that share memory, as views of a bucket
            # do.
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
    path = capture_path(capture_dir, stage, rank)
    try:
        save_file(tensors, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error}") from error
