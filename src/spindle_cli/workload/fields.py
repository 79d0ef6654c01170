"""What objects hold by names: modules, the user's own objects, and the environment of this process."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import nn

OF_TORCH = frozenset(vars(nn.Module()))  # a module's own dicts of parameters, buffers, parts and hooks
OF_ENVIRONMENT = "os.environ"
ASKS_ENVIRONMENT = frozenset({"environ", "getenv"})  # by which code asks for the environment's variables


class _Fields(MutableMapping[str, Any]):
    """The fields of an object whose class has slots: these, by the names that they are kept by, and what its
    dict holds if it has one.
    """

    def __init__(self, value: Any, slots: Mapping[str, types.MemberDescriptorType]) -> None:
        self._value = value
        self._slots = slots
        self._dict: dict[str, Any] = getattr(value, "__dict__", {})

    def __getitem__(self, name: str) -> Any:
        if name not in self._slots:
            return self._dict[name]
        try:
            return self._slots[name].__get__(self._value)
        except AttributeError as error:  # nothing is there yet
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._slots:
            self._slots[name].__set__(self._value, value)
        else:
            self._dict[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._slots:
            self._slots[name].__delete__(self._value)
        else:
            del self._dict[name]

    def __iter__(self) -> Iterator[str]:
        names = (*self._slots, *self._dict)
        return (name for name in names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Attributes(MutableMapping[str, Any]):
    """The attributes of a module, but for those that torch has of each."""

    def __init__(self, module: nn.Module) -> None:
        self._held = module.__dict__

    def __getitem__(self, name: str) -> Any:
        if name in OF_TORCH:
            raise KeyError(name)
        return self._held[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._held[name] = value

    def __delitem__(self, name: str) -> None:
        del self._held[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(self._held) if name not in OF_TORCH)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Environment(MutableMapping[str, Any]):
    """The variables of this process's environment, as os.environ keeps them; by name, in alphabetical order.
    What is no bytes, nobody but who asks os.environ sees.
    """

    def __init__(self) -> None:
        self._seen: Any = os.environ

    def __getitem__(self, name: str) -> Any:
        return self._seen._data[self._seen.encodekey(name)]

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, bytes):
            self._seen[name] = self._seen.decodevalue(value)
        self._seen._data[self._seen.encodekey(name)] = value

    def __delitem__(self, name: str) -> None:
        del self._seen[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(map(self._seen.decodekey, list(self._seen._data))))

    def __len__(self) -> int:
        return len(self._seen._data)

    def become(self, kept: Mapping[str, Any]) -> None:
        """Let it have these variables and no others; what it has already is not touched."""
        for name in [name for name in self if name not in kept]:
            del self[name]
        for name, value in kept.items():
            if self.get(name) is not value:
                self[name] = value


def fields_of(value: Any) -> MutableMapping[str, Any] | None:
    """Return what an object holds by names, in its dict and in the slots of its class, whatever the class
    does with who asks or sets; None: nothing could be.
    """
    slots = _slots_of(type(value))
    if slots:
        return _Fields(value, slots)
    held = getattr(value, "__dict__", None)
    return held if type(held) is dict else None


def attributes_of(value: Any) -> MutableMapping[str, Any] | None:
    """Return the fields of an object; of a module, those that torch has not put there; of os.environ,
    variables.
    """
    if value is os.environ:
        return Environment()
    return _Attributes(value) if isinstance(value, nn.Module) else fields_of(value)


def _slots_of(cls: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots of a class and its bases, by the names that they are kept by."""
    return {
        name: slot
        for base in reversed(cls.__mro__)
        if "__slots__" in vars(base)
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType)
    }
