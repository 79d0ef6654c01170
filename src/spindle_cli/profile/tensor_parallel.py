"""How an op's layer is shared out by tensor parallelism, for estimates: which parameters each device has a
part of, and whose outputs the devices have to sum.

The plan is the workload's (`tp_plans`): a "colwise" linear map has its outputs split, a "rowwise" one its
inputs, as in Megatron (Shoeybi et al., arXiv 1909.08053, section 3). Each pair of the two needs one sum of an
activation in the forward pass, behind the rowwise map, and one in the backward pass, before the colwise one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.cluster import Cluster
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.graph import Op, TaskGraph
from spindle_cli.workload.types import Workload

# A group stays inside a node, and nodes have eight devices at most as a rule.
_DEGREES = (2, 4, 8)
# Dimension of a linear map's [out, in] weight that is split.
_SPLIT_DIMS: Mapping[str, int] = {"colwise": 0, "rowwise": 1}


@dataclass(frozen=True)
class LayerSplit:
    """An op's layer over `degree` devices.

    Attributes:
        degree: number of devices.
        dims: by parameter, as the op's module calls it, the dimension that is split.
        summed: modules whose outputs the devices sum.
    """

    degree: int
    dims: Mapping[str, int]
    summed: tuple[str, ...]

    def local(self, name: str, tensor: Tensor) -> Tensor:
        """An empty tensor like one device's part of parameter `name`; `tensor` if all have all of it."""
        if name not in self.dims:
            return tensor
        shape = list(tensor.shape)
        shape[self.dims[name]] //= self.degree
        return torch.empty(shape, dtype=tensor.dtype)


def degrees_on(cluster: Cluster | None) -> tuple[int, ...]:
    """Degrees of tensor parallelism to estimate; none without a cluster, as its links have to be known."""
    if cluster is None:
        return ()
    return tuple(degree for degree in _DEGREES if degree <= min(cluster.node_sizes))


def layer_split(workload: Workload, task: TaskGraph, op: Op, degree: int) -> LayerSplit | None:
    """How the op is split `degree` ways; None if its class has no plan, or not so many heads or channels.

    Raises:
        WorkloadError: the plan names a submodule that is no linear map of the layer, or an unknown way.
    """
    if op.target is None or op.coupled:
        return None
    layer = task.root.get_submodule(op.target)
    plan = workload.tp_plans.get(type(layer))
    if not plan:
        return None
    dims: dict[str, int] = {}
    summed: list[str] = []
    for path, way in plan.items():
        linear = _linear(layer, path, way)
        dim = _SPLIT_DIMS[way]
        if linear.weight.shape[dim] % degree:
            return None
        name = f"{op.target}.{path}"
        dims[f"{name}.weight"] = dim
        if way == "rowwise":
            summed.append(name)
        elif linear.bias is not None:
            dims[f"{name}.bias"] = 0
    return LayerSplit(degree, dims, tuple(summed)) if _heads_divide(layer, degree) else None


@contextmanager
def noting_sums(module: nn.Module, split: LayerSplit | None) -> Iterator[list[Tensor]]:
    """Collects, while the op runs, the activations that its devices sum."""
    noted: list[Tensor] = []

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        noted.append(output)

    hooks = [module.get_submodule(name).register_forward_hook(note) for name in split.summed] if split else []
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


def _linear(layer: nn.Module, path: str, way: object) -> nn.Linear:
    kind = type(layer).__name__
    if way not in _SPLIT_DIMS:
        raise WorkloadError(
            f"tp_plans: {kind}: {path}: found {way!r}, expected one of {', '.join(_SPLIT_DIMS)}"
        )
    found = dict(layer.named_modules()).get(path)
    if not isinstance(found, nn.Linear):
        what = "nothing" if found is None else f"a {type(found).__name__}"
        raise WorkloadError(f"tp_plans: {kind}: {path} is {what}, expected an nn.Linear of the layer")
    return found


def _heads_divide(layer: nn.Module, degree: int) -> bool:
    """Whether every attention of the layer that says so has a multiple of `degree` heads.

    Attention is known by an attribute `num_heads`, as torch's and most libraries' have it.
    """
    heads = [getattr(module, "num_heads", None) for module in layer.modules()]
    return all(count % degree == 0 for count in heads if isinstance(count, int))
