"""What code that is not torch's does in a module's backward pass, followed as its forward is.

The gradients of torch's own operations keep samples apart wherever these do themselves. What a hook (of a
tensor, a layer or a node of the graph) or the backward of a `torch.autograd.Function` makes of a gradient has
to be looked at: `g / g.norm()` is another number for the samples of a share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from spindle_cli.analysis.fixed import reads_values
from spindle_cli.analysis.rules.tape import Entry, Tape, tensors_in
from spindle_cli.analysis.rules.types import WHOLE, Batch, Mixed, Reduced, State
from spindle_cli.analysis.splitting.carried import as_shape
from spindle_cli.analysis.splitting.follow import Follower
from spindle_cli.analysis.tracing.shapes import leaves_of
from spindle_cli.analysis.without_data import Remembering, Unread
from spindle_cli.workload.refuse import place_of_error

_OTHER = "in its backward pass other things are done for another size of the batch"
_COUPLES = "in its backward pass a gradient is changed by more than the sample that it belongs to"
_OTHER_AGAIN = "its backward pass computes otherwise each time that it runs"
_Result = tuple[Any, int]  # a node of the graph that autograd keeps, and which of its results


@dataclass
class _Segment:
    """What is done with gradients from one of torch's own nodes to the next.

    Attributes:
        given: gradients that the first one has made, and of which results.
        entries: what is done with them.
        taken: gradients that the next one takes, and of which results.
    """

    given: list[tuple[_Result, Tensor]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    taken: list[tuple[_Result, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Backward:
    """A backward pass from all that a module gives, as far as others than torch have a part in it.

    Attributes:
        segments: in order; none where torch does it alone.
        failed: why it could not be run, or is another one when it is run again.
    """

    segments: tuple[_Segment, ...] = ()
    failed: Mixed | None = None

    @classmethod
    def of(cls, module: nn.Module, result: Any, tape: Tape, size: int) -> Backward:
        """Run the backward pass of a forward that was recorded for a batch of some size."""
        ends = [leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        with _Recorder(ends) as recorder:
            if not recorder.has_others and not any(map(_has_hooks, _of_tape(tape))):
                return cls()
            try:
                recorder.run(ends, is_last=False)
            except Exception as error:  # the user's code, on tensors that may have no values
                text = str(error).strip().split("\n")[0]
                why = f"its backward pass fails for a batch of {size}: {type(error).__name__}: {text}"
                if reads_values(error):
                    why = "its backward pass decides by the values of its batch"
                return cls(failed=Mixed(why, place_of_error(error)))
            finally:
                _forget_gradients(module)
        difference = _difference_again(ends, recorder.segments)
        _forget_gradients(module)
        return cls(tuple(recorder.segments), difference)


def _forget_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def _difference_again(ends: Sequence[Tensor], first: Sequence[_Segment]) -> Mixed | None:
    """Say that a second backward pass computes otherwise than the first: by a number that it counts in a
    class, say, which each share would count for itself. None: it does not, or it cannot be run twice.
    """
    with _Recorder(ends) as recorder:
        try:
            recorder.run(ends, is_last=True)
        except Exception:  # it has given away what it needs
            return None
    work, again = _work(first), _work(recorder.segments)
    if work == again:
        return None
    pairs = zip_longest(work, again)
    position = next(position for position, (one, another) in enumerate(pairs) if one != another)
    entries = [entry for segment in first for entry in segment.entries]
    return Mixed(_OTHER_AGAIN, entries[position].place if position < len(entries) else None)


def _work(segments: Sequence[_Segment]) -> list[tuple[Any, ...]]:
    """What is done with gradients, in order."""
    return [
        (entry.func, pytree.tree_map(as_shape, (entry.args, entry.kwargs)), _number_made_of(entry))
        for segment in segments
        for entry in segment.entries
    ]


def _number_made_of(entry: Entry) -> bytes | None:
    """The bytes of what a tensor is made of that has come from Python: `torch.tensor(n)`."""
    if entry.func is not torch.ops.aten.lift_fresh.default or not isinstance(entry.args[0], Tensor):
        return None
    made = entry.args[0].detach()
    if made.is_meta or made.layout is not torch.strided:
        return None
    return bytes(made.reshape(-1).contiguous().view(torch.uint8).tolist())


def has_others(ends: Sequence[Tensor]) -> bool:
    """Whether others than torch's own nodes have a part in the backward pass from some tensors, but for hooks
    of tensors.
    """
    with _Recorder([end for end in ends if end.grad_fn is not None]) as recorder:
        return recorder.has_others


def why_coupled_backwards(follower: Follower, backwards: Sequence[Backward], tape: Tape) -> Mixed | None:
    """Say why the gradients of samples depend on each other; None: they do not.

    Args:
        follower: has followed the forward.
        backwards: the backward passes, for each of the follower's sizes; none of what has none of its own.
        tape: of the forward, for the first of them.
    """
    failed = next((backward.failed for backward in backwards if backward.failed is not None), None)
    if failed is not None or not backwards or not backwards[0].segments:
        return failed
    if len({len(backward.segments) for backward in backwards}) > 1:
        return Mixed(_OTHER)
    forward_states = _States(follower, tape)
    for segments in zip(*(backward.segments for backward in backwards), strict=True):
        why = _why_coupled_segment(follower, forward_states, segments)
        if why is not None:
            return why
    return None


def _why_coupled_segment(
    follower: Follower, forward_states: _States, segments: Sequence[_Segment]
) -> Mixed | None:
    """Why gradients of samples do not stay apart in one segment of the backward passes."""
    first = segments[0]
    for gradient, expected in forward_states.expected([segment.given for segment in segments]):
        follower.give(gradient, expected)
    why = follower.follow([segment.entries for segment in segments])
    if why is not None:
        return Mixed(f"in its backward pass {why.why.removeprefix('its ')}", why.place)
    for gradient, expected in forward_states.expected([segment.taken for segment in segments]):
        observed = follower.state_of(gradient)
        if isinstance(observed, Mixed):
            return Mixed(f"in its backward pass {observed.why}", observed.place)
        if observed != expected:
            return Mixed(_COUPLES, next((entry.place for entry in first.entries if entry.place), None))
    return None


class _States:
    """What the gradients of a forward's results are, by what the results are."""

    def __init__(self, follower: Follower, tape: Tape) -> None:
        self._follower = follower
        self._of_results: dict[_Result, State] = {}
        for tensor in _of_tape(tape):
            if tensor.grad_fn is not None:
                self._of_results[tensor.grad_fn, tensor.output_nr] = follower.state_of(tensor)

    def expected(
        self, gradients: Sequence[Sequence[tuple[_Result, Tensor]]]
    ) -> Iterator[tuple[Tensor, State]]:
        """The gradients that the first backward pass has here, each with the state that the forward's result
        implies; `gradients`: of all passes, with what they are gradients of.
        """
        for position, (result, gradient) in enumerate(gradients[0]):
            shapes = [pairs[position][1].shape for pairs in gradients if len(pairs) > position]
            yield gradient, self.of_gradient(result, shapes)

    def of_gradient(self, result: _Result, shapes: Sequence[Sequence[int]]) -> State:
        """The state of a result's gradient, which has these shapes for the sizes of the batch. That of
        something which is the same for all samples is a sum over them, as is what each share has of that of a
        mean.
        """
        state = self._of_results.get(result)
        if isinstance(state, Batch):
            return Batch(state.dim, state.outer, state.inner)
        if isinstance(state, Reduced) and state.degree == 1:
            return WHOLE
        if isinstance(state, Reduced):
            return Reduced(1)
        sizes = self._follower.sizes
        if len(shapes) < len(sizes) or len({len(shape) for shape in shapes}) > 1:
            return Mixed(_OTHER)
        moved = [dim for dim in range(len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1]
        if not moved:
            return Reduced(1)
        dim = moved[0]
        rows = [divmod(shape[dim], size) for shape, size in zip(shapes, sizes, strict=True)]
        if len(moved) > 1 or len(set(rows)) > 1 or rows[0][1]:
            return Mixed("in its backward pass a gradient has no row for each sample")
        return Batch(dim, 1, rows[0][0])


class _Recorder:
    """Runs a backward pass and keeps what others than torch's own nodes do in it. Its hooks go at the end."""

    def __init__(self, ends: Sequence[Tensor]) -> None:
        self.segments: list[_Segment] = []
        self.has_others = False
        self._handles: list[Any] = []
        self._tape = Tape()
        self._nodes = _nodes(ends)

    def __enter__(self) -> _Recorder:
        for node in self._nodes:
            self._watch(node)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch(self, node: Any) -> None:
        """Know when a node of torch's runs, and whether others have a part in it."""
        if _is_of_others(node):
            self.has_others = True
            return
        for register, call, is_last in (
            (node.register_prehook, self._begin(node), True),
            (node.register_hook, self._end(node), False),
        ):
            handle = register(call)
            self._handles.append(handle)
            hooks = handle.hooks_dict_ref()
            self.has_others = self.has_others or len(hooks) > 1
            others = {} if is_last else {key: hook for key, hook in hooks.items() if key != handle.id}
            for key in others:  # are none of what the node does; torch calls hooks as a plain dict has them
                del hooks[key]
            hooks.update(others)

    def _begin(self, node: Any) -> Callable[[Sequence[Tensor | None]], None]:
        def begin(gradients: Sequence[Tensor | None]) -> None:
            taken = [
                ((node, place), gradient) for place, gradient in enumerate(gradients) if gradient is not None
            ]
            self.segments[-1].taken.extend(taken)
            self._keep()

        return begin

    def _end(self, node: Any) -> Callable[[Sequence[Tensor | None], Any], None]:
        def end(gradients: Sequence[Tensor | None], _: Any) -> None:
            self._tape.entries = []
            pairs = zip(node.next_functions, gradients, strict=True)
            self.segments.append(_Segment([(to, gradient) for to, gradient in pairs if gradient is not None]))

        return end

    def _keep(self) -> None:
        self.segments[-1].entries.extend(self._tape.entries)
        self._tape.entries = []

    def run(self, ends: Sequence[Tensor], *, is_last: bool) -> None:
        """Run the backward pass from these tensors, the last one through their graph or not."""
        gradients = [torch.empty_like(end) for end in ends]
        given = [
            ((end.grad_fn, end.output_nr), gradient) for end, gradient in zip(ends, gradients, strict=True)
        ]
        self.segments.append(_Segment(list(given)))
        with Remembering(), self._tape, Unread():
            torch.autograd.backward(ends, gradients, retain_graph=not is_last)


def _nodes(ends: Sequence[Tensor]) -> list[Any]:
    """The nodes that autograd has for some tensors, in an order that the graph alone decides."""
    ordered: dict[Any, None] = {}
    left = [end.grad_fn for end in reversed(ends)]
    while left:
        node = left.pop()
        if node is not None and node not in ordered:
            ordered[node] = None
            left += [source for source, _ in reversed(node.next_functions)]
    return list(ordered)


def _is_of_others(node: Any) -> bool:
    """Whether a node runs the backward of a `torch.autograd.Function` that is not torch's."""
    if not isinstance(node, BackwardCFunction):
        return False
    return not node._forward_cls.__module__.startswith("torch.")  # type: ignore[attr-defined]  # of autograd functions


def _has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks)


def _of_tape(tape: Tape) -> Iterator[Tensor]:
    for entry in tape.entries:
        yield from tensors_in([*entry.args, *entry.kwargs.values(), entry.result])
