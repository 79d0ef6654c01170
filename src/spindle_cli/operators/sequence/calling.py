"""What an op calls its layer with, without running it: all tensors are on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from spindle_cli.analysis.fixed import without_values
from spindle_cli.analysis.without_data import Unread
from spindle_cli.operators.sequence.recording import NotBySequenceError
from spindle_cli.workload.building.attributes import swapped_tensors
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec

# That a layer is tried on.
_SAMPLES = 2


class _ReachedError(Exception):
    """The layer is called; with what."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the layer is called")
        self.args_given, self.kwargs_given = args, kwargs


@contextmanager
def called_on_meta(
    task: TaskGraph, op: Op, samples: int = _SAMPLES
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Everything is on the meta device inside; gives what the op calls its layer with.

    Args:
        task: whose op it is.
        op: that calls it.
        samples: how many its fields and inputs have, at most as many as the batch.

    Raises:
        NotBySequenceError: what comes before the layer does not run there.
    """
    module, samples = task.op_module(op), min(samples, task.task.batch_size)
    made: dict[int, Tensor] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    with (
        torch.random.fork_rng(devices=[]),
        torch.device("meta"),
        torch.enable_grad(),
        swapped_tensors(module, stand_in),
    ):
        yield _reach(module, task.root.get_submodule(str(op.target)), task.specs_of(op), samples)


def _reach(
    module: fx.GraphModule, layer: nn.Module, specs: Iterable[ValueSpec], samples: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def reached(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _ReachedError(args, kwargs)

    hook = layer.register_forward_pre_hook(reached, with_kwargs=True)
    try:
        with Unread():
            module(*(without_values(spec, samples, device="meta") for spec in specs))
    except _ReachedError as call:
        return call.args_given, call.kwargs_given
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        raise NotBySequenceError(f"what comes before it cannot be followed: {text}") from error
    finally:
        hook.remove()
    raise NotBySequenceError("it is not called")
