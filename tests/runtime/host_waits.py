"""Fail where the host would wait for the device within a step, on any device.

`torch.cuda.set_sync_debug_mode("error")` does it for real devices. On a CPU nothing ever waits; but the calls
that would are the same: those that hand a tensor's values, or a size that depends on them, to Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.operators.tensor_group import draw_seed, unless_nothing
from spindle_cli.runtime.communication.reached import read_flags
from spindle_cli.runtime.part.at_lengths import TasksAtLengths
from spindle_cli.runtime.step.data import Feed

aten = torch.ops.aten
# Of each the result's size, or the result itself, is known only when the device has come so far.
VALUE_OPS = {
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.equal,
    aten.nonzero,
    aten.argwhere,
    aten.masked_select,
    aten.bincount,
    aten._unique,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# These never come to the dispatcher for a tensor of a CPU.
VALUE_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
# torch's optimizers without a fused kernel count their steps in tensors on the host, on every device.
HOST_COUNTERS = str(Path(torch.__file__).parent / "optim")
# Models that decide by values, which run as they are written.
BY_VALUES = str(Path(__file__).with_name("whole_toys.py"))
# Samples and seeds are on the host. And where the host has to know, as the runtime's documentation says.
KNOWN = (
    Feed._load.__code__,
    Feed._counted.__code__,
    TasksAtLengths._at_lengths_of.__code__,
    draw_seed.__code__,
    read_flags.__code__,
    unless_nothing.__code__,
)


class HostWaitError(AssertionError):
    """Python has asked for a tensor's values."""


class _Dispatched(TorchDispatchMode):
    """Asked for each of the thousands of operations of a step."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        packet = func.overloadpacket
        if packet in VALUE_OPS or (packet in INDEXING and _has_mask(args)):
            _refuse(str(func))
        return func(*args, **kwargs) if kwargs else func(*args)


class _Called(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in VALUE_METHODS:
            _refuse(func.__name__)
        return func(*args, **(kwargs or {}))


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Whether something is indexed by a mask, which is looked for on the device."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _refuse(what: str) -> None:
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(HOST_COUNTERS) or code in KNOWN or code.co_filename == BY_VALUES:
            return
        if isinstance(frame.f_locals.get("self"), torch.jit.ScriptModule):
            return
        frame = frame.f_back
    raise HostWaitError(f"{what} within a step: the host would wait for the device")


@contextmanager
def no_host_waits() -> Iterator[None]:
    """Inside the block Python may not look at a tensor's values.

    Raises:
        HostWaitError: it does.
    """
    with _Called(), _Dispatched():
        yield
