"""Takes what a matrix's gradient is made of where an op runs, instead of making the gradient.

An embedding's gradient is, for each id, a row; a linear map's is a product of two factors with a row for each
token: the gradient of its output, and its input. While the mode is on, calls of `embedding` and `linear` with
one of the matrices run with it cut off from autograd, and their backward pass hands ids and rows, or both
factors, to whoever takes them. All else (inputs, biases, autocast) is differentiated as without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from spindle_cli.operators.tensor_group import applied

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_LINEAR = ("input", "weight", "bias")


class Taker(Protocol):
    """Takes what the uses of one matrix bring to its gradient, in the order of their backward passes."""

    def take_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Take what a lookup's gradient is made of: `ids` (n), and the gradient of each (n, width)."""
        ...

    def take_factors(self, outputs: Tensor, inputs: Tensor) -> None:
        """Take what a product's gradient is made of: the gradient of its output (n, outputs), and its input
        (n, inputs).
        """
        ...


class Capturing(TorchFunctionMode):
    """While it is on, what some matrices' gradients are made of goes to their takers."""

    def __init__(self, takers: Mapping[int, Taker]) -> None:
        """`takers`: by the matrix's id."""
        super().__init__()
        self._takers = takers

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is functional.embedding:
            return self._look_up({**dict(zip(_EMBEDDING, args, strict=False)), **given})
        if func is functional.linear:
            return self._map({**dict(zip(_LINEAR, args, strict=False)), **given})
        return func(*args, **given)

    def _look_up(self, given: dict[str, Any]) -> Tensor:
        weight = given["weight"]
        taker = self._takers.get(id(weight))
        changes = given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse")
        if taker is None or changes:
            return functional.embedding(**given)
        padding = given.get("padding_idx")
        skipped = None if padding is None else padding % weight.shape[0]
        rows = functional.embedding(**{**given, "weight": weight.detach()})
        return applied(_Rows, rows, given["input"], weight, taker, skipped)

    def _map(self, given: dict[str, Any]) -> Tensor:
        weight = given["weight"]
        taker = self._takers.get(id(weight))
        if taker is None:
            return functional.linear(**given)
        outputs = functional.linear(**{**given, "weight": weight.detach()})
        return applied(_Factors, outputs, given["input"], weight, taker)


class _Rows(torch.autograd.Function):
    """Looked-up rows as they are; backward their gradients go to the taker. The matrix is an argument so that
    there is a backward pass, and gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor, _: Tensor, taker: Taker, skipped: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.taker, ctx.skipped = taker, skipped
        return rows.detach()  # no view: it may be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        ids = ids.reshape(-1)
        rows = gradients[0].reshape(ids.numel(), -1)
        if ctx.skipped is not None:
            rows = rows.masked_fill((ids == ctx.skipped).unsqueeze(1), 0)
        ctx.taker.take_rows(ids, rows)
        return None, None, None, None, None


class _Factors(torch.autograd.Function):
    """A linear map's outputs as they are; backward their gradients, and the inputs, go to the taker."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, inputs: Tensor, _: Tensor, taker: Taker) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.taker = taker
        return outputs.detach()  # no view: it may be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        outputs = gradients[0]
        ctx.taker.take_factors(outputs.reshape(-1, outputs.shape[-1]), inputs.reshape(-1, inputs.shape[-1]))
        return outputs, None, None, None


def capture(modules: Iterable[nn.Module], takers: Mapping[int, Taker]) -> None:
    """Have modules hand over what gathered gradients are made of, whenever they run, also when they run again
    in a backward pass. `takers`: by the matrix's id.
    """
    seen: set[int] = set()
    for module in modules:
        module_takers = {
            id(parameter): takers[id(parameter)]
            for parameter in module.parameters()
            if id(parameter) in takers
        }
        if module_takers and id(module) not in seen:
            seen.add(id(module))
            _Switch(module_takers).put_on(module)


class _Switch:
    """Turns capturing on for as long as a module runs, in whichever thread that is."""

    def __init__(self, takers: Mapping[int, Taker]) -> None:
        self._takers = takers
        self._on: list[Capturing] = []

    def put_on(self, module: nn.Module) -> None:
        """Puts the switch on a module."""
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        mode = Capturing(self._takers)
        mode.__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._on.append(mode)

    def _leave(self, *_: Any) -> None:
        self._on.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as above
