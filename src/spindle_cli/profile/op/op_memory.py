"""What one op on one share takes of a device's memory: run once, forward and backward, with a meter.

The meter adds up the bytes of all tensors that are alive, and their peak: of this process, or of a run on
fake tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.analysis.rules.tape import tensors_in
from spindle_cli.profile.types import SelectiveMemory, ShareMemory
from spindle_cli.training.precision import gradient_dtype
from spindle_cli.workload.graph import Op

if TYPE_CHECKING:
    from torch import Tensor


# A share that keeps less gains nothing from recomputing but for what takes longest: to tell operations apart
# takes torch longer.
LEAST_SELECTED_BYTES = 2**20
# Of what an op keeps, what may be left of it then, and of its forward pass, what may run again.
_MOST_LEFT, _MOST_AGAIN = 0.9, 0.6


class Meter(Protocol):
    """Bytes of tensors on a device: `held` now, and the `peak` since `begin`."""

    @property
    def held(self) -> float: ...
    @property
    def peak(self) -> float: ...
    def begin(self) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> Any: ...


class CudaMeter:
    """What torch's allocator has given out on the current CUDA device; also what kernels take meanwhile."""

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @property
    def held(self) -> float:
        """The bytes that are held now."""
        return torch.cuda.memory_allocated()

    @property
    def peak(self) -> float:
        """The most bytes held since `begin`."""
        return torch.cuda.max_memory_allocated()

    def begin(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats()


def cuda_meter(_: Sequence[Tensor]) -> Meter:
    """Return a meter of the current CUDA device."""
    return CudaMeter()


def share_memory(
    run: Callable[[], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    meter: Callable[[Sequence[Tensor]], Meter],
) -> ShareMemory:
    """Run an op forward and backward, once with gradients that are there already and once without.

    Args:
        run: the op, forward.
        inputs: what it takes; `parameters`: its trained ones. Their gradients are not kept.
        meter: of the device, told which tensors are there.
    """
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
        present = [parameter.grad for parameter in parameters if parameter.grad is not None]
        kept, forward, backward = _passes(run, inputs, meter(present))
        for parameter in parameters:
            parameter.grad = None
        *_, first_backward = _passes(run, inputs, meter([]))
    finally:
        _forget_gradients((*parameters, *inputs))
    return ShareMemory(
        kept_bytes=round(kept),
        forward_bytes=round(forward),
        backward_bytes=round(backward),
        first_backward_bytes=round(first_backward),
    )


def bytes_kept(
    run: Callable[[], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    meter: Callable[[Sequence[Tensor]], Meter],
) -> int:
    """Run an op forward and backward once, and return the bytes that it keeps between; see `share_memory`."""
    try:
        kept, *_ = _passes(run, inputs, meter([]))
    finally:
        _forget_gradients((*parameters, *inputs))
    return round(kept)


def _forget_gradients(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


def may_select(op: Op, *, is_split: bool, sums_shares: bool, loss_chunks: int) -> bool:
    """Whether an op may be recomputed but for what takes longest: one that only computes, on its own device.

    What communicates would do so again, and a loss in chunks makes its gradients in the forward pass.
    """
    return not (is_split or sums_shares or op.talks or op.coupled or op.changes) and loss_chunks == 1


def may_save_enough(memory: ShareMemory, share: float) -> bool:
    """Whether recomputing an op but for what takes longest may save enough for what it takes, however little
    is kept then; `share`: of its forward pass, what runs again.
    """
    return memory.kept_bytes >= LEAST_SELECTED_BYTES and share <= _MOST_AGAIN


def with_selective(memory: ShareMemory, selective: SelectiveMemory) -> ShareMemory:
    """Return what an op takes, with what was found, where that saves enough for what it takes."""
    is_less = selective.kept_bytes <= _MOST_LEFT * memory.kept_bytes
    is_worth_it = is_less and may_save_enough(memory, selective.share)
    return memory.model_copy(update={"selective": selective}) if is_worth_it else memory


def _passes(
    run: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], meter: Meter
) -> tuple[float, float, float]:
    """Bytes kept, the forward peak, and the backward peak beyond what was kept."""
    for tensor in inputs:
        tensor.grad = None
    with meter:
        before = meter.held
        meter.begin()
        outputs = run()
        forward, kept = meter.peak - before, meter.held - before
        ends = [output for output in outputs if output.requires_grad]
        end = _end(*ends) if ends else None
        meter.begin()
        # As in training, where what runs next has let go of the outputs when this op's backward pass begins.
        del outputs, ends
        if end is not None:
            torch.autograd.backward(end)
        backward = meter.peak - before - kept if end is not None else 0.0
    return kept, forward, max(0.0, backward)


def _end(*outputs: Tensor) -> Tensor:
    end: Tensor = _End.apply(*outputs)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return end


class _End(torch.autograd.Function):
    """Stands for what comes after an op: gives its outputs gradients, and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.specs = [(output.shape, output.dtype, output.device) for output in outputs]
        # Real, also of complex outputs: a backward pass begins at real numbers alone.
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.specs)


def live_meter(
    counted: Sequence[Tensor], itemsize: Callable[[torch.dtype], int] | None = None
) -> Callable[[Sequence[Tensor]], Meter]:
    """Return what makes a meter of live tensors, of which `counted` ones count from the beginning."""

    def meter(present: Sequence[Tensor]) -> Meter:
        return LiveBytes([*counted, *present], itemsize)

    return meter


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts every storage that an operation takes or makes, from then until it is freed.

    That is what the process asks of the allocator for tensors: neither the allocator's own reserves nor what
    a kernel takes and gives back within one operation. What other threads do is not seen.

    Attributes:
        held: bytes alive now.
        peak: the most since the last `begin`.
    """

    def __init__(self, held: Iterable[Tensor], itemsize: Callable[[torch.dtype], int] | None = None) -> None:
        """
        Args:
            held: tensors that are there already and count.
            itemsize: bytes of an element by dtype, for a run on fake tensors, whose storages are on the meta
                device; without it, real storages alone count.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._itemsize = itemsize
        self._sizes: dict[int, float] = {}
        self.held = 0.0
        self.peak = 0.0
        for tensor in held:
            self._note(tensor)

    def begin(self) -> None:
        """Forget the peak so far."""
        self.peak = self.held

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a question for a device
            return out
        for tensor in tensors_in((args, kwargs, out)):
            self._note(tensor)
        return out

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        is_fake = storage.device.type == "meta"  # also of a fake tensor that says it is elsewhere
        if is_fake != (self._itemsize is not None):
            return
        key = storage._cdata
        if key in self._sizes:
            return
        size: float = storage.nbytes()
        if self._itemsize is not None:
            size *= self._itemsize(tensor.dtype) / tensor.dtype.itemsize
        self._sizes[key] = size
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._forget, key).atexit = False

    def resized(self, tensor: Tensor) -> None:
        """The storage of a tensor takes more or less memory than before, which no operation has said."""
        self._note(tensor)
        storage = tensor.untyped_storage()
        self.held += storage.nbytes() - self._sizes[storage._cdata]
        self._sizes[storage._cdata] = storage.nbytes()
        self.peak = max(self.peak, self.held)

    def _forget(self, key: int) -> None:
        self.held -= self._sizes.pop(key)
