"""Let parameters on the meta device be initialised as if they were real: as many random numbers are drawn,
and thrown away.

So the random generator is at the same place for the parameters that follow, as it is in a build where all are
real.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.workload.building.load import Births, swap


@contextlib.contextmanager
def drawing_as_if_real(births: Births) -> Iterator[None]:
    """Draw what real parameters would draw, whether by a random operation or in one of torch.nn.init's
    functions.
    """
    stand_ins = _RealWhileInitialised(births)
    throw_away: Any = _DrawAndThrowAway
    with stand_ins, throw_away(births):
        yield
    stand_ins.give_back()


_tensor_type: Any = Tensor
_IS_META = _tensor_type.is_meta.__get__
_SET = _tensor_type.__setitem__
# What a parameter says of which ranges are kept, as it does in a plain build.
_AS_REAL = {_IS_META: False, _tensor_type.device.__get__: torch.device("cpu")}


class _DrawAndThrowAway(TorchDispatchMode):
    """A random operation on tensors that we have moved to the meta device, or on what was made of them, is
    first run on real ones of the same shapes. Those of which ranges are kept are operated on one at a time.
    """

    def __init__(self, births: Births) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._dropped = births.dropped
        self._ranged = births.ranged

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors(args) + _tensors(kwargs)
        if any(map(self._ranged.has, given)):
            return self._ranged.run(func, args, kwargs)
        if not any(map(self._dropped.has, given)):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            func(*pytree.tree_map(_scratch, args), **pytree.tree_map(_scratch, kwargs))
        result = func(*args, **kwargs)  # the meta kernel itself draws nothing
        for tensor in _tensors(result):
            if tensor.is_meta:
                self._dropped.add(tensor)
        return result


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results: themselves, or in tuples, lists and dicts,
    faster than torch's trees.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _scratch(item: Any) -> Any:
    """Return a real tensor in the place of a meta one; of halves, which are valid as probabilities, means and
    deviations.
    """
    if not isinstance(item, Tensor) or not item.is_meta:
        return item
    scratch = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="cpu")
    return scratch.fill_(0.5) if item.is_floating_point() else scratch.fill_(1)


class _RealWhileInitialised(TorchFunctionMode):
    """Some of torch.nn.init's functions draw nothing for a tensor that says it is meta: make it real when
    they ask.

    It goes back to the meta device when the next one asks, so that one at a time takes memory.
    """

    def __init__(self, births: Births) -> None:
        super().__init__()
        self._births = births
        self._lent: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _AS_REAL and self._births.ranged.has(args[0]):
            return _AS_REAL[func]
        if func == _SET and isinstance(args[2], int | float) and self._births.ranged.has(args[0]):
            # Its number would be on the meta device, too.
            return func(args[0], args[1], torch.tensor(args[2], dtype=args[0].dtype, device="cpu"))
        asks_is_meta = func == _IS_META and func(args[0]) and _called_by_init()
        if not asks_is_meta or not self._births.dropped.has(args[0]):
            return func(*args, **(kwargs or {}))
        self.give_back()
        tensor = args[0]
        real = torch.zeros_like(tensor, device="cpu", requires_grad=tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            real = torch.nn.Parameter(real.detach(), requires_grad=tensor.requires_grad)
            real.__dict__.update(tensor.__dict__)
        swap(tensor, real)
        self._lent = tensor
        return False

    def give_back(self) -> None:
        """Move what was made real last back to the meta device."""
        if isinstance(self._lent, torch.nn.Parameter) and id(self._lent) in self._births.numbers:
            self._births.drop(self._lent)
        self._lent = None


def _called_by_init() -> bool:
    frame = sys._getframe(2)
    return frame.f_code.co_filename == torch.nn.init.__file__
