"""Which tensors an export has, under which keys, and which files go beside them.

The files beside a model's tensors are there so that `from_pretrained` knows what they are of.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from spindle_cli.checkpoint.tensors import TensorSpec
from spindle_cli.errors import UsageError
from spindle_cli.export.peft import adapters, is_peft, merged
from spindle_cli.export.trained import TrainedModel
from spindle_cli.export.types import ExportOptions
from spindle_cli.files.artifact import read_data
from spindle_cli.files.writing import write_text

WriteBeside = Callable[[Path], None]


@dataclass(frozen=True)
class Selection:
    """What is written.

    Attributes:
        specs: of each tensor, in the order in which they go into shards.
        read: a tensor's values by its key.
        name: of the file, without its ending.
        companions: each writes files beside the tensors' (a configuration) into a folder.
    """

    specs: Mapping[str, TensorSpec]
    read: Callable[[str], Tensor]
    name: str = "model"
    companions: tuple[WriteBeside, ...] = field(default=())

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        value_of: Callable[[Tensor], Tensor],
        name: str = "model",
        companions: tuple[WriteBeside, ...] = (),
    ) -> Selection:
        """Select tensors by key, whose values `value_of` reads."""
        specs = {key: TensorSpec.of(tensor) for key, tensor in tensors.items()}
        return cls(specs, lambda key: value_of(tensors[key]), name, companions)


def select(model: TrainedModel, options: ExportOptions) -> Selection:
    """What these options ask for.

    Raises:
        UsageError: there is no such task, module or source; or it is no PEFT model.
    """
    if options.like is not None:
        return _like(model, options)
    if options.task is None:
        tensors = {
            f"{name}.{key}": value for name, root in model.roots.items() for key, value in state(root).items()
        }
        return Selection.of(tensors, model.value_of)
    root = _module(model, options)
    if options.peft == "adapters":
        return Selection.of(*adapters(root, model.value_of))
    if options.peft == "merged":
        tensors, value_of, base = merged(root, model.value_of)
        return Selection.of(without_tied(base, tensors), value_of, companions=of_module(base, tensors))
    tensors = state(root)
    if not options.is_folder:
        return Selection.of(tensors, model.value_of)
    return Selection.of(without_tied(root, tensors), model.value_of, companions=of_module(root, tensors))


def _module(model: TrainedModel, options: ExportOptions) -> nn.Module:
    task, name = options.task, options.module or ""
    assert task is not None
    roots = {**model.roots, **model.evaluated}
    if task not in roots:
        raise UsageError(f"--task {task}: the tasks are {', '.join(roots)}")
    try:
        module = roots[task].get_submodule(name)
    except AttributeError as error:
        children = ", ".join(key for key, _ in roots[task].named_children()) or "none"
        raise UsageError(
            f"--module {name}: task {task!r} has no such module; its own are {children}"
        ) from error
    if options.peft is not None and not is_peft(module):
        inner = [key for key, submodule in roots[task].named_modules() if key and is_peft(submodule)]
        alternatives = (
            f"of task {task!r} these are: {', '.join(inner)}" if inner else f"nor has task {task!r} any"
        )
        where = f"--module {name}" if name else f"--task {task}"
        raise UsageError(
            f"--peft {options.peft}: {where} is no PEFT model (a {type(module).__name__}); {alternatives}",
            hint="Name one with --module." if inner else None,
        )
    return module


def _like(model: TrainedModel, options: ExportOptions) -> Selection:
    """What was taken from a source of `init_from`, under the names there."""
    initial = model.initial
    if options.like not in initial.given:
        paths = ", ".join(initial.given) or "none"
        raise UsageError(f"--like {options.like}: no path of the workload's init_from; they are {paths}")
    index = initial.given.index(options.like)
    held = {**model.table.parameters, **model.table.buffers}
    tensors = {
        place.name: held[name]
        for name, place in initial.places.items()
        if initial.sources[name] == index and name in held
    }
    value_of: Callable[[Tensor], Tensor] = model.value_of
    if options.peft == "merged":
        for root in model.roots.values():
            for module in root.modules():
                if is_peft(module):
                    value_of = merged(module, value_of)[1]
    return Selection.of(tensors, value_of, companions=of_folder(initial.paths[index], tensors))


def state(root: nn.Module) -> dict[str, Tensor]:
    """A module's state dict: its own parameters and buffers."""
    return {key: value for key, value in root.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def without_tied(root: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the names that a model of transformers ties to others by itself when it loads."""
    tied = getattr(root, "all_tied_weights_keys", None) or {}
    counts: dict[int, int] = {}
    for value in tensors.values():
        counts[id(value)] = counts.get(id(value), 0) + 1
    kept: dict[str, Tensor] = {}
    for key, value in tensors.items():
        if key in tied and counts[id(value)] > 1:
            counts[id(value)] -= 1
        else:
            kept[key] = value
    return kept


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
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None
