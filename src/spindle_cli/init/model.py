"""The model that a user names, built without its parameters' memory."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from spindle_cli.errors import UsageError, WorkloadError
from spindle_cli.init.types import ModelSource
from spindle_cli.workload.building.load import Wanted, named_function, settled_module_name, without_parameters
from spindle_cli.workload.refuse import place_of_error
from spindle_cli.workload.types import Workload

_MODEL = Wanted(
    "a model",
    "an nn.Module, or a dict of them by task",
    "Expected 'package.module:name' or 'path/to/file.py:name': a class of nn.Module, or a function.",
)


@dataclass(frozen=True)
class BuiltModel:
    """A model for each task, with its parameters on the meta device.

    `is_alone`: the source gave one module, and no dict of them.
    """

    source: ModelSource
    models: dict[str, nn.Module]
    is_alone: bool


def build_model(text: str, arguments: Mapping[str, Any]) -> BuiltModel:
    """What `text` names, called with `arguments`.

    A class of Hugging Face's is built from its configuration with these arguments.

    Raises:
        InputError: no such file, module or name.
        UsageError: it needs arguments that are not given.
        WorkloadError: it fails, or returns something else.
    """
    named = named_function(text, Path.cwd(), where="model", wanted=_MODEL)
    if isinstance(named, nn.Module):
        raise WorkloadError(
            f"model {text!r} is a module that is there already, expected what builds one",
            hint="Every worker builds the model anew: name a function that does, or the class.",
        )
    config = _config_class(named)
    build = _from_config(named, config) if config is not None else named
    _require_arguments(text, build, arguments)
    try:
        with without_parameters():
            made = build(**arguments)
    except Exception as error:
        place = place_of_error(error)
        raise WorkloadError(
            f"{f'{place}: ' if place else ''}building {text!r} failed: {type(error).__name__}: {error}",
            hint="Give its arguments with --arg NAME=VALUE, or name a function of yours that builds it.",
        ) from error
    models = _by_task(text, made)
    has_cache = config is not None and any(
        hasattr(getattr(model, "config", None), "use_cache") for model in models.values()
    )
    source = ModelSource(_module_of(text), text.rpartition(":")[2], config, has_cache, dict(arguments))
    return BuiltModel(source, models, isinstance(made, nn.Module))


def _config_class(named: Any) -> type | None:
    config_class = getattr(named, "config_class", None)
    return config_class if isinstance(named, type) and isinstance(config_class, type) else None


def _from_config(model: Any, config: type) -> Callable[..., Any]:
    def build(**settings: Any) -> Any:
        made: Any = config(**settings)
        if hasattr(made, "use_cache"):
            made.use_cache = bool(settings.get("use_cache"))
        return model(made)

    return build


def _module_of(text: str) -> str:
    module = text.rpartition(":")[0]
    return Path(module).stem if module.endswith(".py") else module


def _require_arguments(text: str, build: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raises: UsageError: an argument lacks, or one is given that is not taken."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):
        return  # calling it says what is wrong
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"model {text!r}: {error}; it takes {signature}",
            hint="Give its arguments with --arg NAME=VALUE, or name a function of yours that builds it.",
        ) from error


def _by_task(text: str, made: Any) -> dict[str, nn.Module]:
    if isinstance(made, Workload):
        raise WorkloadError(
            f"model {text!r} is a workload already", hint="Profile it: spindle profile " + text
        )
    if isinstance(made, nn.Module):
        family = getattr(getattr(made, "config", None), "model_type", None)
        return {family if isinstance(family, str) and family else snake_case(text.rpartition(":")[2]): made}
    if isinstance(made, Mapping) and made:
        wrong = [key for key in made if not isinstance(key, str) or not key or "/" in key or "." in key]
        if wrong:
            raise WorkloadError(
                f"model {text!r}: a task is named {wrong[0]!r}; expected a name without '/' and '.'"
            )
        if all(isinstance(module, nn.Module) for module in made.values()):
            return dict(made)
    raise WorkloadError(f"model {text!r} gives a {type(made).__name__}; expected {_MODEL.returns}")


def snake_case(name: str) -> str:
    """'LlamaForCausalLM' -> 'llama_for_causal_lm'."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return words.lower()


def import_path(cls: type) -> tuple[str, str] | None:
    """Module and name that a class can be imported by from beside the user's file; None if it cannot."""
    if "<locals>" in cls.__qualname__:
        return None
    return settled_module_name(cls.__module__), cls.__qualname__
