"""What an op takes of a device's memory, without a device: run on fake tensors, which have no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.analysis.without_data import Remembering, Unread
from spindle_cli.costs.flops import Arithmetic
from spindle_cli.operators.batch_dependent import named_in, pairs_over_shares, summing_over
from spindle_cli.operators.heads.chunked import sampled, timed_op
from spindle_cli.operators.tensor_parallel import LayerSplit
from spindle_cli.operators.whole import selective_checkpoint
from spindle_cli.profile.op.counting import OpTensors, itemsizes, with_state, with_tensors
from spindle_cli.profile.op.op_memory import (
    bytes_kept,
    live_meter,
    may_save_enough,
    share_memory,
    with_selective,
)
from spindle_cli.profile.op.split_runs import SumCounter, equal_cuts
from spindle_cli.profile.op.tensor_parallel import OwnPositions, along_sequence, tensors_of
from spindle_cli.profile.types import SelectiveMemory, ShareMemory
from spindle_cli.training.precision import computing, widen_gradients
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import Op, TaskGraph


def fake_memory(
    task: TaskGraph,
    op: Op,
    rows: int,
    precision: Arithmetic,
    train: TrainSettings,
    split: LayerSplit | None = None,
    *,
    sums_shares: bool = False,
    again: float | None = None,
) -> ShareMemory:
    """Memory of one op on `rows` samples of its task.

    Where the train settings ask for autocast, the op runs in it. Else floating-point tensors count with the
    bytes that they have in `precision` (at most their own). With `split`: of one device of a tensor-parallel
    group; with `sums_shares`: of one of several shares, which sum or gather something. `again`: of its
    forward pass, what runs again where it is recomputed but for what takes longest, if that is to be looked
    at.
    """

    def look(tensors: OpTensors) -> ShareMemory:
        return _memory(tensors, precision, train, split, sums_shares=sums_shares, again=again)

    return with_tensors(task, op, rows, look)


def _memory(
    tensors: OpTensors,
    precision: Arithmetic,
    train: TrainSettings,
    split: LayerSplit | None,
    *,
    sums_shares: bool,
    again: float | None,
) -> ShareMemory:
    task, op, rows, mode = tensors.task, tensors.op, tensors.rows, tensors.mode
    is_cast = train.autocast is not None
    vocabulary = None if split is None else split.vocabulary_shard(SumCounter((0,), 0, torch.device("cpu")))
    timed = timed_op(task, op, rows, train.loss_chunks, vocabulary)
    module = timed.module
    with mode:
        more = timed.more_arguments(torch.device("cpu"))
        state = tensors.state(module, split)
        along = SumCounter((0,), 0, torch.device("cpu"))
        positions = OwnPositions(split, along, tensors.inputs())
        inputs = positions.inputs

    def run(*, selects: bool = False) -> Sequence[Tensor]:
        until_end.close()  # of the run before
        group = SumCounter((0,), 0, torch.device("cpu")) if sums_shares else None
        shared = pairs_over_shares(module, task, op, group, equal_cuts(task, rows))
        until_end.enter_context(with_state(shared, named_in(shared, module, state)))
        with (
            torch.enable_grad(),
            computing(train, "cpu"),
            _copying_gradients(module, split),
            along_sequence(module, split, along),
            summing_over(module, group),
            sampled(module, lambda _: nullcontext()),
        ):
            given = (*positions.given(inputs), *more)
            result = tensors_of(selective_checkpoint(shared, given) if selects else shared(*given))
        return result if isinstance(result, tuple) else (result,)

    held = list({id(tensor): tensor for tensor in (*state.values(), *inputs)}.values())
    trained = [tensor for tensor in held[: len(held) - len(inputs)] if tensor.requires_grad]
    widen_gradients(trained, train)
    itemsize = itemsizes("float32" if is_cast or train.widens_gradients else precision)
    with torch.random.fork_rng(devices=[]), mode, Remembering(), Unread(), ExitStack() as until_end:
        meter = live_meter(held, itemsize)
        memory = share_memory(run, inputs, trained, meter)
        if again is None or not may_save_enough(memory, again):
            return memory
        in_part = partial(bytes_kept, partial(run, selects=True), inputs, trained, meter)
        return _with_selective(memory, in_part, again)


def _with_selective(memory: ShareMemory, in_part: Callable[[], int], again: float) -> ShareMemory:
    """Return what an op takes, with what is kept where it is recomputed in part, if that saves enough."""
    try:
        kept_bytes = in_part()
    except RuntimeError:  # it changes in place what would be kept, or asks for gradients itself
        return memory
    return with_selective(memory, SelectiveMemory(kept_bytes=kept_bytes, share=again))


@contextmanager
def _copying_gradients(module: nn.Module, split: LayerSplit | None) -> Iterator[None]:
    """Copy the gradients of what goes into colwise maps, as summing them over the devices does."""
    entered: list[tuple[Tensor, Tensor]] = []

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for original, inside in entered:
            if args and original is args[0]:
                return (inside, *args[1:])
        if not args:
            return args
        entered.append((args[0], _Copied.apply(args[0])))  # type: ignore[no-untyped-call]  # untyped in torch
        return (entered[-1][1], *args[1:])

    names = split.entered if split is not None and split.sequence is None else ()
    hooks = [module.get_submodule(name).register_forward_pre_hook(enter) for name in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone(memory_format=torch.contiguous_format)
