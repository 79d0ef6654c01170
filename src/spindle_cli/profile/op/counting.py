"""An op's work without running it: its kernels' floating-point operations and bytes, and what it keeps for
backward.

The op runs on fake tensors, which have shapes and no data, so a model of any size takes the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from spindle_cli.analysis.fixed import without_values
from spindle_cli.analysis.rules.tape import tensors_in
from spindle_cli.analysis.without_data import Remembering, Unread, fake_mode
from spindle_cli.costs.flops import Arithmetic
from spindle_cli.operators.batch_dependent import named_in, pairs_over_shares, summing_over
from spindle_cli.operators.heads.chunked import gradients_later, sampled, timed_op
from spindle_cli.operators.tensor_parallel import LayerSplit
from spindle_cli.operators.whole import is_kept
from spindle_cli.profile.machine.roofline import Kernel
from spindle_cli.profile.op.op_run import SavedStorages
from spindle_cli.profile.op.split_runs import SplitSums, SumCounter, equal_cuts
from spindle_cli.profile.op.tensor_parallel import OwnPositions, along_sequence, noting_sums, tensors_of
from spindle_cli.training.data.reading import first_batch
from spindle_cli.workload.building.attributes import watching
from spindle_cli.workload.building.memory import dense_parts
from spindle_cli.workload.file import LossChunks
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec

T = TypeVar("T")
_aten = torch.ops.aten
# Operations that start no kernel although torch does not call them views.
_FREE = {
    _aten._unsafe_view,
    _aten.detach,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.empty,
    _aten.new_empty_strided,
}
# They read only the rows that they pick, not all of their input.
_PICKING = {
    _aten.embedding,
    _aten.index_select,
    _aten.gather,
    _aten.index,
    _aten.slice_backward,
    _aten.select_backward,
}


_NO_SUMS = SplitSums()


@dataclass(frozen=True)
class Work:
    """One op on one share: kernels of each direction, and bytes kept from forward to backward.

    `summed_bytes`: of each activation that the devices of a tensor-parallel group sum in each direction;
    `word_sums`: what they sum besides, where they share out a vocabulary, in each direction. `along`: of all
    positions of what they gather and scatter along a sequence, in each direction.
    `batch_sums`: what the shares of the op sum and gather (batch norms, contrastive losses). `loss_chunks`:
    in how many chunks its loss is computed, whose gradients are made in the forward pass, but in float16.
    `again`: of the forward kernels, those that run once more where the op is recomputed but for what takes
    longest (`operators/whole.py`).
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    activation_bytes: float
    summed_bytes: tuple[float, ...] = ()
    word_sums: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    batch_sums: SplitSums = _NO_SUMS
    loss_chunks: int = 1
    along: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    again: tuple[Kernel, ...] = ()

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of the matrix products of the forward pass, of a loss in one go."""
        return sum(kernel.flops for kernel in self.forward)


def count_work(
    task: TaskGraph,
    op: Op,
    rows: int,
    precision: Arithmetic,
    split: LayerSplit | None = None,
    *,
    sums_shares: bool = False,
    loss_chunks: LossChunks = 1,
) -> Work:
    """Return the work of one op on `rows` samples of its task, forward and backward.

    Floating-point tensors count with the bytes that they have in `precision` (at most their own). With
    `split` it is the work of one device of a tensor-parallel group, all of which have the same `rows`; with
    `sums_shares` that of one of several shares, which sum or gather something. `loss_chunks`: of the train
    settings.
    """
    return with_tensors(
        task,
        op,
        rows,
        lambda tensors: _count(tensors, precision, split, sums_shares=sums_shares, loss_chunks=loss_chunks),
    )


def _count(
    tensors: OpTensors,
    precision: Arithmetic,
    split: LayerSplit | None,
    *,
    sums_shares: bool,
    loss_chunks: LossChunks,
) -> Work:
    task, op, rows, mode = tensors.task, tensors.op, tensors.rows, tensors.mode
    itemsize = itemsizes(precision)
    fake = _FakeOp.of(tensors, itemsize, split, loss_chunks)
    counter = _KernelCounter(itemsize)
    saved = SavedStorages([*fake.state.values(), *fake.inputs])
    module, batch_sums = fake.module, SumCounter((0,), 0, torch.device("cpu"))
    group = batch_sums if sums_shares else None
    with _counting(mode, counter) as until_end:
        shared = pairs_over_shares(module, task, op, group, equal_cuts(task, rows))
        until_end.enter_context(with_state(shared, named_in(shared, module, fake.state)))
        with (
            saved,
            noting_sums(module, split) as sums,
            along_sequence(module, split, fake.along),
            summing_over(module, group),
            sampled(module, counter.repeated),
            gradients_later(module) if precision == "float16" else nullcontext(),
        ):
            result = tensors_of(shared(*fake.given()))
        outputs = result if isinstance(result, tuple) else (result,)
        saved.add(outputs)
        forward, again = counter.take(), counter.run_again()
        _run_backward(outputs)
    words, moved = fake.of_words.take(), fake.along.take()
    fields = [_num_bytes(tensor, itemsize) for tensor in fake.inputs[: len(op.fields)]]
    casts, accumulations = _parameter_kernels(
        list({id(t): t for t in fake.state.values()}.values()), itemsize
    )
    return Work(
        casts + forward,
        counter.take() + accumulations,
        sum(fields) + sum(_storage_bytes(t, itemsize) for t in saved.tensors),
        tuple(float(_num_bytes(tensor, itemsize)) for tensor in sums),
        (words.forward, words.backward),
        batch_sums.take(),
        fake.loss_chunks,
        (moved.forward_along, moved.backward_along),
        again,
    )


@contextmanager
def _counting(mode: AbstractContextManager[object], counter: _KernelCounter) -> Iterator[ExitStack]:
    """Inside, nothing is computed, and what would be is counted; what the stack has entered lasts as long."""
    with (
        torch.random.fork_rng(devices=[]),
        mode,
        Remembering(),
        counter,
        Unread(),
        torch.enable_grad(),
        ExitStack() as until_end,
    ):
        yield until_end


@dataclass(frozen=True)
class _FakeOp:
    """An op to be run on fake tensors, as one share runs it.

    Attributes:
        module: of the op.
        loss_chunks: in how many its loss is computed.
        state: its parameters and buffers.
        positions: its inputs, of a sequence that is shared out one device's part.
        more: what it takes behind its inputs.
        of_words, along: count what the devices of its tensor-parallel group sum of a vocabulary, and gather
            and scatter along a sequence.
    """

    module: nn.Module
    loss_chunks: int
    state: dict[str, Tensor]
    positions: OwnPositions
    more: tuple[Any, ...]
    of_words: SumCounter
    along: SumCounter

    @classmethod
    def of(
        cls,
        tensors: OpTensors,
        itemsize: Callable[[torch.dtype], int],
        split: LayerSplit | None,
        loss_chunks: LossChunks,
    ) -> _FakeOp:
        task, op, rows, mode = tensors.task, tensors.op, tensors.rows, tensors.mode
        cpu = torch.device("cpu")
        of_words, along = (SumCounter((0,), 0, cpu, itemsize=itemsize) for _ in range(2))
        timed = timed_op(
            task, op, rows, loss_chunks, None if split is None else split.vocabulary_shard(of_words)
        )
        with mode:
            more = timed.more_arguments(cpu)
            state = tensors.state(timed.module, split)
            positions = OwnPositions(split, along, tensors.inputs())
        return cls(timed.module, timed.loss_chunks, state, positions, more, of_words, along)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that the op is run on: its fields and inputs."""
        return self.positions.inputs

    def given(self) -> tuple[Any, ...]:
        """Return all that it is called with."""
        return (*self.positions.given(self.inputs), *self.more)


