"""A second opinion on what is known to act on samples one by one: it is tried.

Random stand-ins for five samples together, and for one and four of them, must give the same rows. The rules
(rules/) decide; this finds where one of them is wrong. What is too large to try quickly, and what does not
run on random stand-ins, is not tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from spindle_cli.analysis import fixed
from spindle_cli.analysis.fixed import rows_for
from spindle_cli.analysis.layer_numbers import Findings
from spindle_cli.analysis.memo import key_of, portable
from spindle_cli.analysis.own_draws import draws_by_itself, draws_random_numbers, generators_kept
from spindle_cli.analysis.rules.batch_norms import by_fixed_statistics
from spindle_cli.analysis.splitting.samples import Verdicts
from spindle_cli.analysis.tracing.behaviour import Kinds, name_of
from spindle_cli.analysis.tracing.observe import Observer
from spindle_cli.analysis.tracing.shapes import BatchDim, Shapes, growth
from spindle_cli.workload.building.attributes import swapped_tensors

_TOGETHER, *_PARTS = 5, 1, 4  # samples: all together, then in two parts
_COUNTS = (_TOGETHER, *_PARTS)
_MAX_INPUT_ELEMENTS = 2**20
_MAX_PARAMETER_ELEMENTS = 2**22
_SIZE_METHODS = frozenset({"size", "numel", "dim"})
_SIZE_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device"})
_TOLERANCE = 1e-3  # of the largest element; batches of different sizes round differently


class _NotTriedError(Exception):
    """A node cannot be tried: too large, random, or its inputs are unknown."""


_UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class Independence:
    """Tries the nodes of one workload, equal ones once."""

    def __init__(self, observer: Observer) -> None:
        self.verdicts = Verdicts(observer)
        self._kinds = observer.kinds
        self._calls: Findings[bool] = Findings(self._told)

    def mixes(self, node: fx.Node, root: nn.Module, shapes: Shapes) -> bool:
        """Whether a node's samples were seen to depend on each other."""
        holds_tensors = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(shapes.values[node]))
        if not holds_tensors or _is_made_of_sizes(node):
            return False  # row numbers are tried together with what uses them
        trial = _Trial(node, root, shapes)
        return self._calls.of(
            trial.keys(self._kinds), trial.module, trial.differs, lambda _: not trial.has_failed
        )

    def tried(self) -> dict[str, bool]:
        """Return the outcomes of all trials, for another process (see `AnalysisMemo`)."""
        return portable(self._calls.known, bool)

    def _told(self, call: str) -> bool | None:
        """What another process has seen; None if it says nothing."""
        memo, key = self.verdicts.observer.memo, key_of(call)
        return None if memo is None or key is None else memo.mixes.get(key)


