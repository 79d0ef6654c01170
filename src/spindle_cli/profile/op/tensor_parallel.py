"""Tensor parallelism of an op run alone: its degrees on a cluster, what its devices sum, and which positions
one of them has of the trunk between its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from spindle_cli.files.cluster import Cluster
from spindle_cli.operators.split_op import region_of
from spindle_cli.operators.tensor_group import Shared, TensorGroup
from spindle_cli.operators.tensor_parallel import LayerSplit

# A group stays inside a node, and nodes have eight devices at most as a rule.
_DEGREES = (2, 4, 8)


def degrees_on(cluster: Cluster | None, device: str | None = None) -> tuple[int, ...]:
    """Degrees of tensor parallelism to look at, which every node has room for; none without a cluster, as its
    links have to be known.

    Args:
        device: a type of the cluster, whose nodes count then alone; all do where it has none of that type.
    """
    if cluster is None:
        return ()
    sizes = [group.devices for group in cluster.nodes if group.device == device] or cluster.node_sizes
    return tuple(degree for degree in _DEGREES if degree <= min(sizes))


def along_sequence(
    module: nn.Module, split: LayerSplit | None, group: TensorGroup
) -> AbstractContextManager[None]:
    """Run the op inside on a device's positions, or samples, where its devices share these out."""
    if split is None or (split.sequence is None and split.experts is None):
        return nullcontext()
    return region_of(module, split, group, draws_apart=False).entered()


@contextmanager
def noting_sums(module: nn.Module, split: LayerSplit | None) -> Iterator[list[Tensor]]:
    """Collects, while the op runs, the activations that its devices sum; where they share out the sequence,
    they sum none.
    """
    noted: list[Tensor] = []

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        noted.append(output)

    names = split.summed if split is not None and split.sequence is None else ()
    hooks = [module.get_submodule(name).register_forward_hook(note) for name in names]
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


class OwnPositions:
    """The first device's positions, or samples; `inputs`: the op's, of what comes in parts these alone."""

    def __init__(self, split: LayerSplit | None, group: TensorGroup, inputs: Sequence[Tensor]) -> None:
        """`split`: None, or without parts, leaves everything whole."""
        self.inputs = list(inputs)
        self._is_shared = split is not None and not (split.sequence is None and split.experts is None)
        self._parts = {} if split is None else split.parts_taken(group)
        self._lengths: dict[int, int] = {}
        for place, part in self._parts.items():
            whole = inputs[place]
            self._lengths[place] = whole.shape[part.dim]
            self.inputs[place] = part.part_of(whole.detach()).requires_grad_(whole.requires_grad)

    def given(self, arguments: Sequence[Any]) -> list[Any]:
        """Return what the op takes, from tensors like `inputs`."""
        given = list(arguments)
        for place, part in self._parts.items():
            given[place] = Shared(given[place], self._lengths[place], part)
        return given

    def called(self, module: nn.Module) -> nn.Module:
        """Return the op as a module that takes `inputs`, and gives tensors."""
        return _OnTensors(module, self) if self._is_shared else module


def tensors_of(result: Any) -> Any:
    """Return what an op gives, with tensors in place of parts of them."""
    if isinstance(result, tuple):
        return tuple(tensors_of(entry) for entry in result)
    return result.tensor if isinstance(result, Shared) else result


class _OnTensors(nn.Module):
    def __init__(self, module: nn.Module, positions: OwnPositions) -> None:
        super().__init__()
        self.module = module
        self._positions = positions

    def forward(self, *arguments: Any) -> Any:
        return tensors_of(self.module(*self._positions.given(arguments)))
