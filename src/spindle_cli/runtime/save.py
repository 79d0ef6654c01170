"""Save the trained parameters: one safetensors file keyed by canonical name, written whole by rank 0."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from spindle_cli.errors import InputError
from spindle_cli.fragments import Fragment, fragment_key, fragments_by_name
from spindle_cli.joining import joined
from spindle_cli.run_files import model_path

Layout = tuple[tuple[int, ...], torch.dtype]  # a tensor's shape and dtype


def save_model(
    run_dir: Path, step: int, names: Sequence[str], held: Mapping[str, Tensor], device: torch.device
) -> None:
    """Gather every parameter on rank 0, each fragment from the first rank that holds it, and write them.
    Collective.

    Args:
        names: canonical names of all parameters, the same on every rank; what no rank holds is left out.
        held: this rank's, or fragments of them by the keys of fragments.py.
        device: through which tensors are sent.

    Raises:
        InputError: the folder is not writable, or the disk is full.
    """
    layouts = _gather_layouts(held)
    fragments = fragments_by_name(key for offered in layouts for key in offered)
    gathered: dict[str, Tensor] = {}
    for name in names:
        taken: dict[Fragment | None, Tensor] = {}
        for fragment in fragments.get(name, ()):
            key = fragment_key(name, fragment)
            owner = next(rank for rank, offered in enumerate(layouts) if key in offered)
            shape, dtype = layouts[owner][key]
            if dist.get_rank() == 0:
                taken[fragment] = _take(held[key] if owner == 0 else None, owner, shape, dtype, device)
            elif dist.get_rank() == owner:
                dist.send(held[key].detach().to(device).contiguous(), 0)
        if taken:
            gathered[name] = joined(taken)
    if dist.get_rank() == 0:
        write_model(model_path(run_dir, step), gathered)


def _gather_layouts(held: Mapping[str, Tensor]) -> list[dict[str, Layout]]:
    """What every rank holds, by rank."""
    own: dict[str, Layout] = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
    gathered: list[dict[str, Layout] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return [layouts for layouts in gathered if layouts is not None]


def _take(
    own: Tensor | None, owner: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A copy in host memory of rank 0's own tensor, or of the one that `owner` sends."""
    if own is not None:
        return own.detach().to("cpu", copy=True).contiguous()
    received = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(received, owner)
    return received.cpu()


def write_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors whole or not at all.

    Raises:
        InputError: the folder is not writable, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), temporary)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path}: the trained parameters cannot be written: {error}",
            hint="Check that the run's folder is writable and that the disk is not full.",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