class _Trial:
    """One node with stand-ins for its inputs: for the samples together, and in parts."""

    def __init__(self, node: fx.Node, root: nn.Module, shapes: Shapes) -> None:
        self._node = node
        self._root = root
        self._shapes = shapes
        self._module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        self.has_failed = False

    @property
    def module(self) -> nn.Module | None:
        """The module that the node calls, if it calls one."""
        return self._module

    def keys(self, kinds: Kinds) -> tuple[str, str]:
        """Equal for nodes that need one trial only: without the numbers of layers, and with them."""
        name = name_of(self._node.target)
        targets = kinds.behaviours(self._module) if self._module is not None else (name, name)
        arguments = fx.node.map_aggregate((self._node.args, self._node.kwargs), self._describe)
        unnumbered, numbered = (f"{target} {arguments!r}" for target in targets)
        return unnumbered, numbered

    def _describe(self, item: Any) -> Any:
        if not isinstance(item, fx.Node):
            return item
        pairs = zip(
            pytree.tree_leaves(self._shapes.values[item]),
            pytree.tree_leaves(self._shapes.doubled[item]),
            strict=True,
        )
        if _is_known(item, self._shapes):
            return [_text(leaf) for leaf in pytree.tree_leaves(self._evaluate(item, _TOGETHER))]
        made_of_sizes = item.target if _is_made_of_sizes(item) else None
        return ([self._per_sample(value, doubled) for value, doubled in pairs], made_of_sizes)

    def _per_sample(self, value: Any, doubled: Any) -> str:
        """What a tensor or number is like, whatever the batch's size."""
        if isinstance(value, Tensor):
            batch = self._shapes.batch_of(value, doubled)
            sizes = [
                f"{batch.rows}B" if dim == batch.dim else str(size) for dim, size in enumerate(value.shape)
            ]
            return f"{value.dtype} {' '.join(sizes)} {batch.mixes}"
        degree = growth(value, doubled)
        return f"{value if not degree else value / self._shapes.batch_size**degree} {degree}"

    def differs(self) -> bool:
        """Whether together and in parts give different rows; not, if it cannot be tried."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(
                0
            )  # torch.manual_seed writes down stacks for devices not in use
            for whole_numbers in (True, False):
                try:
                    return self._differs(whole_numbers)
                except _NotTriedError:
                    return False
                except Exception:  # stand-ins may be invalid for it (an index, a probability)
                    self.has_failed = True
        return False

    def _differs(self, whole_numbers: bool) -> bool:
        self._check_size()
        inputs = {source: self._stand_ins(source, whole_numbers) for source in self._node.all_input_nodes}
        with self._ready() as call:
            before = torch.get_rng_state()
            results = [call(*self._arguments(inputs, part)) for part in range(len(_COUNTS))]
            has_drawn = not torch.equal(before, torch.get_rng_state())
            again = call(*self._arguments(inputs, 0))
        values = pytree.tree_leaves(self._shapes.values[self._node])
        doubled = pytree.tree_leaves(self._shapes.doubled[self._node])
        together, *alone = [pytree.tree_leaves(result) for result in results]
        # Draws need not show twice: a path that is rarely dropped may be kept in both calls.
        if has_drawn or not all(map(_close, together, pytree.tree_leaves(again))):
            raise _NotTriedError
        for position, value in enumerate(values):
            if isinstance(value, Tensor):
                batch = self._shapes.batch_of(value, doubled[position])
                if batch.dim is not None and not _same_rows(
                    together[position], [r[position] for r in alone], batch
                ):
                    return True
        return False

    def _check_size(self) -> None:
        """Refuse to try what would take long: random stand-ins are made for all of it."""
        parameters = self._module.parameters() if self._module is not None else ()
        if sum(parameter.numel() for parameter in parameters) > _MAX_PARAMETER_ELEMENTS:
            raise _NotTriedError
        most = _MAX_INPUT_ELEMENTS * self._shapes.batch_size // _TOGETHER
        inputs = [self._shapes.values[source] for source in self._node.all_input_nodes]
        if any(isinstance(leaf, Tensor) and leaf.numel() > most for leaf in pytree.tree_leaves(inputs)):
            raise _NotTriedError

    def _stand_ins(self, node: fx.Node, whole_numbers: bool) -> list[Any]:
        """An input for the samples together, and for each part."""
        if _is_known(node, self._shapes) or (_is_made_of_sizes(node) and not self._is_drawn(node)):
            return [self._evaluate(node, count) for count in _COUNTS]
        values, structure = pytree.tree_flatten(self._shapes.values[node])
        doubled = pytree.tree_leaves(self._shapes.doubled[node])
        leaves = [self._stand_in(*pair, whole_numbers) for pair in zip(values, doubled, strict=True)]
        return [
            pytree.tree_unflatten([leaf[part] for leaf in leaves], structure) for part in range(len(_COUNTS))
        ]

    def _is_drawn(self, node: fx.Node) -> bool:
        """Whether random numbers take part in what is made of sizes: other ones each time. Not in what a size
        is asked of.
        """
        if not _is_made_of_sizes(node):
            return False
        return draws_random_numbers(node, self._root) or any(map(self._is_drawn, node.all_input_nodes))

    def _stand_in(self, value: Any, doubled: Any, whole_numbers: bool) -> list[Any]:
        if not isinstance(value, Tensor):
            return [self._number(value, doubled, count) for count in _COUNTS]
        batch = self._shapes.batch_of(value, doubled)
        if batch.mixes:
            raise _NotTriedError
        shape = list(value.shape)
        if batch.dim is not None:
            shape[batch.dim] = batch.rows * _TOGETHER
        together = _random(shape, value.dtype, whole_numbers)
        if batch.dim is None:
            return [together] * len(_COUNTS)
        return [together, *torch.split(together, [batch.rows * count for count in _PARTS], batch.dim)]

    def _number(self, value: Any, doubled: Any, count: int) -> Any:
        """What a number that depends on the batch's size is for `count` samples."""
        degree = growth(value, doubled)
        if degree is None:
            raise _NotTriedError
        return value if degree == 0 else type(value)(value * (count / self._shapes.batch_size) ** degree)

    def _evaluate(self, node: fx.Node, count: int) -> Any:
        """The value of a node that depends on nothing but the batch's size, and fixed fields."""
        if node.op == "placeholder":
            return rows_for(self._shapes.values[node], count)
        if _is_known(node, self._shapes):
            given = fx.node.map_arg((node.args, node.kwargs), lambda source: self._evaluate(source, count))
            return fixed.computed(_call(node), *given)
        if not isinstance(self._shapes.values[node], Tensor):
            return self._number(self._shapes.values[node], self._shapes.doubled[node], count)
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda source: self._evaluate(source, count))
        return _call(node)(*arguments[0], **arguments[1])

    def _arguments(self, inputs: dict[fx.Node, list[Any]], part: int) -> tuple[Any, Any]:
        return fx.node.map_arg((self._node.args, self._node.kwargs), lambda source: inputs[source][part])

    @contextlib.contextmanager
    def _ready(self) -> Iterator[Callable[[Any, Any], Any]]:
        """The node as a function; a module without dropout and with small random parameters."""
        module = self._module
        if module is None:
            if draws_random_numbers(self._node, self._root):
                raise _NotTriedError
            yield lambda args, kwargs: _call(self._node)(*_copied(args), **_copied(kwargs))
            return
        training = {part: part.training for part in module.modules()}
        made: dict[int, Tensor] = {}

        def real(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                drawn = tensor.is_floating_point() and (isinstance(tensor, nn.Parameter) or tensor.is_meta)
                made[id(tensor)] = (
                    _random(list(tensor.shape), tensor.dtype, True) if drawn else tensor.clone()
                )
            return made[id(tensor)]

        try:
            with (
                generators_kept(module),
                swapped_tensors(module, real),
                by_fixed_statistics(module),
            ):
                for part in module.modules():
                    if isinstance(part, nn.modules.dropout._DropoutNd | nn.RReLU):
                        part.training = False
                yield lambda args, kwargs: module(*_copied(args), **_copied(kwargs))
        finally:
            for part, mode in training.items():
                part.training = mode


def _call(node: fx.Node) -> Callable[..., Any]:
    """What a node calls; memory that it leaves as it is has zeros, so that it is the same each time."""
    target = node.target
    if node.op == "call_method":

        def call(value: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(value, str(target))(*args, **kwargs)

    else:
        assert callable(target)
        call = target
    if getattr(target, "__name__", target) in _UNFILLED:
        return lambda *args, **kwargs: call(*args, **kwargs).zero_()
    return call


def _copied(arguments: Any) -> Any:
    """Copy arguments, so that they may be changed in place."""
    return pytree.tree_map(lambda item: item.clone() if isinstance(item, Tensor) else item, arguments)


def _is_made_of_sizes(node: fx.Node) -> bool:
    """Whether a node comes from nothing but sizes of the batch (torch.arange and the like), and not from
    data. What is drawn, a number for each sample, is as good as data.
    """
    if node.op not in ("call_function", "call_method") or draws_by_itself(node):
        return False
    if node.target in _SIZE_METHODS or (node.target is getattr and node.args[1] in _SIZE_ATTRIBUTES):
        return True
    sources = node.all_input_nodes
    return bool(sources) and all(_is_made_of_sizes(source) for source in sources)


def _text(value: Any) -> str:
    return fixed.describe(value) if isinstance(value, Tensor) else repr(value)


def _is_known(node: fx.Node, shapes: Shapes) -> bool:
    """Whether what a node gives is known, since it comes from fields that are the same in every sample."""
    if node.op == "placeholder" or shapes.is_tensor(node) or shapes.holds_tensors(node):
        return shapes.is_fixed(node)
    sources = node.all_input_nodes
    return bool(sources) and all(_is_known(source, shapes) for source in sources)


def _random(shape: list[int], dtype: torch.dtype, whole_numbers: bool) -> Tensor:
    """Random values; small whole numbers for integers, or zeros where those are invalid."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype) * 0.5
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    return torch.randint(0, 2, shape, dtype=dtype) if whole_numbers else torch.zeros(shape, dtype=dtype)


def _same_rows(together: Tensor, alone: list[Tensor], batch: BatchDim) -> bool:
    assert batch.dim is not None
    if any(part.dim() != together.dim() for part in alone):
        return False
    return _close(together, torch.cat(alone, batch.dim))


def _close(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor):
        return True
    if one.shape != two.shape:
        return False
    if one.is_complex() and two.is_complex():
        one, two = torch.view_as_real(one), torch.view_as_real(two)
    if not one.is_floating_point():
        return torch.equal(one, two)
    finite = one[torch.isfinite(one)].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return torch.allclose(one, two, rtol=0.0, atol=_TOLERANCE * max(scale, 1e-6), equal_nan=True)
