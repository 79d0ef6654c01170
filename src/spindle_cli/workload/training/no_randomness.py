"""Run code without chance: dropout keeps everything, and whatever else is drawn is the same in every run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.workload.training.precision import constants_in

# Arguments of torch's operations that are a probability to drop something.
_RATES = ("p", "dropout_p", "dropout")
_MASKS = frozenset({"bernoulli", "bernoulli_"})  # a call of dropout divides them by their mean
_ORDERS = frozenset({"randperm"})
_WHOLE_NUMBERS = frozenset({"randint", "randint_like", "random", "random_"})
_HALF = 0.5


class NoRandomness(TorchDispatchMode):
    """Inside, torch's operations draw nothing.

    Dropout drops nothing. In the place of numbers is the mean of what they are drawn from (0 for randn, 0.5
    for rand), whole numbers are the smallest, and orders stay as they are. So results depend on the samples
    alone, and not on how they are split or in which order things are run.

    The modules themselves are not changed, and neither is the workload's fingerprint.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        names = [argument.name for argument in arguments]
        # Torch leaves out what is as by default.
        defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        name = func._schema.name.removeprefix("aten::")
        rates = [rate for rate in _RATES if rate in names]
        if rates and name not in _MASKS:
            return func(**{**given, **dict.fromkeys(rates, 0.0)})
        if "training" in names:  # rrelu
            return func(**{**given, "training": False})
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                _settle(name, tensor, given)
        return result


@contextmanager
def computing_as_asked(dtype: torch.dtype | None, *, no_randomness: bool) -> Iterator[None]:
    """Train inside as a request says: constants that code makes have `dtype`, if given, and no chance takes
    part.
    """
    constants = nullcontext() if dtype is None else constants_in(dtype)
    with constants, NoRandomness() if no_randomness else nullcontext():
        yield


def _settle(name: str, tensor: Tensor, given: dict[str, Any]) -> None:
    """Put in the place of drawn values what they are without chance."""
    if name in _MASKS:
        mean = given.get("p", given["self"])
        tensor.copy_(mean) if isinstance(mean, Tensor) else tensor.fill_(mean)
    elif name in _ORDERS:
        tensor.copy_(torch.arange(tensor.numel(), device=tensor.device).to(tensor.dtype))
    elif name in _WHOLE_NUMBERS:
        low = given.get("low", given.get("from"))
        tensor.fill_(0 if low is None else low)
    elif name.startswith(("normal", "randn")):
        mean = given.get("mean", 0.0)
        tensor.copy_(mean) if isinstance(mean, Tensor) else tensor.fill_(mean)
    elif name == "uniform_":
        tensor.fill_((given.get("from", 0.0) + given.get("to", 1.0)) * _HALF)
    elif tensor.is_floating_point():
        tensor.fill_(_HALF)
    else:
        tensor.fill_(0)
