"""The hooks of modules, but for those that this package sets."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

HOOK_ATTRIBUTES = tuple(name for name, held in vars(nn.Module()).items() if "_hooks" in name and held == {})
_forward = threading.local()  # `hooks`: those that a forward which is traced has not set itself; None: all


def _is_of_spindle(hook: Any) -> bool:
    """Whether this package has set a hook, to see how a layer is called: what that notes is not the layer's,
    and stays there when what the layer has changed is put back.
    """
    called = hook.func if isinstance(hook, functools.partial) else hook
    return (getattr(called, "__module__", None) or "").partition(".")[0] == "spindle_cli"


def is_of_forward(module: nn.Module, name: str, number: int) -> bool:
    """Whether a hook is one of those that `hooks_of_forward_left_alone` leaves alone."""
    set_before: Collection[tuple[int, str, int]] | None = getattr(_forward, "hooks", None)
    return set_before is not None and (id(module), name, number) not in set_before


def hooks_of(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Return the hooks that a module has, by the attributes that hold them."""
    held = module.__dict__
    return {name: dict(held[name]) for name in HOOK_ATTRIBUTES if held.get(name)}


def hooks_of_users(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Return the hooks of a module by their kind (`hooks_of`), but for those that this package has set."""
    return {
        name: {number: hook for number, hook in hooks.items() if not _is_of_spindle(hook)}
        for name, hooks in hooks_of(module).items()
    }


@contextlib.contextmanager
def hooks_of_forward_left_alone(root: nn.Module) -> Iterator[None]:
    """Inside, what hooks note stays noted where forward itself has set them by now: forward goes on with it
    when a layer was looked at in the midst of it, and is to meet the stand-ins there.
    """
    set_before = {
        (id(module), name, number)
        for module in root.modules()
        for name, hooks in hooks_of(module).items()
        for number in hooks
    }
    with _looked_into(set_before):
        yield


def all_hooks_put_back() -> contextlib.AbstractContextManager[None]:
    """Inside, what forward's own hooks note is put back as well: real tensors, which none would know from its
    constants.
    """
    return _looked_into(None)


@contextlib.contextmanager
def _looked_into(hooks: Collection[tuple[int, str, int]] | None) -> Iterator[None]:
    before = getattr(_forward, "hooks", None)
    _forward.hooks = hooks  # no context variable: layers are looked at without those of forward
    try:
        yield
    finally:
        _forward.hooks = before


def give_hooks(module: nn.Module, hooks: Mapping[str, Mapping[int, Any]]) -> None:
    """Let a module have no hooks but these."""
    for name in HOOK_ATTRIBUTES:
        held = module.__dict__.get(name, {})
        if held or name in hooks:
            held.clear()
            held.update(hooks.get(name, {}))
