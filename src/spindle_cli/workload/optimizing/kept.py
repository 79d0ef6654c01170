"""What optimizers keep of parameters: bytes, for a profile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from spindle_cli.units import format_bytes
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.optimizing.groups import OptimizerGroups, groups_of_graph
from spindle_cli.workload.optimizing.optimizer import state_per_param
from spindle_cli.workload.parameters import ParameterTable
from spindle_cli.workload.training.precision import number_format


@dataclass(frozen=True)
class KeptState:
    """What an optimizer keeps for some trained parameters, for each byte of them: bytes of state that devices
    may share, bytes that each device with the parameters keeps whole, and the share of the parameters that
    the latter is of.
    """

    shared: float = 0.0
    whole: float = 0.0
    whole_share: float = 0.0


class StateSizes:
    """What the optimizers of some train settings keep."""

    def __init__(self, train: TrainSettings, groups: OptimizerGroups) -> None:
        """Raises WorkloadError: an optimizer cannot be made."""
        self._groups = groups
        self._per_param = [train.state_per_param(state_per_param(choice)) for choice in groups.choices]
        self._shards = train.shard_optimizer

    def of(self, parameters: Iterable[tuple[str, Tensor]]) -> KeptState | None:
        """What is kept for parameters by canonical name; None where none of them is trained."""
        shared = whole = stepped_whole = total = 0.0
        for name, parameter in parameters:
            if name not in self._groups.of:
                continue
            num_bytes = parameter.numel() * parameter.itemsize
            index = self._groups.of[name]
            kept = num_bytes * self._per_param[index]
            total += num_bytes
            if self._shards and not self._groups.treats_elements_alone(name):
                whole += kept
                stepped_whole += num_bytes
            else:
                shared += kept
        if not total:
            return None
        return KeptState(shared / total, whole / total, stepped_whole / total)


def stepped_whole(train: TrainSettings, groups: OptimizerGroups, graph: WorkloadGraph) -> tuple[str, ...]:
    """For people: optimizers whose state is not spread over the devices that hold the same parameters,
    although `train` asks for that, and what it comes to.

    Raises:
        WorkloadError: an optimizer cannot be made.
    """
    if not train.shard_optimizer:
        return ()
    table, held_as = ParameterTable.of(graph), number_format(train)
    lines = []
    for index, choice in enumerate(groups.choices):
        found = [table.parameters[name] for name, group in groups.of.items() if group == index]
        sizes = [each.numel() * (held_as or each.dtype).itemsize for each in found]
        if choice.treats_elements_alone or not sizes:
            continue
        state = sum(sizes) * train.state_per_param(state_per_param(choice))
        which = "" if choice.name is None else f" (group {choice.name})"
        lines.append(
            f"{choice.optimizer}{which} steps whole parameters: every device that holds one of these "
            f"{len(sizes)} ({format_bytes(sum(sizes))}) keeps its state ({format_bytes(state)} of all) and "
            "steps it, and shares neither with others"
        )
    return tuple(lines)


def kept_per_param(train: TrainSettings, graph: WorkloadGraph) -> float:
    """Bytes of state for each byte of all trained parameters of a workload.

    Raises:
        WorkloadError: an optimizer cannot be made, or parameters do not fit the groups.
    """
    table = ParameterTable.of(graph)
    kept = StateSizes(train, groups_of_graph(train, graph)).of(table.parameters.items()) or KeptState()
    return kept.shared + kept.whole
