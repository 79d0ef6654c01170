"""A run's model without its memory: names, shapes, and each tensor on demand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from spindle_cli.analysis.localise import load_local
from spindle_cli.checkpoint.files import StoredCheckpoint
from spindle_cli.checkpoint.index import AVERAGE_KEY, COMMON_KEY, model_key, optimizer_keys, state_key
from spindle_cli.checkpoint.tensors import WholeTensors
from spindle_cli.errors import InputError
from spindle_cli.workload.graph import ParameterTable, root_of
from spindle_cli.workload.initial.types import InitialValues


class TrainedModel:
    """The tasks' modules, on the meta device where the checkpoint has the values, and these one by one.

    Attributes:
        roots: of the tasks; what no operator uses is in no checkpoint, and is real in them.
        evaluated: the same of the tasks that are only evaluated, and of what only these use.
        table: of the names of all parameters and buffers.
        initial: what the run began with from files.
    """

    def __init__(self, workload: str, saved: WholeTensors, *, averaged: bool = False) -> None:
        """Raises what `trained_model` raises."""
        self._averaged = averaged
        loaded = load_local(workload, {}, unused=True)
        self.roots: dict[str, nn.Module] = {name: task.root for name, task in loaded.graph.tasks.items()}
        self.evaluated = {task.name: root_of(task) for task in loaded.workload.evaluated}
        self.table = ParameterTable.of(loaded.graph)
        self.initial: InitialValues = loaded.initial
        self._saved = saved
        self._take_shapes()
        self._names = {
            id(tensor): name
            for tensors in (self.table.parameters, self.table.buffers)
            for name, tensor in tensors.items()
        }
        for name, parameter in self.table.parameters.items():
            if self.table.users[name]:
                saved.require(self._key(name), tuple(parameter.shape))

    def _take_shapes(self) -> None:
        """Let buffers have the shapes that forward has given them: a table of angles may have grown."""
        others = {
            id(buffer): name
            for name, buffer in self.table.buffers.items()
            if self._saved.has(model_key(name)) and self._saved.shape(model_key(name)) != buffer.shape
        }
        for root in (*self.roots.values(), *self.evaluated.values()):
            for module in root.modules():
                for attribute, buffer in module._buffers.items():
                    name = None if buffer is None else others.get(id(buffer))
                    if buffer is not None and name is not None:
                        shape = self._saved.shape(model_key(name))
                        self.table.buffers[name] = buffer.new_empty(shape, device="meta")
                        module._buffers[attribute] = self.table.buffers[name]

    def name_of(self, tensor: Tensor) -> str | None:
        """The canonical name of a parameter or buffer of the modules."""
        return self._names.get(id(tensor))

    def value_of(self, tensor: Tensor) -> Tensor:
        """The trained values of one of the modules' parameters or buffers, in its own dtype.

        Raises:
            InputError: the checkpoint cannot be read.
        """
        name = self.name_of(tensor)
        if name is None or not self._saved.has(model_key(name)):
            if tensor.is_meta:
                raise InputError(f"{name}: neither the checkpoint nor the workload's build has its values")
            return tensor.detach()
        return self._saved.read(self._key(name)).to(tensor.dtype)

    def _key(self, name: str) -> str:
        """Where the checkpoint has what is asked for; frozen weights and buffers have no average. Of islands
        that average now and then alone, what is trained is their last common point.
        """
        for key in (AVERAGE_KEY, COMMON_KEY) if self._averaged else (COMMON_KEY,):
            if self._saved.has(state_key(name, key)):
                return state_key(name, key)
        return model_key(name)


@contextmanager
def trained_model(
    stored: StoredCheckpoint, workload: str, *, averaged: bool = False
) -> Iterator[TrainedModel]:
    """What a checkpoint holds of a workload; with `averaged` the moving average of its weights.

    Raises:
        InputError: the checkpoint lacks something that the workload uses, or has it in another shape.
        WorkloadError: the workload cannot be built or traced.
    """
    with WholeTensors(stored.folder, stored.checkpoint) as saved:
        if averaged and not any(keys_end_in_average(stored)):
            raise InputError(
                f"{stored.folder}: there is no average of the weights in it",
                hint="A run keeps one with `ema` in its train settings, from its first averaging on.",
            )
        yield TrainedModel(workload, saved, averaged=averaged)


def keys_end_in_average(stored: StoredCheckpoint) -> Iterator[bool]:
    """Say for each parameter with optimizer state whether an average of it was saved."""
    return (AVERAGE_KEY in keys for keys in optimizer_keys(stored.checkpoint.tensors).values())
