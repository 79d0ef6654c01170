"""Which code draws random numbers, and those that do not come from the run's own stream.

The devices of a batch's shares each have a stream of torch's random numbers. What draws from a generator that
somebody holds would draw the same in every share, as each process has a copy of it: the numbers are taken
from the stream in its place. What is seeded in forward is meant to be the same in every step: it is so
for a whole batch alone, whose samples have other numbers each. What Python's random or numpy draw nobody can
follow.
"""

from __future__ import annotations

import inspect
import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.analysis.outside import CHANCE, times_of_chance
from spindle_cli.training.items import DRAWING_FUNCTIONS
from spindle_cli.workload.introspection import OF_TORCH
from spindle_cli.workload.refuse import place_inside


def draws_random_numbers(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node gives other values each time that it is computed."""
    if node.op == "call_module":
        return any(
            isinstance(part, nn.modules.dropout._DropoutNd | nn.RReLU) and part.training
            for part in root.get_submodule(str(node.target)).modules()
        )
    return draws_by_itself(node)


def draws_by_itself(node: fx.Node) -> bool:
    """Whether a node of a function or a method draws random numbers."""
    if node.op not in ("call_function", "call_method"):
        return False  # a field or a value of that name
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.rstrip("_") in DRAWING_FUNCTIONS and node.kwargs.get("training", True) is not False


DRAW_WITH_TORCH = (
    "Draw with torch, for each sample: torch.randn_like(x), or a coin for each, "
    "keep = (torch.rand(len(x), 1, device=x.device) < 0.5).to(x.dtype) and x + keep * y."
)
# Arguments of operations that drop some of what they are given.
_RATES = ("p", "dropout_p", "dropout", "training")
_FEWEST, _LOOKED_AT = 4, 64  # different numbers, among the first of those drawn
_MOST_HELD = 64  # entries of a list or dict in which a generator is looked for
# Seeds that nobody else takes, to see whether another one is set.
_UNTAKEN = 0x5EED_0F_0B5E_17ED


@contextmanager
def unseeded() -> Iterator[None]:
    """Inside, torch's generator has a seed that nobody else takes; `is_seeded` tells whether it still has.
    The generator is the process's: one thread at a time may ask.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_UNTAKEN)
        yield


def is_seeded() -> bool:
    """Inside of `unseeded`, whether torch's generator was seeded. Draws on tensors without data move none."""
    return torch.default_generator.initial_seed() != _UNTAKEN


@dataclass
class Draws:
    """What was seen of a piece of code that was run on tensors without data.

    Attributes:
        generators: that it has drawn from and that are not torch's own, each with the seed that it had then.
            One may be here as another object than its holder has: torch wraps it anew.
        is_seeded: it seeds torch's generator.
        place: 'file:line' of the user's code that draws from the first of these, or behind the seeding.
    """

    generators: list[tuple[torch.Generator, int]] = field(default_factory=list)
    is_seeded: bool = False
    place: str | None = None


class _Watching(TorchDispatchMode):
    def __init__(self, seen: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = _own_generator(args, kwargs or {})
            if generator is not None:
                self._seen.generators.append((generator, generator.initial_seed()))
            if generator is not None or is_seeded():
                self._seen.is_seeded |= generator is None
                self._seen.place = self._seen.place or place_inside()
        return func(*args, **(kwargs or {}))


@contextmanager
def draws_seen() -> Iterator[Draws]:
    """See inside what is drawn, on tensors without data, and by which generators."""
    seen = Draws()
    with unseeded(), _Watching(seen):
        yield seen
        seen.is_seeded |= is_seeded()


def _own_generator(args: Iterable[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    given = (item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator))
    return next((generator for generator in given if generator is not torch.default_generator), None)


class OwnDraws:
    """What draws come from generators of somebody's own, over several runs of the same code.

    All generators that are known before a run have seeds of ours in it, and their states back at the end. One
    that has another seed when it is drawn from is made, or seeded anew, in that very run.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._runs = 0
        self._generator_states = [(generator, generator.get_state()) for generator in self._held()]
        self.follows = False  # it draws from one that somebody holds and nobody seeds in forward
        self.why_same: tuple[str, str | None] | None = None  # why, and where, each share would draw the same

    @contextmanager
    def seen(self) -> Iterator[None]:
        """See inside one run of the code."""
        given = range(_UNTAKEN + 1, _UNTAKEN + 1 + len(self._generator_states))
        for (generator, _), seed in zip(self._generator_states, given, strict=True):
            generator.manual_seed(seed)
        before = {id(generator) for generator in self._held()}
        with draws_seen() as draws:
            yield
        if draws.is_seeded:
            why = "it seeds torch's random numbers, which are then the same in every share"
            self.why_same = self.why_same or (why, draws.place)
        for generator, seed in draws.generators:
            if seed in given or self._is_held_since(before, generator):
                self.follows = True
            elif self._runs:
                why = "it draws from a generator that it seeds itself, the same numbers in every share"
                self.why_same = self.why_same or (why, draws.place)
            else:  # one that nobody has seen before, as the file's own
                self._generator_states.append((generator, generator.get_state()))
        self._runs += 1

    def finish(self) -> None:
        """Give generators their states back; those of the module last, which may be known twice."""
        for generator, state in reversed(self._generator_states):
            generator.set_state(state)

    def _is_held_since(self, before: Set[int], generator: torch.Generator) -> bool:
        """Whether the module keeps a generator that it has made in this run, for those to come."""
        state = generator.get_state()
        generator.manual_seed(_UNTAKEN)
        new = [held for held in self._held() if id(held) not in before]
        is_held = any(held.initial_seed() == _UNTAKEN for held in new)
        generator.set_state(state)
        return is_held

    def _held(self) -> list[torch.Generator]:
        return [] if self._module is None else list(_held_by(self._module))


@contextmanager
def generators_kept(module: nn.Module) -> Iterator[None]:
    """Inside, a module may draw from the generators that it holds; they are then as they were."""
    before = [(generator, generator.get_state()) for generator in _held_by(module)]
    yield
    for generator, state in before:
        generator.set_state(state)


def _held_by(module: nn.Module) -> Iterator[torch.Generator]:
    """Yield the generators in the attributes of a module and its parts."""
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Generator):
                yield value
            elif name not in OF_TORCH and isinstance(value, tuple | list | dict):
                yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Generator))


class FromTheRun(TorchDispatchMode):
    """Inside, what is drawn from generators of somebody's own is drawn from the run's stream: other numbers
    in every share, the same again when a pass is recomputed, and after a resume those that would have come.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _own_generator(args, kwargs) is not None:
            args = tuple(None if isinstance(value, torch.Generator) else value for value in args)
            kwargs = {k: None if isinstance(v, torch.Generator) else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def draw_from_the_run(module: nn.Module) -> None:
    """Let a module's own generators' draws come from the run's stream from here on."""
    inside: list[FromTheRun] = []

    def enter(*_: Any) -> None:
        inside.append(FromTheRun())
        inside[-1].__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types

    def leave(*_: Any) -> None:
        inside.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch: untyped

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


class Drawn(TorchDispatchMode):
    """Keeps a copy of the numbers that are drawn inside, in order, but for what may be drawn twice by chance:
    masks, orders, and what dropout leaves. Runs that share `states` find generators of somebody's own where
    the first has found them, as other processes do.
    """

    def __init__(self, states: dict[int, tuple[torch.Generator, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._states = states
        for generator, state in states.values():
            generator.set_state(state)
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = _own_generator(args, kwargs or {})
        if generator is not None and id(generator) not in self._states:
            self._states[id(generator)] = (generator, generator.get_state())
        result = func(*args, **(kwargs or {}))
        names = {argument.name for argument in func._schema.arguments}
        if torch.Tag.nondeterministic_seeded in func.tags and names.isdisjoint(_RATES):
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and _varies(leaf):
                    self.tensors.append(leaf.detach().clone())
        return result


def _varies(tensor: torch.Tensor) -> bool:
    return len(set(tensor.flatten()[:_LOOKED_AT].tolist())) >= _FEWEST


class PythonDraws:
    """Whether Python's or numpy's random numbers are drawn: of the process, or of a generator that a module
    holds, or the file that its forward is in; or the system's (`outside.asked`).
    """

    def __init__(self, module: nn.Module) -> None:
        self._held = list(_python_generators(module))
        self._before = self._states()

    def what(self) -> str | None:
        """Return what has drawn since; None: nothing has."""
        pairs = zip(self._states(), self._before, strict=True)
        return next((name for (name, now), (_, before) in pairs if now != before), None)

    def _states(self) -> list[tuple[str, object]]:
        states: list[tuple[str, object]] = [
            ("Python's random", random.getstate()),
            (CHANCE, times_of_chance()),
        ]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            # Compared as bytes, since printing numpy's state takes milliseconds.
            states.append(("numpy.random", pickle.dumps(numpy.random.get_state(legacy=False))))
        return states + [(name, pickle.dumps(generator)) for name, generator in self._held]


def _python_generators(module: nn.Module) -> Iterator[tuple[str, Any]]:
    numpy = sys.modules.get("numpy")
    kinds: Sequence[type] = (random.Random,)
    if numpy is not None:
        kinds = (random.Random, numpy.random.Generator, numpy.random.RandomState)
    generator_types = tuple(kinds)
    names: dict[int, tuple[str, Any]] = {}
    files: dict[int, dict[str, Any]] = {}
    for part in module.modules():
        forward = inspect.getattr_static(type(part), "forward", None)  # asked, torch.jit's modules raise
        around = getattr(forward, "__globals__", {})
        files[id(around)] = around
        names |= {
            id(leaf): (f"self.{name}", leaf)
            for name, leaf in _leaves(vars(part))
            if isinstance(leaf, generator_types)
        }
    for around in files.values():
        names |= {
            id(leaf): (name, leaf) for name, leaf in _leaves(around) if isinstance(leaf, generator_types)
        }
    for name, value in names.values():
        if type(value) is not random.SystemRandom:
            yield f"{name} ({type(value).__name__})", value


def _leaves(held: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what is there by name, and what is in lists, tuples and dicts there."""
    for name, value in held.items():
        yield name, value
        if type(value) in (list, tuple, dict) and len(value) <= _MOST_HELD:
            yield from ((name, entry) for entry in (value.values() if type(value) is dict else value))
