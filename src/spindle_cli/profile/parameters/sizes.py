"""Bytes that the ops of a MetaOp hold: of their parameters, of what optimizers keep of these, and of tensors
that modules hold as plain attributes, which are no parameters or buffers, and in memory all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from spindle_cli.operators.tensor_parallel import LayerSplit
from spindle_cli.profile.types import OptimizerBytes
from spindle_cli.training.optimizing.groups import StateSizes
from spindle_cli.workload.graph import Op, ParameterTable, TaskGraph


@dataclass(frozen=True)
class ParameterSizes:
    """Bytes, as the profile has them.

    Attributes:
        layer_bytes: of one op's own layer; `whole_bytes`: of these, what tensor parallelism leaves whole; 0
            where it cannot split the layer.
        extra_bytes: of glue, by op; `split_extra_bytes`: of these, what tensor parallelism splits.
        trained_share: of all of them, what is trained.
    """

    layer_bytes: int
    whole_bytes: int
    extra_bytes: dict[int, int]
    split_extra_bytes: dict[int, int]
    trained_share: float


def parameter_sizes(
    task: TaskGraph, ops: Sequence[Op], split_of: Callable[[Op], LayerSplit | None]
) -> ParameterSizes:
    """Sizes of what the ops of a MetaOp hold: parameters, and as such that are not trained buffers, and
    tensors that a layer's modules hold as plain attributes. What an op has under several names counts once.
    """
    of_ops = [_sizes_of_op(task, op, split_of(op)) for op in ops]
    total = sum(sizes.layer + sizes.glue for sizes in of_ops)
    return ParameterSizes(
        layer_bytes=max((sizes.layer for sizes in of_ops), default=0),
        whole_bytes=max((sizes.layer_whole for sizes in of_ops), default=0),
        extra_bytes={position: sizes.glue for position, sizes in enumerate(of_ops) if sizes.glue},
        split_extra_bytes={n: sizes.glue_split for n, sizes in enumerate(of_ops) if sizes.glue_split},
        trained_share=sum(sizes.trained for sizes in of_ops) / total if total else 1.0,
    )


class _OpSizes(NamedTuple):
    """Bytes of what an op holds in its layer and beside it.

    Attributes:
        layer_whole: what of the layer tensor parallelism does not split, where it splits the op; else 0.
        glue_split: what beside the layer it splits.
        trained: what of all is trained.
    """

    layer: int
    layer_whole: int
    glue: int
    glue_split: int
    trained: int


def _sizes_of_op(task: TaskGraph, op: Op, split: LayerSplit | None) -> _OpSizes:
    layer = 0 if op.target is None else attribute_bytes(task.root.get_submodule(op.target))
    glue = layer_split = glue_split = trained = 0
    tensors = {name: _tensor(task, name) for name in (*op.parameters, *op.buffers)}
    once = {id(tensor): name for name, tensor in reversed(tensors.items())}
    for name in once.values():
        num_bytes = tensors[name].numel() * tensors[name].itemsize
        trained += num_bytes * tensors[name].requires_grad
        split_bytes = num_bytes if split is not None and name in split.dims else 0
        if name in op.layer_parameters or _is_within(name, op.target):
            layer += num_bytes
            layer_split += split_bytes
        else:
            glue += num_bytes
            glue_split += split_bytes
    return _OpSizes(layer, 0 if split is None else layer - layer_split, glue, glue_split, trained)


def _tensor(task: TaskGraph, name: str) -> Tensor:
    """Return a parameter or buffer by its dotted name."""
    owner, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(task.root.get_submodule(owner), attribute)
    return tensor


def _is_within(name: str, op_target: str | None) -> bool:
    return op_target is not None and name.startswith(f"{op_target}.")


def attribute_bytes(module: nn.Module) -> int:
    """Return the bytes of the tensors that are attributes of a module or of those in it, also in lists and
    dicts of its own; each tensor once, parameters and buffers not.
    """
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    tensor_by_id = {
        id(tensor): tensor
        for part in module.modules()
        for name, value in part.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules")
        for tensor in _tensors(value)
        if id(tensor) not in registered
    }
    return sum(tensor.numel() * tensor.itemsize for tensor in tensor_by_id.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, Tensor))
    elif isinstance(value, dict):
        yield from (item for item in value.values() if isinstance(item, Tensor))


@dataclass(frozen=True)
class KeptByOptimizers:
    """What optimizers keep of the parameters of ops."""

    sizes: StateSizes
    table: ParameterTable

    def by(self, task: TaskGraph, ops: Sequence[Op]) -> OptimizerBytes | None:
        """Return what the optimizer keeps for the parameters of a task's ops, each counted once."""
        names = {self.table.names[task.task.name, dotted] for op in ops for dotted in op.parameters}
        kept = self.sizes.of((name, self.table.parameters[name]) for name in sorted(names))
        if kept is None:
            return None
        return OptimizerBytes(
            state_per_param=kept.shared, whole_state_per_param=kept.whole, whole_share=kept.whole_share
        )
