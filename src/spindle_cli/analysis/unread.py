"""Functions of torch's that look at values, as they are run on tensors that have none.

`gaussian_nll_loss` asks whether a variance is negative, `ctc_loss` reads the lengths, torch.distributions
check what they are given, and packed sequences lie in memory by their lengths; what shapes they give, and how
they treat samples, is known all the same.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.distributions import Distribution
from torch.nn.utils import rnn
from torch.overrides import TorchFunctionMode

from spindle_cli.analysis.fixed import marks
from spindle_cli.workload.refuse import stand_in


class Unread(TorchFunctionMode):
    """Inside, these functions read no value: they treat samples as they do, and give other numbers.

    What is fixed (fixed/marks.py) has its values. Distributions check none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left = ExitStack()

    def __enter__(self) -> Self:
        self._left.enter_context(not_validated())
        self._left.enter_context(_packed_unread())
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # torch: untyped
        self._left.close()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        run = _UNREAD.get(func) if callable(func) else None
        return marks.call(run or func, args, kwargs or {})


@contextmanager
def not_validated() -> Iterator[None]:
    """Let torch.distributions check neither parameters nor values, unless one is told to: they would raise,
    and do nothing else.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Give the loss as torch does, without a look at the variance's sign."""
    if not isinstance(var, Tensor):
        return functional.gaussian_nll_loss(input, target, var, full, eps, reduction)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    unlike = [var_size for size, var_size in zip(input.shape, var.shape, strict=True) if size != var_size]
    if unlike not in ([], [1]):
        raise ValueError("var is of incorrect size")
    variance = var.clamp(min=eps)
    losses = 0.5 * (variance.log() + (input - target) ** 2 / variance)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    return _reduced(losses, reduction)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """One value for each sample, of its own row of each argument; as torch has it where targets are joined
    or lengths are no tensors.
    """
    lengths = (input_lengths, target_lengths)
    if log_probs.dim() != 3 or targets.dim() != 2 or not all(_is_row(length) for length in lengths):
        return functional.ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    rows = targets.sum(1) + input_lengths + target_lengths
    return _reduced(log_probs.sum((0, 2)) + rows.to(log_probs.dtype), reduction)


def _is_row(lengths: Any) -> bool:
    return isinstance(lengths, Tensor) and lengths.dim() == 1


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses


_UNREAD: Mapping[Any, Callable[..., Tensor]] = {
    functional.gaussian_nll_loss: _gaussian_nll_loss,
    functional.ctc_loss: _ctc_loss,
}


class _Unpacked:
    """Sequences as a packed sequence has them, padded as before: (samples, positions, ...). A recurrent layer
    of torch's may take them, and `pad_packed_sequence` with its `total_length`; nothing else is known of them
    without their lengths.
    """

    def __init__(self, padded: Tensor, lengths: Tensor) -> None:
        self.padded, self.lengths = padded, lengths
        self.device, self.dtype = padded.device, padded.dtype

    def dim(self) -> int:
        """As of packed data, which have samples and positions in one dimension."""
        return self.padded.dim() - 1

    def size(self, dim: int) -> int:
        """The size of a dimension that is neither samples nor positions."""
        if dim % self.dim() == 0:
            raise _reads_lengths()
        return self.padded.size(dim % self.dim() + 1)

    def __getattr__(self, name: str) -> Any:
        """Refuse to give any other attribute of a tensor."""
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise _reads_lengths()

    def recurrent(
        self, run: Callable[..., tuple[Tensor, ...]], args: Sequence[Any]
    ) -> tuple[_Unpacked | Tensor, ...]:
        """What a recurrent layer gives: from (data, batch sizes, hidden, ...) of packed sequences."""
        with _without_mkldnn():  # of whose kernels nothing is known
            output, *hidden = run(self.padded, *args[2:], True)
        return _Unpacked(output, self.lengths), *hidden

    def pad(self, batch_first: bool, padding: float, total: int) -> tuple[Tensor, Tensor]:
        """The samples, with padding behind their lengths, and these lengths."""
        if total == 0:  # see `_Sizes`
            raise _reads_lengths()
        made = self.padded[:, :total]
        missing = total - made.shape[1]
        made = functional.pad(made, [0, 0] * (made.dim() - 2) + [0, missing])
        lengths = self.lengths.to(made.device)
        behind = torch.arange(total, device=made.device) >= lengths[:, None]
        made = made.masked_fill(behind.reshape(*behind.shape, *(1 for _ in made.shape[2:])), padding)
        return made if batch_first else made.transpose(0, 1), lengths

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, packed = getattr(func, "__name__", ""), args[0] if len(args) > 2 else None
        if isinstance(packed, _Unpacked) and isinstance(args[1], _Sizes) and not kwargs:
            if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
                return packed.recurrent(func, args)
            if name == "_pad_packed_sequence":
                return packed.pad(*args[2:])
        raise _reads_lengths()


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


class _Sizes:
    """How many of the samples have a position, of sequences whose lengths are not known."""

    device = torch.device("cpu")

    def __init__(self, count: int) -> None:
        self._count = count

    def __getitem__(self, position: Any) -> int:
        if position != 0:
            raise _reads_lengths()
        return self._count

    def size(self, dim: int) -> int:
        """The longest's length: 0, which says that it is not known."""
        return 0 * dim

    def __getattr__(self, name: str) -> Any:
        """Refuse to give any other attribute of a tensor."""
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise _reads_lengths()

    __torch_function__ = _Unpacked.__torch_function__


def _reads_lengths() -> Exception:
    """What is raised of those who need the lengths themselves."""
    return DataDependentOutputException(torch.ops.aten._pack_padded_sequence.default)


def _pack_unread(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    """Stands in the place of `pack_padded_sequence`, whose code others may hold by name."""
    from spindle_cli.analysis.unread import pack

    return pack(input, lengths, batch_first, enforce_sorted)


# Each is a step of its own here: of longer sequences all that is asked of a layer would take minutes.
_MOST_POSITIONS = 16
_PACK = rnn.pack_padded_sequence
_AS_IT_IS = types.FunctionType(_PACK.__code__, _PACK.__globals__, _PACK.__name__, _PACK.__defaults__)


def pack(input: Tensor, lengths: Any, batch_first: bool, enforce_sorted: bool) -> Any:
    """A packed sequence; without values, one that stands for it."""
    if not (input.is_meta or isinstance(input, FakeTensor)):
        return _AS_IT_IS(input, lengths, batch_first, enforce_sorted)
    if not isinstance(lengths, Tensor):
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
    padded = input if batch_first else input.transpose(0, 1)
    if padded.shape[1] > _MOST_POSITIONS:
        raise _reads_lengths()
    data: Any = _Unpacked(padded, lengths)
    sizes: Any = _Sizes(padded.shape[0])
    return rnn.PackedSequence(data, sizes)


@contextmanager
def _packed_unread() -> Iterator[None]:
    before = _PACK.__code__
    _PACK.__code__ = stand_in(_pack_unread.__code__)
    try:
        yield
    finally:
        _PACK.__code__ = before
