"""Which fields a model's forward takes: as the user says, or as models of Hugging Face do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from spindle_cli.errors import UsageError
from spindle_cli.init.types import FieldSpec

GivenFields: TypeAlias = Mapping[tuple[str | None, str], FieldSpec]  # by task (None: every task) and name
_SPEC = re.compile(
    r"(?:(?P<task>[^.=]+)\.)?(?P<name>[A-Za-z_]\w*)="
    r"(?:(?P<shape>\d+(?:x\d+)*)(?::int(?P<below>\d+))?|int(?P<alone>\d+))"
)
_EXPECTED = (
    "Expected NAME=SHAPE for numbers (image=3x224x224), NAME=SHAPE:intN for whole numbers below N "
    "(tokens=128:int32000), NAME=intN for one of them (label=int10); TASK.NAME=... for one task alone."
)
_MAX_LENGTH = 128  # tokens of a sample that we make up
_MAX_ELEMENTS = 2**31


def parse_fields(texts: Sequence[str]) -> GivenFields:
    """What `--field` says, by task (None: every task) and name.

    Raises:
        UsageError: not of the form that is expected, or one field twice.
    """
    fields: dict[tuple[str | None, str], FieldSpec] = {}
    for text in texts:
        match = _SPEC.fullmatch(text)
        if match is None:
            raise UsageError(f"--field {text!r} says no shape", hint=_EXPECTED)
        shape = tuple(int(size) for size in match["shape"].split("x")) if match["shape"] else ()
        below = match["below"] or match["alone"]
        elements = 1
        for size in shape:
            elements *= size
        if not 0 < elements <= _MAX_ELEMENTS or (below is not None and not 0 < int(below) < 2**63):
            raise UsageError(
                f"--field {text!r}: sizes and N have to be at least 1, and possible", hint=_EXPECTED
            )
        key = (match["task"], match["name"])
        if key in fields:
            raise UsageError(f"--field {text!r}: {match['name']!r} is given twice")
        fields[key] = FieldSpec(match["name"], shape, None if below is None else int(below))
    return fields


def require_used(fields: GivenFields, models: Mapping[str, nn.Module]) -> None:
    """Refuse a field that no model takes.

    Raises:
        UsageError: naming it, and what the models take.
    """
    for task, name in fields:
        if task is not None and task not in models:
            raise UsageError(
                f"--field {task}.{name}: there is no task {task!r}; there are {', '.join(models)}"
            )
        addressed = models if task is None else {task: models[task]}
        if not any(_takes(model, name) for model in addressed.values()):
            takes = "; ".join(
                f"{task_name}: {', '.join(_parameters(model))}" for task_name, model in addressed.items()
            )
            raise UsageError(f"--field {name}: no forward takes {name!r}", hint=f"What they take: {takes}.")


def fields_of(task: str, model: nn.Module, given: GivenFields) -> tuple[FieldSpec, ...]:
    """The fields of a task's batch, in the order of forward's parameters.

    Raises:
        UsageError: forward needs one of which nothing is known.
    """
    said = {name: spec for (of, name), spec in given.items() if of is None}
    said |= {name: spec for (of, name), spec in given.items() if of == task}
    inferred = _known_fields(model)
    parameters = _parameters(model)
    names = [name for name in parameters if name in said or name in inferred]
    names += [name for name in said if name not in parameters and _takes(model, name)]
    unknown = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in names
    ]
    if unknown or not names:
        what = f"forward needs {', '.join(unknown)}" if unknown else "forward needs no field by name"
        raise UsageError(
            f"task {task!r} ({type(model).__name__}): {what}, of which nothing is known",
            hint=f"Say with --field what one sample has. {_EXPECTED}",
        )
    return tuple(said.get(name) or inferred[name] for name in names)


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}


def _takes(model: nn.Module, name: str) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return name in _parameters(model) or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _known_fields(model: nn.Module) -> dict[str, FieldSpec]:
    """The fields of a model of Hugging Face, from its configuration; of other models none."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return {}
    takes = _parameters(model)
    makers: dict[str, Callable[[str, Any, str], FieldSpec | None]] = {
        "input_ids": _tokens,
        "pixel_values": _pixels,
        "input_values": _waveform,
        "input_features": _spectrogram,
        "labels": _labels,
    }
    made = {
        name: maker(name, config, type(model).__name__) for name, maker in makers.items() if name in takes
    }
    return {name: spec for name, spec in made.items() if spec is not None}


def _first(config: Any, *names: str) -> Any:
    """The first of these that the configuration or one of its parts has."""
    parts = [config, *(getattr(config, part, None) for part in ("text_config", "vision_config"))]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _tokens(name: str, config: Any, _: str) -> FieldSpec | None:
    words = _first(config, "vocab_size")
    if not isinstance(words, int):
        return None
    longest = _first(config, "max_position_embeddings", "n_positions", "max_target_positions")
    length = min(_MAX_LENGTH, longest) if isinstance(longest, int) and longest > 0 else _MAX_LENGTH
    return FieldSpec(name, (length,), words)


def _pixels(name: str, config: Any, _: str) -> FieldSpec | None:
    size, channels = _first(config, "image_size"), _first(config, "num_channels") or 3
    if isinstance(size, int):
        size = (size, size)
    if not isinstance(size, list | tuple) or len(size) != 2:
        return None
    return FieldSpec(name, (channels, *size))


def _waveform(name: str, config: Any, _: str) -> FieldSpec | None:
    rate = _first(config, "sampling_rate") or 16_000
    return FieldSpec(name, (rate,))  # one second


def _spectrogram(name: str, config: Any, _: str) -> FieldSpec | None:
    bins, positions = _first(config, "num_mel_bins"), _first(config, "max_source_positions")
    if not isinstance(bins, int) or not isinstance(positions, int):
        return None
    return FieldSpec(name, (bins, 2 * positions))  # the encoder's convolutions halve the frames


def _labels(name: str, config: Any, cls: str) -> FieldSpec | None:
    """Labels of what the class is for: one class of a sample, or a word of each of its tokens."""
    classes = _first(config, "num_labels")
    if re.search(r"For(Token|TokenClassification)", cls) and isinstance(classes, int):
        tokens = _tokens(name, config, cls)
        return None if tokens is None else FieldSpec(name, tokens.shape, classes)
    if "Classification" in cls:
        return FieldSpec(name, (), classes) if isinstance(classes, int) else None
    return _tokens(name, config, cls) if re.search(r"LM$|LMHead|ForConditionalGeneration", cls) else None
