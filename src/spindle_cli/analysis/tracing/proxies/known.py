"""Let a trace decide by what is known before it runs: sizes that are not the batch's.

torch.fx refuses every `if`, loop and `int()` over a traced value. But the length of a sequence is the same
for every batch and every share of it, so a forward may well check it, or loop over it.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from spindle_cli.analysis.fixed import ReadsValuesError, fields_behind, is_fixed
from spindle_cli.analysis.tracing.observe import Observer, storage_of
from spindle_cli.analysis.tracing.proxies.functions import isinstance_of_python
from spindle_cli.analysis.tracing.proxies.selecting import seen_as
from spindle_cli.analysis.tracing.shapes import (
    depends_on_batch_size,
    entries_of,
    find_batch_dim,
    is_record,
    leaves_of,
)
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.refuse import frames_of_caller, place_of_caller, refusal
from spindle_cli.workload.step_values import refuse_decision

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


class UnknownError(Exception):
    """A value is not known before the forward runs; `fields`: of the batch, those that it comes from."""

    def __init__(self, fields: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.fields = fields


class Known:
    """What the nodes of a trace give, as far as the trace has come, for the batch and for twice the batch.

    `decided`: the places where forward has decided by the size of the batch.
    """

    def __init__(
        self,
        observer: Observer,
        root: nn.Module,
        graph: fx.Graph,
        task: str,
        samples: Mapping[str, Tensor],
        batch_size: int,
        around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`around`: what modules are run in to find out what they give."""
        self._around = around
        self._task = task
        self._batch_size = batch_size
        self.decided: dict[str, None] = {}
        self.looking = False  # while it runs modules on fake tensors, which must not be traced
        self._runs = observer.runs(task, root, graph, samples, batch_size)

    def number(self, proxy: fx.Proxy) -> Any:
        """The number, truth value or text that a traced value is for every batch.

        Raises:
            UnknownError: it is a tensor, or something else with tensors in it.
            WorkloadError: it depends on the size of the batch.
        """
        value, doubled = map(_entry, self._look(proxy))
        refuse_decision(self._task, proxy.node, place_of_caller())
        if not isinstance(value, _PLAIN):
            raise UnknownError(fields_behind(proxy.node))
        if value != doubled or depends_on_batch_size(proxy.node, self._runs[0].env, self._runs[1].env):
            raise self._depends_on_batch()
        return value

    def value(self, proxy: fx.Proxy) -> Any:
        """What a traced value is; for a tensor, one of its class and dtype."""
        value = self._look(seen_as(proxy))[0]
        if not isinstance(value, Tensor):
            return value
        made = torch.empty(0, dtype=value.dtype)
        return nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made

    def sizes(self, proxy: fx.Proxy) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The shape of a traced tensor, for the batch and for twice the batch; None of anything else."""
        value, doubled = self._look(proxy)
        is_tensor = isinstance(value, Tensor) and isinstance(doubled, Tensor)
        return (tuple(value.shape), tuple(doubled.shape)) if is_tensor else None

    def is_fixed(self, proxy: fx.Proxy) -> bool:
        """Whether the values of a traced tensor are known."""
        return is_fixed(self._look(proxy)[0])

    def is_tensor(self, proxy: fx.Proxy) -> bool:
        """Whether a traced value is a tensor."""
        return isinstance(self.value(proxy), Tensor)

    def takes_gradient(self, proxy: fx.Proxy) -> bool:
        """Whether a traced value is a tensor with gradients."""
        value = self._look(seen_as(proxy))[0]
        return isinstance(value, Tensor) and value.requires_grad

    def parts(self, proxy: fx.Proxy) -> int | None:
        """How many things a traced tuple or list has; None if it is something else."""
        value, _ = self._look(proxy)
        return len(value) if isinstance(value, tuple | list) else None

    def has_attribute(self, proxy: fx.Proxy, name: str) -> bool:
        """Whether a traced value has an attribute that no tensor has."""
        value = self._look(proxy)[0]
        return not isinstance(value, Tensor) and hasattr(value, name)

    def unpacked(self, proxy: fx.Proxy) -> Any:
        """A traced dict, tuple or list as one of traced values, as deep as it goes, with None where it has
        None; else what is given.
        """
        value = self._look(proxy)[0]
        return proxy if value is None else _unpacked(proxy, value)

    def truth(self, proxy: fx.Proxy) -> bool:
        """Whether an `if` is taken. One that asks for the size of the batch is decided for the task's whole
        batch: a share computes its part of what the whole batch is computed by.

        Raises:
            UnknownError: it is a tensor, or something else with tensors in it.
        """
        value, doubled = map(_entry, self._look(proxy))
        refuse_decision(self._task, proxy.node, place_of_caller())
        if not isinstance(value, _PLAIN):
            raise UnknownError(fields_behind(proxy.node))
        if value != doubled or depends_on_batch_size(proxy.node, self._runs[0].env, self._runs[1].env):
            self.decided[place_of_caller() or "its forward"] = None
        return bool(value)

    def length(self, proxy: fx.Proxy) -> int:
        """The length of a traced tensor, tuple, list or dict.

        Raises:
            UnknownError: it has none.
            WorkloadError: it depends on the size of the batch.
        """
        value, doubled = self._look(proxy)
        if not isinstance(value, Tensor | tuple | list | dict) or (
            isinstance(value, Tensor) and value.dim() == 0
        ):
            raise UnknownError
        if len(value) != len(doubled):
            raise self._depends_on_batch()
        return len(value)

    def counts_samples(self, proxy: fx.Proxy) -> bool:
        """Whether a traced value is a tensor whose length is another for another size of the batch."""
        value, doubled = self._look(seen_as(proxy))
        if not isinstance(value, Tensor) or not isinstance(doubled, Tensor) or value.dim() == 0:
            return False
        return value.shape[0] != doubled.shape[0]

    def are_rows(self, *nodes: fx.Node) -> bool:
        """Whether nodes give tensors with the samples along the first dimension."""
        self._look_at_all()
        values, doubled = (run.env for run in self._runs)
        return all(
            isinstance(node, fx.Node)
            and isinstance(values[node], Tensor)
            and find_batch_dim(values[node].shape, doubled[node].shape, self._batch_size).dim == 0
            for node in nodes
        )

    def shares_memory(self, proxy: fx.Proxy) -> bool:
        """Whether a traced tensor lies in memory that others of the trace look at, too."""
        tensor, _ = self._look(proxy)
        if not isinstance(tensor, Tensor):
            return False
        return any(
            isinstance(leaf, Tensor) and leaf is not tensor and storage_of(leaf) == storage_of(tensor)
            for value in self._runs[0].env.values()
            for leaf in leaves_of(value)
        )

    def _look(self, proxy: fx.Proxy) -> tuple[Any, Any]:
        node = proxy.node
        self._look_at_all()
        return self._runs[0].env[node], self._runs[1].env[node]

    def _look_at_all(self) -> None:
        self.looking = True
        try:
            # Without the context variables of forward: some code hands its hooks what to record in them.
            with self._around(), isinstance_of_python():
                contextvars.Context().run(self._advance)
        finally:
            self.looking = False

    def _advance(self) -> None:
        for run in self._runs:
            run.advance()

    def _depends_on_batch(self) -> WorkloadError:
        made = refusal(
            self._task,
            "forward decides by the size of the batch, which a share of the batch does not have",
            place_of_caller(),
            "Use x.shape[0] or len(x) for shapes (view, expand, arange), to divide by and in `if`, not in "
            "`range`, `int` or `float`.",
        )
        return ReadsValuesError.at(made, frames=frames_of_caller())


def _unpacked(proxy: Any, value: Any) -> Any:
    if value is None:  # `is None` asks nobody
        return None
    if type(value) in (dict, OrderedDict, defaultdict):
        parts_by_key = ((key, _unpacked(proxy[key], inner)) for key, inner in value.items())
        made = copy(value)  # a defaultdict's default stays
        made.update(parts_by_key)
        return made
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        parts = [_unpacked(proxy[position], inner) for position, inner in enumerate(value)]
        if type(value) in (tuple, list):
            return type(value)(parts)
        if hasattr(value, "_fields"):
            return type(value)(*parts)
    if is_record(value) and any(isinstance(leaf, Tensor) for leaf in leaves_of(value)):
        made = {}
        for name, inner in entries_of(value).items():
            taken = proxy.tracer.create_proxy("call_function", builtins.getattr, (proxy, name), {})
            made[name] = _unpacked(taken, inner)
        return type(value)(**made)
    return proxy


def _entry(value: Any) -> Any:
    """The number that a tensor of one entry is, if it is known; anything else as it is."""
    return value.item() if is_fixed(value) and value.numel() == 1 else value


@contextlib.contextmanager
def numbers_are_known(tracer: Any) -> Iterator[None]:
    """Let int(), len() and indexing take what is known of a traced value; `tracer.known` is asked.

    Python's len() gives nothing but a number, so another stands for it here: the length of a tensor that
    grows with the batch is traced, as x.shape[0] is.
    """
    proxy_class: Any = fx.Proxy
    length_of = builtins.len

    def length(item: Any) -> Any:
        if isinstance(item, fx.Proxy) and tracer.known.counts_samples(item):
            return item.size(0)
        return length_of(item)

    replaced: dict[str, Callable[..., Any]] = {
        "__len__": lambda proxy: _length_hint(tracer, proxy),
        "__int__": lambda proxy: int(tracer.known.number(proxy)),
        "__float__": lambda proxy: float(tracer.known.number(proxy)),
        "__index__": lambda proxy: int(tracer.known.number(proxy)),
        "__round__": lambda proxy, digits=None: round(tracer.known.number(proxy), digits),
    }
    originals = {name: proxy_class.__dict__.get(name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(proxy_class, name, function)
        builtins.len = length
        yield
    finally:
        builtins.len = length_of
        for name, original in originals.items():
            if original is None:
                delattr(proxy_class, name)
            else:
                setattr(proxy_class, name, original)


def _length_hint(tracer: Any, proxy: fx.Proxy) -> int:
    """What list() and its like ask for, who do without where they get a TypeError."""
    if tracer.known.counts_samples(proxy):
        raise TypeError("the length of a Proxy for a batch is known only when it runs")
    length: int = tracer.known.length(proxy)
    return length