@contextmanager
def with_state(module: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, a module has these parameters and buffers in place of its own, in its backward pass too: with
    `torch.utils.checkpoint` its code runs once more then, when `functional_call` would have put back its own.

    `state`: under every name. Each place is given one once: of a part that has two names (an operator that
    holds what glue beside it calls) torch would keep what it has put there itself as the part's own. What its
    forward keeps of them goes.
    """
    places = [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name in (*part._parameters.keys(), *part._buffers.keys())
    ]
    with (
        watching(module),
        _reparametrize_module(module, {name: state[name] for name in places if name in state}),
    ):
        yield


def _run_backward(outputs: Sequence[Tensor]) -> None:
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.empty_like(output) for output in differentiable])


class _KernelCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes the work of every operation that starts a kernel."""

    def __init__(self, itemsize: Callable[[torch.dtype], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._itemsize = itemsize
        self._kernels: list[Kernel] = []
        self._again: list[Kernel] = []

    def run_again(self) -> tuple[Kernel, ...]:
        """Those of all kernels so far that give nothing that is kept where the rest is recomputed."""
        return tuple(self._again)

    def take(self) -> tuple[Kernel, ...]:
        """Return the kernels since the last call."""
        kernels, self._kernels = tuple(self._kernels), []
        return kernels

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count what is run inside so many times."""
        before = [(kernels, len(kernels)) for kernels in (self._kernels, self._again)]
        yield
        for kernels, first in before:
            kernels.extend(kernels[first:] * (times - 1))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # a question for a device
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if not func.is_view and packet not in _FREE:
            self._kernels.append(self._kernel(packet, args, kwargs, out))
            if not is_kept(func, args, kwargs):
                self._again.append(self._kernels[-1])
        return out

    def _kernel(self, packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Kernel:
        read = tensors_in((args, kwargs))
        written = tensors_in(out)
        num_bytes = sum(_num_bytes(tensor, self._itemsize) for tensor in written)
        if packet in _PICKING:
            num_bytes *= 2
        else:
            num_bytes += sum(_num_bytes(tensor, self._itemsize) for tensor in read)
        flops = _flops(packet, args, kwargs, out)
        return Kernel(float(flops), float(num_bytes), float(max((t.numel() for t in written), default=0)))


def _parameter_kernels(
    state: Sequence[Tensor], itemsize: Callable[[torch.dtype], int]
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Return what training does to each parameter whatever the batch: before the forward pass, after the
    backward.

    A parameter wider than the arithmetic is cast to it (autocast), and its gradient cast back; gradients are
    added to those that are there already.
    """
    before: list[Kernel] = []
    after: list[Kernel] = []
    for tensor in state:
        wide, narrow = tensor.dtype.itemsize, itemsize(tensor.dtype)
        cast = Kernel(0.0, float(tensor.numel() * (wide + narrow)), 0.0)
        if narrow < wide:
            before.append(cast)
        if tensor.requires_grad:
            after.extend([cast] * (narrow < wide))
            after.append(Kernel(0.0, 3.0 * tensor.numel() * wide, 0.0))
    return tuple(before), tuple(after)


def _flops(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> float:
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    # The CPU's fused attention, which fake tensors choose, has no entry in torch's registry.
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        forward: Callable[..., int] = sdpa_flop_count
        return float(forward(*(tensor.shape for tensor in args[:3])))
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        backward: Callable[..., int] = sdpa_backward_flop_count
        return float(backward(*(tensor.shape for tensor in args[:4])))
    return 0.0


def _num_bytes(tensor: Tensor, itemsize: Callable[[torch.dtype], int]) -> int:
    """Return the bytes that reading a tensor moves; an expanded one is no larger than its storage."""
    parts = dense_parts(tensor)
    counts = (min(part.numel(), part.untyped_storage().nbytes() // part.dtype.itemsize) for part in parts)
    return sum(count * itemsize(part.dtype) for count, part in zip(counts, parts, strict=True))


def _storage_bytes(tensor: Tensor, itemsize: Callable[[torch.dtype], int]) -> float:
    """Return the bytes of all that a tensor keeps alive."""
    return sum(
        part.untyped_storage().nbytes() / part.dtype.itemsize * itemsize(part.dtype)
        for part in dense_parts(tensor)
    )


def itemsizes(precision: Arithmetic) -> Callable[[torch.dtype], int]:
    """Return what gives the bytes of an element by dtype, in arithmetic of this precision."""
    largest = torch.float32.itemsize if precision == "float32" else torch.bfloat16.itemsize

    def itemsize(dtype: torch.dtype) -> int:
        return min(dtype.itemsize, largest) if dtype.is_floating_point else dtype.itemsize

    return itemsize


def value_bytes(spec: ValueSpec, precision: Arithmetic) -> int:
    """Return the bytes of a value between ops, for the whole batch, computed in `precision`."""
    return math.prod(spec.shape) * itemsizes(precision)(spec.dtype)


@dataclass(frozen=True)
class OpTensors:
    """What an op is run on to see what it takes: fake tensors, or, where it cannot do without values, real
    ones: samples of the dataset, and any numbers for the rest.
    """

    task: TaskGraph
    op: Op
    rows: int
    is_real: bool

    @cached_property
    def mode(self) -> AbstractContextManager[object]:
        """The mode in which the op is run; it may be entered again."""
        return nullcontext() if self.is_real else fake_mode()

    def state(self, module: nn.Module, split: LayerSplit | None) -> dict[str, Tensor]:
        """Return the parameters and buffers of the op's module, or one device's part of them."""
        state = fake_state(module, split)
        if self.is_real:
            made = {id(tensor): _drawn(tensor, tensor.requires_grad) for tensor in state.values()}
            state = {name: made[id(tensor)] for name, tensor in state.items()}
        return state

    def inputs(self) -> list[Tensor]:
        """Makes the tensors that the op is run on: its fields, then the values of other ops that it takes."""
        fields = [self.task.fields[name] for name in self.op.fields]
        values = [self.task.values[name] for name in self.op.inputs]
        if not self.is_real:
            return [without_values(spec, self.rows) for spec in (*fields, *values)]
        batch = first_batch(self.task, 0, self.rows)
        drawn = [_drawn(without_values(spec, self.rows), spec.requires_grad) for spec in values]
        return [*(batch[name] for name in self.op.fields), *drawn]


def _drawn(like: Tensor, requires_grad: bool) -> Tensor:
    if not (like.is_floating_point() or like.is_complex()):
        return torch.zeros(like.shape, dtype=like.dtype)
    return (torch.randn(tuple(like.shape), dtype=like.dtype) / 2).requires_grad_(requires_grad)


def with_tensors(task: TaskGraph, op: Op, rows: int, run: Callable[[OpTensors], T]) -> T:
    """What running an op on so many samples gives: on fake tensors, and on real ones where that fails."""
    try:
        return run(OpTensors(task, op, rows, is_real=False))
    except Exception as error:
        if not op.coupled:
            raise
        try:
            with torch.random.fork_rng(devices=[]):
                return run(OpTensors(task, op, rows, is_real=True))
        except Exception:  # it fails on real samples, too: what was said first says why
            raise error from None


def fake_state(module: nn.Module, split: LayerSplit | None) -> dict[str, Tensor]:
    """Fake tensors in the shapes of all parameters and buffers, or of one device's part of them; one for a
    tensor with several names.
    """
    made: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        if id(tensor) not in made:
            whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            fake = whole if split is None else split.local(name, whole)
            made[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
        state[name] = made[id(tensor)]
    return state
