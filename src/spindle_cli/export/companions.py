"""The files that stand beside a model's tensors, so that `from_pretrained` knows what they are of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from spindle_cli.files.artifact import read_data
from spindle_cli.files.writing import write_text

CONFIG_FILE = "config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_LARGEST = 100 * 2**20  # of a file that is copied: tokenizers are smaller

Companions = tuple[Callable[[Path], None], ...]


def of_module(module: nn.Module, tensors: Mapping[str, Tensor]) -> Companions:
    """The configuration of a model of transformers; nothing of other modules."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained"):
        return ()

    def write(folder: Path) -> None:
        written = deepcopy(config)
        written.architectures = [type(module).__name__.removeprefix("FSDP")]
        if (dtype := _dtype(tensors)) is not None:
            written.dtype = dtype
        written.save_pretrained(folder)
        generation: Any = getattr(module, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(folder)

    return (write,)


def of_folder(source: Path, tensors: Mapping[str, Tensor]) -> Companions:
    """All that stands beside the weights in a folder, its configuration with the dtype of these tensors."""
    folder = source if source.is_dir() else source.parent
    if not (folder / CONFIG_FILE).is_file():
        return ()

    def write(target: Path) -> None:
        for path in sorted(folder.iterdir()):
            if _goes_along(path):
                shutil.copyfile(path, target / path.name)
        config = read_data(folder / CONFIG_FILE)
        dtype = _dtype(tensors)
        if isinstance(config, dict) and dtype is not None:
            for key in ("dtype", "torch_dtype"):
                if key in config:
                    config[key] = dtype
        write_text(target / CONFIG_FILE, json.dumps(config, indent=2) + "\n")

    return (write,)


def _goes_along(path: Path) -> bool:
    is_weight = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
    return path.is_file() and not is_weight and path.name[0] != "." and path.stat().st_size <= _LARGEST


def _dtype(tensors: Mapping[str, Tensor]) -> str | None:
    """The dtype of all floating-point tensors; None: they have several."""
    found = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return str(found.pop()).removeprefix("torch.") if len(found) == 1 else None
