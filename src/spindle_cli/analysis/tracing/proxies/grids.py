"""What transformers computes of the grids of images and videos, in a trace.

It reads the grids' values (`tolist`) and works through images and samples one after another, so these calls
stay calls: every share of a batch makes them with its own grids.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from spindle_cli.analysis import fixed
from spindle_cli.errors import WorkloadError

_LIBRARY = "transformers."
_OF_GRIDS = "transformers.vision_utils"
# Of that module: what takes a grid and numbers, and gives tensors.
_NAMES = ("get_vision_position_ids", "get_vision_window_index")
_ROPE = "get_rope_index"
# What an entry of mm_token_type_ids says of the fields with a row for every image or video.
_KINDS = {"image_grid_thw": 1, "video_grid_thw": 2}
# What it keeps for the next token when text is generated.
_GENERATING = frozenset({"rope_deltas"})


def keeps_for_generating(module: nn.Module, name: str) -> bool:
    """Whether a module of transformers keeps under this name what a forward for training never reads."""
    return name in _GENERATING and type(module).__module__.startswith(_LIBRARY)


class OfGrids:
    """A function of transformers of grids, as a call in a trace: with their values where they are known."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return fixed.computed(self._function, args, kwargs)

    def __repr__(self) -> str:
        return f"{self._function.__module__}.{self._function.__qualname__}"


class RopeIndex:
    """transformers' `get_rope_index` as a call in a trace, which takes each sample by itself.

    It goes through the samples in order and takes as many grids for each as the sample has images and videos.
    """

    def __init__(self, model: nn.Module, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._model: Any = type(model).__new__(type(model))
        nn.Module.__init__(self._model)
        self._model.config = model.config
        self._method = method

    def __repr__(self) -> str:
        return f"{self._method.__module__}.{self._method.__qualname__} {self._model.config.to_dict()}"

    def __call__(self, **fields: Any) -> tuple[Tensor, Tensor]:
        """Positions of shape (3, samples, tokens), and of each sample how far they are from counting on.

        Raises:
            WorkloadError: a sample has more or fewer images or videos than rows in its part of the grids.
        """
        tokens: Tensor = fields["input_ids"]
        tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        if not all(map(_has_values, tensors.values())):
            return _like(tokens, list(tensors.values()))
        given: tuple[Tensor, Tensor] = fixed.computed(self._per_sample, (tokens, tensors, fields), {})
        return given

    def _per_sample(
        self, tokens: Tensor, tensors: dict[str, Tensor], fields: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        positions = []
        for sample in range(tokens.shape[0]):
            sample_tensors = {name: _rows(value, sample, tokens.shape[0]) for name, value in tensors.items()}
            _check_grids(sample_tensors)
            positions.append(self._method(self._model, **{**fields, **sample_tensors}))
        return torch.cat([ids for ids, _ in positions], 1), torch.cat([deltas for _, deltas in positions])


def _has_values(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def _rows(value: Tensor, sample: int, samples: int) -> Tensor:
    per_sample = value.shape[0] // samples
    if per_sample * samples != value.shape[0]:
        raise WorkloadError(
            f"get_rope_index: {value.shape[0]} rows of grids for {samples} samples",
            hint="Give every sample as many images.",
        )
    return value[sample * per_sample : (sample + 1) * per_sample]


def _check_grids(sample_tensors: dict[str, Tensor]) -> None:
    """Refuse a sample whose images and videos are not as many as its grids: others would get them."""
    types = sample_tensors["mm_token_type_ids"][0]
    mask = sample_tensors.get("attention_mask")
    kinds = types if mask is None else types[mask[0].bool()]
    begins = torch.ones_like(kinds, dtype=torch.bool)
    begins[1:] = kinds[1:] != kinds[:-1]
    for name, kind in _KINDS.items():
        if name in sample_tensors:
            shown, rows = int((begins & (kinds == kind)).sum()), sample_tensors[name].shape[0]
            if shown != rows:
                raise WorkloadError(
                    f"field {name!r} has {rows} rows of a sample whose mm_token_type_ids show {shown}",
                    hint="Give every sample a row of the grid for each of its images (or videos).",
                )


def _like(tokens: Tensor, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The shapes, and how samples are treated, of tensors without values."""
    samples = tokens.shape[0]
    of_all = torch.stack([tensor.reshape(samples, -1).sum(1) for tensor in tensors], 1).sum(1, keepdim=True)
    return (tokens + of_all.to(tokens.dtype)).expand(3, -1, -1), of_all.to(torch.int64)


@contextlib.contextmanager
def grids_are_calls(root: nn.Module, tracer: Any) -> Iterator[None]:
    """Record, inside, what transformers computes of grids as calls."""
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    try:
        for names in {id(space): space for space in _namespaces(root)}.values():
            for name in _NAMES:
                function = getattr(names, name, None)
                if inspect.isfunction(function) and function.__module__ == _OF_GRIDS:
                    put(names, name, _recorded(function, tracer))
        for cls in {type(module): None for module in root.modules()}:
            owner = next((base for base in cls.__mro__ if _ROPE in vars(base)), None)
            if owner is not None and owner.__module__.startswith(_LIBRARY):
                put(owner, _ROPE, _recorded_rope(vars(owner)[_ROPE], tracer))
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def _namespaces(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        for base in type(module).__mro__:
            if base.__module__.startswith(_LIBRARY) and base.__module__ in sys.modules:
                yield sys.modules[base.__module__]


def _recorded(function: Callable[..., Any], tracer: Any) -> Callable[..., Any]:
    target = OfGrids(function)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        more = given.pop("kwargs", None) or {}
        grids = [value for value in given.values() if isinstance(value, fx.Proxy)]
        ready = any(name.endswith(("position_ids", "window_index", "cu_window_seqlens")) for name in more)
        if not grids or ready:
            return function(*args, **kwargs)
        return _parts(tracer.create_proxy("call_function", target, (), given), tracer)

    return call


def _recorded_rope(method: Callable[..., Any], tracer: Any) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = {name: value for name, value in bound.arguments.items() if value is not None}
        model = given.pop("self")
        given.update(given.pop("kwargs", {}))
        if not isinstance(given.get("input_ids"), fx.Proxy) or "mm_token_type_ids" not in given:
            return method(*args, **kwargs)
        return _parts(tracer.create_proxy("call_function", RopeIndex(model, method), (), given), tracer)

    return call


def _parts(made: Any, tracer: Any) -> Any:
    count = tracer.known.parts(made)
    return made if count is None else tuple(made[part] for part in range(count))
