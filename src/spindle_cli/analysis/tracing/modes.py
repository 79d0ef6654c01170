"""Modules that `forward` itself puts into training or eval mode: `self.teacher.eval()`.

A trace runs forward once, and then the modules' modes are those of before. So each module has from then on
the mode in which forward calls it. That is what plain PyTorch does if it is the same mode in every call and
in every step: the first begins with the modes of the build, and each other one with those that the one
before has left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.jit._script import RecursiveScriptModule

from spindle_cli.workload.refuse import place_of_caller, refusal

MODE = "training"
_NAMES = {True: "training mode", False: "eval mode"}
_BY_CALL = (
    "Let an operator of its own do both: put the modes and the calls into the forward of one nn.Module, and "
    "list its class in the workload's `operators` (it is then run as it is). Or have a copy for one of them."
)
_AT_BEGIN = "Set it at the beginning of forward, before it is called; or where it is built."


@dataclass(frozen=True)
class SeenModes:
    """What the forwards of a workload do with modes: modules whose mode one sets, and modules that one uses
    in the mode that they have, each with the task.
    """

    set_by: dict[nn.Module, str] = field(default_factory=dict)
    used_by: dict[nn.Module, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Use:
    mode: bool
    was_set: bool
    place: str | None


class Modes:
    """The modes of a task's modules while its forward is traced, and those that they have afterwards."""

    def __init__(
        self, task: str, root: nn.Module, seen: SeenModes, is_looking: Callable[[], bool], *, evaluates: bool
    ) -> None:
        """`seen`: by the whole workload. `is_looking`: whether modules are being run to find out what is
        known. `evaluates`: forward is evaluated. Once forward was traced, `by_name` has, by dotted name, the
        modes of the modules whose mode it has set.
        """
        self._task, self._root, self._seen, self._is_looking = task, root, seen, is_looking
        self._evaluates = evaluates
        self._names = {module: name for name, module in root.named_modules()}
        self._before = {module: module.training for module in self._names}
        self._set: dict[nn.Module, None] = {}
        self._read: dict[nn.Module, list[_Use]] = {}
        self._called: dict[nn.Module, list[_Use]] = {}
        self.by_name: Mapping[str, bool] = {}

    def call(self, module: nn.Module) -> None:
        """Note that forward calls a module which is not traced into."""
        place = place_of_caller()
        for part in module.modules():
            self._note(self._called, part, place)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note, inside, who reads or sets the mode of a module, and check at the end that it makes sense.

        Raises:
            WorkloadError: other steps than the first would run in other modes.
        """
        module_class: Any = nn.Module
        script_class: Any = RecursiveScriptModule
        assign_script = script_class.__setattr__

        def read(module: nn.Module) -> bool:
            if module in self._before and not self._is_looking():
                self._note(self._read, module, place_of_caller())
            return _mode(module)

        def give(module: nn.Module, mode: bool) -> None:
            if module in self._before and not self._is_looking():
                self._set[module] = None
            module.__dict__[MODE] = mode

        def assign(module: nn.Module, name: str, value: Any) -> None:
            if name == MODE and module in self._before and not self._is_looking():
                self._set[module] = None
            assign_script(module, name, value)

        module_class.training = property(read, give)
        script_class.__setattr__ = assign
        try:
            yield
            self._check()
            self.by_name = {self._names[module]: self._mode_of(module) for module in self._set}
        finally:
            del module_class.training
            script_class.__setattr__ = assign_script
            for module in filter(_is_script, self._set):  # nobody else puts it back
                module.training = self._before[module]

    def _mode_of(self, module: nn.Module) -> bool:
        uses = self._called.get(module)
        return uses[0].mode if uses else _mode(module)

    def _note(self, uses: dict[nn.Module, list[_Use]], module: nn.Module, place: str | None) -> None:
        use = _Use(_mode(module), module in self._set, place)
        uses.setdefault(module, []).append(use)

    def _check(self) -> None:
        for module in self._names if self._set else ():
            called, read = self._called.get(module, []), self._read.get(module, [])
            for use in called:
                if use.mode != called[0].mode:
                    what = f"forward calls {self._called_as(module)} in training mode and in eval mode"
                    raise refusal(self._task, what, use.place, _BY_CALL)
                if self._evaluates and use.mode and use.was_set:
                    what = f"forward puts {self._called_as(module)} into training mode where it is evaluated"
                    raise refusal(self._task, what, use.place, "Put it there `if self.training` alone.")
            now = _mode(module)
            for use in (*called, *read):
                if not use.was_set and now != self._before[module]:
                    what = (
                        f"forward uses {self._called_as(module)} in {_NAMES[use.mode]} and leaves it in "
                        f"{_NAMES[now]}: its first step would be another than those that follow"
                    )
                    raise refusal(self._task, what, use.place, _AT_BEGIN)
        self._check_others()

    def _check_others(self) -> None:
        """Refuse a module whose mode one task sets, and that another one uses as it is."""
        seen = self._seen
        if self._evaluates:
            return
        seen.set_by.update(dict.fromkeys(self._set, self._task))
        for uses in (self._called, self._read):
            for module, module_uses in uses.items():
                if not all(use.was_set for use in module_uses):
                    seen.used_by[module] = self._task
        for module, task in seen.set_by.items():
            other_task = seen.used_by.get(module, task)
            if other_task != task:
                raise refusal(
                    self._task,
                    f"the forward of task {task!r} sets the mode of {type(module).__name__}, which that of "
                    f"{other_task!r} uses in the mode that it has",
                    None,
                    "Set it in both before it is called, or where it is built.",
                )

    def _called_as(self, module: nn.Module) -> str:
        return f"{self._names[module] or 'itself'!r} ({type(module).__name__})"


def _is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _mode(module: nn.Module) -> bool:
    """The mode that a module is in; what torch.jit has compiled keeps it elsewhere than others."""
    held: Any = module
    return bool(held._c.getattr(MODE) if _is_script(module) else module.__dict__[MODE])


def give_modes(root: nn.Module, modes: Mapping[str, bool]) -> None:
    """Put modules into modes, by their dotted names."""
    for name, mode in modes.items():
        root.get_submodule(name).training = mode
