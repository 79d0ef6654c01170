"""Tensor parallelism in estimates: its degrees on a cluster, and the activations that its devices sum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from spindle_cli.files.cluster import Cluster
from spindle_cli.operators.split_op import SplitRegion
from spindle_cli.operators.tensor_group import TensorGroup
from spindle_cli.operators.tensor_parallel import LayerSplit

# A group stays inside a node, and nodes have eight devices at most as a rule.
_DEGREES = (2, 4, 8)


def degrees_on(cluster: Cluster | None) -> tuple[int, ...]:
    """Degrees of tensor parallelism to estimate; none without a cluster, as its links have to be known."""
    if cluster is None:
        return ()
    return tuple(degree for degree in _DEGREES if degree <= min(cluster.node_sizes))


def along_sequence(
    module: nn.Module, split: LayerSplit | None, group: TensorGroup
) -> AbstractContextManager[None]:
    """Run the op inside on a device's positions, where its devices share out the sequence."""
    if split is None or split.sequence is None:
        return nullcontext()
    return SplitRegion(module, split, group, draws_apart=False).entered()


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
