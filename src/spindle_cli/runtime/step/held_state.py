"""What a module keeps from one forward pass to the next, but for what is trained: buffers and attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spindle_cli.workload.building.attributes import Memories, tensors_kept
from spindle_cli.workload.building.memory import copy_once_written

if TYPE_CHECKING:
    from torch import Tensor

_KEPT = (bool, int, float, complex, str, bytes, type(None), list, dict, torch.Tensor)


@dataclass(frozen=True)
class _Names:
    """What names stood for: a module's attributes, or its buffers.

    Attributes:
        holder: the module's own dict. `hidden`: names that begin with an underscore count too.
        held: by name, the objects. `contents`: copies of those that are lists or dicts.
    """

    holder: dict[str, Any]
    hidden: bool
    held: dict[str, Any]
    contents: dict[str, Any]

    @classmethod
    def of(cls, holder: dict[str, Any], *, hidden: bool) -> _Names:
        """Takes what the attributes of an object hold now."""
        held = {
            name: value
            for name, value in holder.items()
            if (hidden or name[0] != "_") and isinstance(value, _KEPT)
        }
        contents = {name: value.copy() for name, value in held.items() if isinstance(value, list | dict)}
        return cls(holder, hidden, held, contents)

    def now(self) -> _Names:
        """Return the names, and what they stand for now."""
        return _Names.of(self.holder, hidden=self.hidden)

    def is_as(self, reference: _Names) -> bool:
        """Say whether all names stand for the same objects as in another snapshot."""
        return _are_same(self.held, reference.held) and all(
            _are_same(contents, reference.contents[name]) for name, contents in self.contents.items()
        )

    def restore(self) -> None:
        """Let the names stand again for what they stood for."""
        for name in self.now().held.keys() - self.held.keys():
            del self.holder[name]
        for name, value in self.held.items():  # one by one, as what torch.jit has compiled takes them
            self.holder[name] = value
        for name, contents in self.contents.items():
            container = self.held[name]
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)


def _are_same(first: Any, second: Any) -> bool:
    """Whether two lists, or two dicts, hold the same objects."""
    if isinstance(first, list):
        first, second = dict(enumerate(first)), dict(enumerate(second))
    return bool(first.keys() == second.keys()) and all(value is second[key] for key, value in first.items())


class HeldState:
    """A module's buffers and attributes as they are now, and what it may keep elsewhere, to be put back.

    `buffers`: each with a copy of its values; what else it may write into, too.
    """

    def __init__(
        self,
        module: nn.Module,
        copy: Callable[[Tensor], Tensor] = torch.Tensor.clone,
        parameters: Sequence[Tensor] = (),
        *,
        keeps_elsewhere: bool = True,
    ) -> None:
        """`copy`: gives a copy of a buffer's values. `parameters`: those that count as buffers do.
        `keeps_elsewhere`: it is not known to keep nothing in objects, classes or files.
        """
        self._module = module
        self._memories = Memories.of(module) if keeps_elsewhere else None
        parts = list(module.modules())
        self._names = [_Names.of(part.__dict__, hidden=False) for part in parts]
        self._names += [_Names.of(part._buffers, hidden=True) for part in parts]
        self.buffers = [(buffer, copy(buffer)) for buffer in (*module.buffers(), *parameters)]
        if self._memories is not None:
            kept = tensors_kept(module, self._memories)
            self.buffers += [(tensor, copy_once_written(tensor)) for tensor in kept]

    def forget_unchanged(self, is_unchanged: Callable[[Tensor, Tensor], bool]) -> None:
        """Keep nothing but what has changed; `is_unchanged`: given a buffer and the copy of its values."""
        self._names = [names for names in self._names if not names.is_as(names.now())]
        self.buffers = [pair for pair in self.buffers if not is_unchanged(*pair)]
        if self._memories is not None and not self._memories.have_changed():
            self._memories = None

    def now(self) -> HeldState:
        """What this one is about, as it is now."""
        made = HeldState.__new__(HeldState)
        made._module = self._module
        made._memories = None if self._memories is None else Memories.of(self._module)
        made._names = [names.now() for names in self._names]
        made.buffers = [(buffer, buffer.detach().clone()) for buffer, _ in self.buffers]
        return made

    def restore(self) -> None:
        """Put it back; autograd is not told, as other passes that have kept a buffer for their way back find
        it there with the values that it had.
        """
        for names in self._names:
            names.restore()
        if self._memories is not None:
            self._memories.restore()
        for buffer, values in self.buffers:
            buffer.data.copy_(values)
