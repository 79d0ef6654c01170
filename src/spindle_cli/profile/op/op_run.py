"""Run one op on one batch share, forward and backward, and time it."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spindle_cli.analysis.autograd import SavedTensorsHooks, saved_behind
from spindle_cli.profile.op.op_memory import cuda_meter, live_meter, share_memory
from spindle_cli.profile.op.timings import Limits, Sample
from spindle_cli.profile.types import ShareMemory
from spindle_cli.training.precision import gradient_dtype
from spindle_cli.units import MS
from spindle_cli.workload.building.attributes import Memories
from spindle_cli.workload.building.memory import dense_parts, memory_of


def copy_of(module: nn.Module) -> nn.Module:
    """Return a module with parameters of its own. What it has computed of them and keeps beside them, as
    torch.nn.utils.weight_norm does until its next forward, is copied as a value: torch copies leaves alone.
    """
    kept = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    kept += Memories.of(module).tensors()
    made = copy.deepcopy(module, {id(value): value.detach().clone() for value in kept if not value.is_leaf})
    for part in made.modules():
        if isinstance(part, torch.jit.ScriptModule):  # whose copies are no leaves
            for name, value in list(part._parameters.items()):
                if value is not None:
                    part._parameters[name] = nn.Parameter(value.detach(), value.requires_grad)
    return made


class Clock(Protocol):
    """Marks moments in a device's work; the seconds between two are known after `wait`."""

    def mark(self) -> Any:
        """Return a moment after all work given to the device so far."""

    def wait(self) -> None:
        """Return when the device has done all its work."""

    def between_s(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another."""


class WallClock:
    """For a CPU with several threads, which have done their work when a call returns."""

    def mark(self) -> float:
        """Seconds of the performance counter."""
        return time.perf_counter()

    def wait(self) -> None:
        """Nothing is outstanding."""

    def between_s(self, start: float, end: float) -> float:
        """Return the difference of two marks."""
        return end - start


class TurnsClock:
    """For a CPU with one thread: the thread's processor time, times the processes that take turns on a core.

    Where processes outnumber cores this is the time that passes for each of them on average, without the
    chance of whose turn it is, and without what other programs take. The same where a quota grants them less
    than a core's time each: what they are stopped for is no processor time, and comes in turns, too.
    """

    def __init__(self, processes_per_core: float) -> None:
        self._turns = max(processes_per_core, 1.0)

    def mark(self) -> float:
        """Seconds that this thread has run."""
        return time.thread_time()

    def wait(self) -> None:
        """Nothing is outstanding."""

    def between_s(self, start: float, end: float) -> float:
        """Their difference, for all the processes of the core."""
        return (end - start) * self._turns


class CudaClock:
    """For a CUDA device: events in the current stream, so that the device's time is seen, not the host's."""

    def mark(self) -> torch.cuda.Event:
        """Return an event recorded after the work queued so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        return event

    def wait(self) -> None:
        """Synchronise with the device."""
        torch.cuda.synchronize()

    def between_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events."""
        return float(start.elapsed_time(end)) * MS


class OpRun:
    """One op with real inputs, ready to be run again and again.

    In training an op runs once in an iteration, and everything else that the device holds goes through its
    caches in between. `spread` makes the runs here as cold: over several copies of the op, forward through
    all of them and then backward.

    Args:
        module: takes the inputs in order; returns a tensor or a tuple of tensors.
        inputs: on the op's device; those that a gradient flows back to require one.
        num_fields: how many of the first inputs are fields of the batch.
        clock: of the op's device.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor], num_fields: int, clock: Clock) -> None:
        self.module = module
        self.inputs = tuple(inputs)
        self.num_fields = num_fields
        self.clock = clock
        _give_gradients(module)
        self._chain = [(module, self.inputs)]
        self._output_grads: tuple[Tensor, ...] | None = None

    def spread(self, num_bytes: int, most: int) -> None:
        """Run over copies that together touch `num_bytes`, but over `most` of them and over one at least."""
        own_bytes = self.kept_bytes() + sum(
            parameter.nbytes * (1 + parameter.requires_grad) for parameter in self.module.parameters()
        )
        for _ in range(min(num_bytes // max(own_bytes, 1), most) - 1):
            module = copy_of(self.module)
            for copied, parameter in zip(module.parameters(), self.module.parameters(), strict=True):
                if gradient_dtype(parameter) != parameter.dtype:
                    copied.grad_dtype = gradient_dtype(parameter)
            _give_gradients(module)
            inputs = tuple(
                tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self.inputs
            )
            self._chain.append((module, inputs))

    def warm_up(self, limits: Limits) -> float:
        """Run until `limits.warm_up_s` have passed, at least twice; seconds of one run."""
        started = time.perf_counter()
        self.repeat(1)
        while True:
            sample = self.repeat(1)
            if time.perf_counter() - started >= limits.warm_up_s:
                return sample.total_s

    def repeat(self, runs: int) -> Sample:
        """Run forward and backward about `runs` times, each copy equally often; mean seconds of each."""
        marks = []
        rounds = -(-runs // len(self._chain))
        for _ in range(rounds):
            before = self.clock.mark()
            outputs = [_run(module, inputs) for module, inputs in self._chain]
            between = self.clock.mark()
            while outputs:
                # Freed as the runtime frees a slice's graph, op by op.
                self._backward(outputs.pop())
            marks.append((before, between, self.clock.mark()))
            self._clear_input_grads()
        self.clock.wait()
        forward_s = sum(self.clock.between_s(before, between) for before, between, _ in marks)
        backward_s = sum(self.clock.between_s(between, after) for _, between, after in marks)
        total = rounds * len(self._chain)
        return Sample(forward_s / total, backward_s / total)

    def kept_bytes(self) -> int:
        """Return the bytes that one run keeps from forward to backward: what autograd saved, the outputs, and
        the batch's fields.

        Inputs from other ops are not counted: they are those ops' outputs. On a CUDA device what the
            allocator gave out counts, so
        that memory which autograd does not see (of custom functions, of casts) is in it.
        """
        fields = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self.inputs[: self.num_fields]
        }
        if isinstance(self.clock, CudaClock):
            self.clock.wait()
            before = torch.cuda.memory_allocated()
            outputs = _run(self.module, self.inputs)
            self.clock.wait()
            kept = torch.cuda.memory_allocated() - before
            del outputs
            return kept + sum(fields.values())
        with SavedStorages([*self.module.parameters(), *self.module.buffers(), *self.inputs]) as saved:
            saved.add(_run(self.module, self.inputs))
        return saved.num_bytes + sum(fields.values())

    def memory(self) -> ShareMemory:
        """What one run takes of the device's memory; parameters have gradients afterwards as before."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        present = [*self.module.parameters(), *self.module.buffers(), *self.inputs]
        meter = live_meter(present)
        if isinstance(self.clock, CudaClock):
            self.clock.wait()
            meter = cuda_meter
        try:
            return share_memory(partial(_run, self.module, self.inputs), self.inputs, trained, meter)
        finally:
            _give_gradients(self.module)

    def _backward(self, outputs: tuple[Tensor, ...]) -> None:
        differentiable = [output for output in outputs if output.requires_grad]
        if not differentiable:
            return
        if self._output_grads is None:
            self._output_grads = tuple(torch.randn_like(output) for output in differentiable)
        torch.autograd.backward(differentiable, self._output_grads)

    def _clear_input_grads(self) -> None:
        for _, inputs in self._chain:
            for tensor in inputs:
                tensor.grad = None


def _run(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    outputs = module(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _give_gradients(module: nn.Module) -> None:
    """Give parameters gradients, as in training, where these are added to buckets that are there already."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))


class SavedStorages:
    """Context that notes every storage that autograd saves in it, once; those of `known` tensors not."""

    def __init__(self, counted: Sequence[Tensor]) -> None:
        self._counted = {tensor.untyped_storage()._cdata for tensor in counted}
        # Storages are told apart by address, so their tensors have to live as long as they are compared.
        self._saved: dict[int, Tensor] = {}
        self._hooks = SavedTensorsHooks(self._note, lambda tensor: tensor)

    def __enter__(self) -> SavedStorages:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def add(self, outputs: Sequence[Tensor]) -> None:
        """Note what a run has given, which is kept as well; and what was saved where no hook has seen it."""
        unseen = saved_behind(outputs) if self._hooks.stepped_over else ()
        for tensor in (*outputs, *unseen):
            self._note(tensor)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """One tensor of each storage noted."""
        return tuple(self._saved.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages noted so far."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._saved.values())

    def _note(self, tensor: Tensor) -> Tensor:
        for part in dense_parts(tensor):
            if memory_of(part) not in self._counted:
                # Of a factor that is a number, as in 0.1 * x, operations take the number alone.
                self._saved.setdefault(memory_of(part), part.detach() if part.requires_grad else part)
        return tensor
