"""Run a piece of code for several sizes of the batch, and note its operators with what each makes of samples.

On tensors without data, outside of whatever else looks at what runs: it may be called in the middle of a
training step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from spindle_cli.analysis.autograd import SavedTensorsHooks
from spindle_cli.analysis.pairs.follow import Argument, PairsFollower, Recording
from spindle_cli.analysis.rules.tape import Tape
from spindle_cli.analysis.rules.types import Mixed, MixesError
from spindle_cli.analysis.tracing.observe import failures_unlogged
from spindle_cli.workload.building.attributes import Changes, swapped_tensors, watching
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec
from spindle_cli.workload.refuse import place_of_error

# Sizes of the batch to run with besides its own: as those of `Samples`.
_TRIED = (3, 5, 7)


def record(run: Callable[..., Any], module: nn.Module, arguments: Sequence[Argument], size: int) -> Recording:
    """Record `run(*arguments)` for a batch of `size` samples.

    Args:
        run: uses the parameters and buffers of `module`, and gives a loss.

    Raises:
        MixesError: shares of it do not add up, or nothing is known of that; with the user's line.
    """
    sizes = (*[tried for tried in _TRIED if tried != size][:2], size)
    tapes: list[Tape] = []
    results: list[Any] = []
    autocast = _Autocast()
    with _apart() as mode, autocast.again():
        made: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                with mode:
                    like = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=arguments[0].device
                    )
                # Of what is not trained torch may take an operator without a backward pass (embedding_bag's).
                made[id(tensor)] = like.requires_grad_(tensor.requires_grad)
            return made[id(tensor)]

        with swapped_tensors(module, fake):
            named = {
                id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())
            }
            given: list[list[Tensor]] = []
            for tried in sizes:
                tape = Tape()
                with mode:
                    tensors = [argument.made(tried) for argument in arguments]
                    given.append(tensors)
                    with watching(module) as changes, tape:
                        results.append(_run(run, tensors, tried))
                _require_unchanged(changes)
                tapes.append(tape)
        follower = PairsFollower(sizes, named)
        for tensor, argument in zip(given[0], arguments, strict=True):
            follower.give_argument(tensor, argument)
        return follower.recorded(tapes, results[0])


def record_share(
    module: nn.Module, arguments: Sequence[Argument], num_counts: int, share: float, size: int
) -> Recording:
    """Record a loss as its shares compute it, for a whole batch of `size` samples.

    Args:
        module: takes `arguments`, then the batch's share of the step's samples and `num_counts` counts.

    Raises:
        MixesError: as `record`.
    """
    given = len(arguments)
    counts = [Argument((), torch.float64, arguments[0].device, None)] * num_counts

    def run(*taken: Tensor) -> Any:
        return module(*taken[:given], share, *taken[given:])

    return record(run, module, [*arguments, *counts], size)


def arguments_of(task: TaskGraph, op: Op, tensors: Sequence[Tensor] = ()) -> list[Argument]:
    """What an op is given; `tensors`: a share of it, for their dtypes and devices."""
    specs = task.specs_of(op)
    cpu = torch.device("cpu")
    if not tensors:
        return [_argument(spec, spec.dtype, cpu) for spec in specs]
    return [_argument(spec, t.dtype, t.device) for spec, t in zip(specs, tensors, strict=True)]


def _argument(spec: ValueSpec, dtype: torch.dtype, device: torch.device) -> Argument:
    return Argument(spec.shape, dtype, device, spec.batch_dim, spec.rows_per_sample)


def _run(run: Callable[..., Any], tensors: Sequence[Tensor], size: int) -> Any:
    try:
        return run(*tensors)
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        mixed = Mixed(
            f"it fails for a batch of {size}: {type(error).__name__}: {text}", place_of_error(error)
        )
        raise MixesError(str(mixed)) from error


def _require_unchanged(changes: Changes) -> None:
    """Raises MixesError: what ran keeps something for its next call, as every share would by itself."""
    for name in (*changes.buffers, *changes.counted):
        raise MixesError(f"its forward changes {name!r}, which every share would do by itself")


class _Autocast:
    """Enters the autocast that was on where the object was made."""

    def __init__(self) -> None:
        self._on = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype in self._on:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
            yield


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def _apart() -> Iterator[FakeTensorMode]:
    """Where no mode and no hook of others sees what runs, nor is a random number drawn."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            _disable_current_modes(),
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            # What autograd saves here is none of what a layer that recomputes its activations has saved.
            SavedTensorsHooks(_as_it_is, _as_it_is),
            failures_unlogged(),
        ):
            yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
