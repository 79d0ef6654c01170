"""States of datasets as JSON, so that a checkpoint can have them: nothing here is pickled."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spindle_cli.errors import WorkloadError

_TAG = "spindle:"


def to_json(value: Any, task: str) -> Any:
    """A state as JSON.

    Raises:
        WorkloadError: it has something else than dicts with texts or numbers as keys, lists, tuples, texts,
            bytes, numbers, tensors and arrays.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        pairs = [[key, to_json(each, task)] for key, each in value.items()]
        if all(isinstance(key, str) and not key.startswith(_TAG) for key in value):
            return {str(key): each for key, each in pairs}
        return {f"{_TAG}dict": pairs}
    if isinstance(value, list):
        return [to_json(each, task) for each in value]
    if isinstance(value, tuple):
        return {f"{_TAG}tuple": [to_json(each, task) for each in value]}
    if isinstance(value, bytes):
        return {f"{_TAG}bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return {f"{_TAG}tensor": to_json(value.detach().cpu().numpy(), task)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {f"{_TAG}array": [value.dtype.str, list(value.shape), data]}
    raise WorkloadError(
        f"task {task!r}: its dataset's state_dict() has a {type(value).__name__}, which no checkpoint "
        "can have",
        hint="Let it have numbers, texts, bytes, tensors, arrays, lists and dicts alone; or leave "
        "state_dict out: then the stream is read from its beginning to go on.",
    )


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, content),) = value.items()
        match key:
            case "spindle:dict":
                return {each[0]: from_json(each[1]) for each in content}
            case "spindle:tuple":
                return tuple(from_json(each) for each in content)
            case "spindle:bytes":
                return base64.b64decode(content)
            case "spindle:tensor":
                return torch.from_numpy(from_json(content))
            case "spindle:array":
                dtype, shape, data = content
                return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
    return {key: from_json(each) for key, each in value.items()}
