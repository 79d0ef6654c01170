"""What PEFT makes of a model: its adapters by themselves, and the model with them merged into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.errors import UsageError

ValueOf = Callable[[Tensor], Tensor]
_BASE = "base_layer."
_KEPT, _ORIGINAL = "modules_to_save.", "original_module."


def is_peft(module: nn.Module) -> bool:
    """Whether a module is a `PeftModel`; where peft is not installed nothing is."""
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(module, PeftModel)


def adapters(
    model: Any, value_of: ValueOf
) -> tuple[dict[str, Tensor], ValueOf, str, tuple[Callable[[Path], None], ...]]:
    """The tensors of the active adapter under the names that PEFT saves them by, where their values are, the
    name of their file, and what writes its configuration.
    """
    from peft import get_peft_model_state_dict

    adapter = _active(model)
    state = model.state_dict(keep_vars=True)
    tensors = get_peft_model_state_dict(
        model, state_dict=state, adapter_name=adapter, save_embedding_layers=False
    )
    config = deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    return dict(tensors), value_of, "adapter_model", (lambda folder: config.save_pretrained(str(folder)),)


def merged(model: Any, value_of: ValueOf) -> tuple[dict[str, Tensor], ValueOf, nn.Module]:
    """The model as it was before PEFT, by its names of then; of a layer with adapters the values are those
    with them merged in, by PEFT's own code, one layer at a time.

    Returns:
        Its tensors, where their values are, and the model inside.

    Raises:
        UsageError: some kind of adapter cannot be merged.
    """
    base, adapter = model.get_base_model(), _active(model)
    layers, wrappers = _wrapped(base)
    tensors: dict[str, Tensor] = {}
    inside: dict[int, tuple[nn.Module, str]] = {}
    for key, value in base.state_dict(keep_vars=True).items():
        prefix = _prefix(key, layers) or _prefix(key, wrappers)
        rest = key.removeprefix(prefix)
        if prefix in wrappers and prefix:
            kept = f"{_KEPT}{adapter}."
            if rest.startswith(kept):
                tensors[prefix + rest.removeprefix(kept)] = value
        elif prefix in layers and prefix:
            if rest.startswith(_BASE):
                plain = rest.removeprefix(_BASE)
                tensors[prefix + plain] = value
                inside[id(value)] = layers[prefix], plain
        else:
            tensors[key] = value

    def merged_value_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in inside:
            return value_of(tensor)
        layer, name = inside[id(tensor)]
        return _merged(layer, value_of).get_base_layer().state_dict()[name]  # type: ignore[no-any-return]  # peft is untyped

    return tensors, merged_value_of, base


def _active(model: Any) -> str:
    names = model.active_adapters
    if len(names) != 1:
        raise UsageError(f"--peft: {len(names)} adapters are active ({', '.join(names)}), expected one")
    return str(names[0])


def _wrapped(base: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """By their names and a dot: layers with adapters, and modules that are trained in the place of others."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    layers: dict[str, Any] = {}
    wrappers: dict[str, Any] = {}
    for name, module in base.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            wrappers[f"{name}."] = module
        elif isinstance(module, BaseTunerLayer) and isinstance(module, nn.Module):
            if not (hasattr(module, "merge") and hasattr(module, "base_layer")):
                raise UsageError(f"--peft merged: {name} (a {type(module).__name__}) cannot be merged")
            layers[f"{name}."] = module
    return layers, wrappers


def _prefix(key: str, prefixes: Mapping[str, Any]) -> str:
    """The longest of the known prefixes that a key begins with; '' if none is."""
    parts = key.split(".")
    candidates = (".".join(parts[:count]) + "." for count in range(len(parts) - 1, 0, -1))
    return next((candidate for candidate in candidates if candidate in prefixes), "")


def _merged(layer: nn.Module, value_of: ValueOf) -> Any:
    """A copy of a layer with its trained values, its adapters merged in."""
    made: Any = deepcopy(layer).to_empty(device="cpu")
    sources = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    targets = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(value_of(sources[name]))
        made.merge()
    return made
