"""Samples that lack a field, such as an image that is not there: what stands in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spindle_cli.errors import WorkloadError

_HINT = "An item has the field as `absent` has it, in shape and dtype, or not at all."


def presence_of(field: str) -> str:
    """Name of the field that says whether a sample has another."""
    return f"has_{field}"


def filled(task: str, absent: Mapping[str, Tensor], item: Any) -> Any:
    """A dataset's item with every field of `absent`, and beside each whether the item has it by itself.

    Without `absent` any item is as it is.

    Raises:
        WorkloadError: the item is no dict, says by itself whether it has a field, or has one of another shape
            or dtype than what would stand in its place.
    """
    if not absent:
        return item
    if not isinstance(item, Mapping):
        raise WorkloadError(
            f"task {task!r}: an item is a {type(item).__name__}, expected a dict of fields",
            hint="Fields that some samples lack (`absent`) are told by their names.",
        )
    whole = dict(item)
    for name, stand_in in absent.items():
        presence = presence_of(name)
        if presence in item:
            raise WorkloadError(
                f"task {task!r}: an item has the field {presence!r}, which tells whether it has {name!r}",
                hint="Leave it out: Spindle adds it for every field of `absent`.",
            )
        value = item.get(name)
        whole[name] = stand_in if value is None else _alike(task, name, value, stand_in)
        whole[presence] = torch.tensor(value is not None)
    return whole


def _alike(task: str, name: str, value: Any, stand_in: Tensor) -> Tensor:
    try:
        there = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WorkloadError(
            f"task {task!r}: an item has {name!r} as a {type(value).__name__}, expected a tensor", hint=_HINT
        ) from error
    if there.shape != stand_in.shape or there.dtype != stand_in.dtype:
        raise WorkloadError(
            f"task {task!r}: an item has {name!r} as {_described(there)}, and `absent` has it as "
            f"{_described(stand_in)}",
            hint=_HINT,
        )
    return there


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"
