"""torch.autocast as a forward switches it: seen while it is traced, and done again where its graph is run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

_TORCH = str(Path(torch.__file__).parent)
_QUESTIONS = (
    "is_autocast_enabled",
    "is_autocast_cpu_enabled",
    "get_autocast_dtype",
    "get_autocast_cpu_dtype",
    "get_autocast_gpu_dtype",
)
# transformers' context that only switches autocast off where it is on: told that it is, it always does.
_SWITCHES_OFF_IF_ON = "maybe_autocast"


class AutocastSeen:
    """What the innermost contexts of a forward that is traced set autocast to. Training may run it under
    autocast or not; so what is switched off counts, also where nothing is on.
    """

    def __init__(self) -> None:
        self._open: list[tuple[str, bool]] = []

    def is_switched_on(self) -> bool:
        """For any type of device that is here: for others it does nothing."""
        return any(enabled and _is_here(device) for device, enabled in dict(self._open).items())

    def is_switched_off(self) -> bool:
        """Whether autocast is switched off for a type of device that this machine has."""
        return any(map(_is_here, self.switched_off()))

    def switched_off(self) -> frozenset[str]:
        """The types of device, on this machine or not, for which autocast is switched off."""
        return frozenset(device for device, enabled in dict(self._open).items() if not enabled)

    @contextlib.contextmanager
    def seeing(self, on_query: Callable[[str], None]) -> Iterator[None]:
        """Note the autocast contexts that are entered inside.

        Args:
            on_query: called with the name of torch's function where something else than torch asks for
                autocast's state: what it is while tracing is not what it is in training.
        """
        context: Any = torch.amp.autocast_mode.autocast
        make, enter, leave = context.__init__, context.__enter__, context.__exit__

        def made(
            mode: Any, device_type: Any, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any
        ) -> None:
            # x.device.type is not known while tracing: "cpu" stands for wherever it runs.
            device = "cpu" if isinstance(device_type, fx.Proxy) else device_type
            mode.seen = (device, enabled)  # it may run where torch has more of them
            make(mode, device, dtype, enabled, *args, **kwargs)

        def entered(mode: Any) -> Any:
            # One that decorates a function was made when the user's file was read.
            self._open.append(getattr(mode, "seen", (mode.device, mode._enabled)))
            return enter(mode)

        def left(mode: Any, *error: Any) -> Any:
            self._open.pop()
            return leave(mode, *error)

        context.__init__, context.__enter__, context.__exit__ = made, entered, left
        try:
            with _questions_answered(on_query):
                yield
        finally:
            context.__init__, context.__enter__, context.__exit__ = make, enter, leave
            self._open.clear()


def _is_here(device: str) -> bool:
    """Whether this machine has devices of a type."""
    return device == "cpu" or bool(torch.get_device_module(device).is_available())


@contextlib.contextmanager
def _questions_answered(on_query: Callable[[str], None]) -> Iterator[None]:
    originals: dict[str, Callable[..., Any]] = {name: getattr(torch, name) for name in _QUESTIONS}

    def answering(name: str) -> Callable[..., Any]:
        def answer(*args: Any) -> Any:
            caller = sys._getframe(1).f_code
            if caller.co_name == _SWITCHES_OFF_IF_ON:
                return True
            if not caller.co_filename.startswith(_TORCH):
                on_query(name)
            return originals[name](*args)

        return answer

    for name in originals:
        setattr(torch, name, answering(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


class WithoutAutocast:
    """A function, or by name a method of its first argument, or without a target its first argument itself,
    run with autocast switched off.
    """

    def __init__(self, target: Callable[..., Any] | str | None, device_types: frozenset[str]) -> None:
        """`device_types`: that the user names; "cpu" is every one, as that is what `x.device.type` gives
        while tracing.
        """
        self._target = target
        self._device_types = frozenset({"cpu", "cuda"}) if "cpu" in device_types else device_types
        name = target if isinstance(target, str) else getattr(target, "__name__", "call")
        # torch.fx writes a call under these names.
        self.__name__ = f"without_autocast_{name}"
        self.__module__ = __name__
        self.__qualname__ = f"{self.__name__}_on_{'_'.join(sorted(self._device_types))}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        on = [device for device in sorted(self._device_types) if torch.is_autocast_enabled(device)]
        for device in on:
            torch.set_autocast_enabled(device, False)
        try:
            if isinstance(self._target, str):
                return getattr(args[0], self._target)(*args[1:], **kwargs)
            if self._target is None:
                return args[0](*args[1:], **kwargs)
            return self._target(*args, **kwargs)
        finally:
            for device in on:
                torch.set_autocast_enabled(device, True)


def copy_without_autocast(
    graph: fx.Graph, node: fx.Node, copy: Callable[[fx.Node], fx.Node], device_types: frozenset[str]
) -> fx.Node:
    """Copy a node of another graph so that it runs with autocast switched off.

    Args:
        copy: gives the nodes of `graph` that stand for those of the other.
    """
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), copy)
    if node.op == "call_module":
        copied = graph.call_function(
            WithoutAutocast(None, device_types), (graph.get_attr(str(node.target)), *args), kwargs
        )
    elif node.op in ("call_function", "call_method"):
        assert callable(node.target) or isinstance(node.target, str)
        copied = graph.call_function(WithoutAutocast(node.target, device_types), args, kwargs)
    else:
        return graph.node_copy(node, copy)
    copied.meta = dict(node.meta)
    return copied
