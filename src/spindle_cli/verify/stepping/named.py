"""A workload's parameters and buffers by the names that both runs write them under."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from spindle_cli.workload.graph import root_of
from spindle_cli.workload.types import Workload


def parameters_by_name(workload: Workload) -> dict[str, nn.Parameter]:
    """Return each distinct parameter once, as '<first task that has it>.<its dotted name there>'."""
    names_by_id: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    for task in workload.tasks:
        for name, parameter in root_of(task).named_parameters():
            if id(parameter) not in names_by_id:
                names_by_id[id(parameter)] = f"{task.name}.{name}"
                parameters[names_by_id[id(parameter)]] = parameter
    return parameters


def buffer_places(workload: Workload) -> dict[str, tuple[nn.Module, str]]:
    """Return where each distinct buffer is, named as parameters are: the module that holds it, its name
    there.
    """
    names_by_id: dict[int, str] = {}
    places: dict[str, tuple[nn.Module, str]] = {}
    for task in workload.tasks:
        root = root_of(task)
        for name, buffer in root.named_buffers():
            if id(buffer) not in names_by_id:
                owner, _, attribute = name.rpartition(".")
                names_by_id[id(buffer)] = f"{task.name}.{name}"
                places[names_by_id[id(buffer)]] = (root.get_submodule(owner), attribute)
    return places


def buffers_at(places: Mapping[str, tuple[nn.Module, str]]) -> dict[str, Tensor]:
    """Return what the modules hold there now; complex numbers as pairs."""
    buffers = {name: getattr(module, attribute) for name, (module, attribute) in places.items()}
    return {name: as_real(buffer) for name, buffer in buffers.items()}


def as_real(tensor: Tensor) -> Tensor:
    """View a tensor's numbers as real ones, complex ones as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
