"""What one process has found of a workload's layers, for the other processes of the same run.

To find what a layer gives and how it treats its samples takes most of the time of an analysis. The launcher
has found it when it starts the workers, and hands it on as data: by layer and input, the shapes that come out
and the verdicts. A worker traces its own copy of the workload all the same, and what it looks up is named by
all that the layer's forward could read (tracing/behaviour.py). What is not in the memo it finds by itself.

Only what means the same in another process is in it: neither values that are known by their place in memory
alone, nor results of types of the user's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import AfterValidator, Field, JsonValue, TypeAdapter, model_validator
from torch import Tensor

from spindle_cli.analysis.fixed import values_of
from spindle_cli.analysis.rules.types import Batch, Mixed, Reduced, Whole
from spindle_cli.files.artifact import Artifact, Model

T = TypeVar("T")
R = TypeVar("R")
MakeTensor = Callable[..., Tensor]  # of shape, strides and dtype=
_PLAIN = (bool, int, float, str, type(None))
_STATES: Mapping[str, TypeAdapter[Any]] = {
    cls.__name__: TypeAdapter(cls) for cls in (Whole, Batch, Reduced, Mixed)
}
# How Python shows what it knows by its place in memory alone.
_BY_ADDRESS = " at 0x"
# How behaviour.py begins the digest of what has such a thing in it.
HERE = "here:"


class NotPortableError(Exception):
    """Raised for a value that means nothing in another process."""


class StateRecord(Model):
    """A `rules.states.State` as data.

    Attributes:
        kind: Name of its class.
        attributes: What the class has, by name.
    """

    kind: Literal["Whole", "Batch", "Reduced", "Mixed"]
    attributes: dict[str, bool | int | str | None]

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        made: Any = _STATES[self.kind].validate_python(self.attributes)
        if asdict(made) != self.attributes:
            raise ValueError(f"not what {self.kind} has")
        return self


def _can_be_unpacked(record: JsonValue) -> JsonValue:
    try:
        unpacked(record, partial(torch.empty_strided, device="meta"))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"no value of a call: {type(error).__name__}") from error
    return record


Packed = Annotated[JsonValue, AfterValidator(_can_be_unpacked)]


class FindingsRecord(Model):
    """`splitting.examine.Findings` of one call; values as `packed` gives them.

    Attributes:
        results: What the call gives for each size of the batch; null: it failed.
        states: How every tensor in a result treats the samples of the batch.
        why_not: Why the call must not be split, whatever it gives.
        changed: Parameters and buffers that it changes.
        reads: Buffers whose values go into what it gives.
        draws_own: Whether it draws from a generator that somebody holds.
        kept: What it leaves for the next call where no checkpoint has it.
        left: What it leaves for whoever looks, whether the next call does or not.
    """

    results: tuple[Packed, ...] | None
    states: tuple[StateRecord, ...]
    why_not: StateRecord | None = None
    changed: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    draws_own: bool = False
    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class FlowRecord(Model):
    """How gradients flow through an op (`metaops/gradients.py`).

    Attributes:
        given: Places of the inputs that it gives a gradient for.
        asks: Whether its forward asks for gradients itself.
        is_seen: Whether it could be run.
        others: Whether others than torch have a part in its backward pass.
    """

    given: tuple[int, ...]
    asks: bool
    is_seen: bool = True
    others: bool = False


class AnalysisMemo(Artifact):
    """What one process has found out about a workload's layers, as data for others.

    Attributes:
        torch_version: with which it was found; another finds it anew.
        observed: what calls give for the batch's shapes, by `key_of` the call.
        findings: how calls treat their samples, by `key_of` the call.
        mixes: whether samples were seen to depend on each other when a call was tried, by `key_of` the call.
        pairs: why a loss that compares samples cannot be split over them, None where it can; by `key_of` the
            loss.
        flows: how gradients flow through ops, by `key_of` what describes them.
    """

    KIND: ClassVar[str] = "analysis-memo"

    schema_: Annotated[Literal["spindle.analysis-memo/1"], Field(alias="schema")] = "spindle.analysis-memo/1"
    torch_version: str
    observed: dict[str, Packed]
    findings: dict[str, FindingsRecord]
    mixes: dict[str, bool]
    pairs: dict[str, str | None] = Field(default_factory=dict)
    flows: dict[str, FlowRecord] = Field(default_factory=dict)

    def is_of_this_torch(self) -> bool:
        """Whether the memo was made with this process's version of torch."""
        return self.torch_version == torch.__version__

    def with_more(self, more: AnalysisMemo) -> AnalysisMemo:
        """Return a memo with the entries of this one and of another."""
        parts = {
            name: {**getattr(self, name), **getattr(more, name)}
            for name in ("observed", "findings", "mixes", "pairs", "flows")
        }
        return self.model_copy(update=parts)


def key_of(call: str) -> str | None:
    """A short name of a call from a text that says all about it; None where that means nothing elsewhere."""
    if HERE in call or _BY_ADDRESS in call:
        return None
    return hashlib.sha256(call.encode()).hexdigest()[:32]


def packed(value: Any) -> JsonValue:
    """Tensors without values, and tuples, lists and dicts of them, as JSON.

    Raises:
        NotPortableError: there is something else in it.
    """
    if isinstance(value, Tensor):
        if type(value).__name__ not in ("Tensor", "FakeTensor") or values_of(value) is not None:
            raise NotPortableError
        return {
            "tensor": list(value.shape),
            "strides": list(value.stride()),
            "dtype": str(value.dtype).removeprefix("torch."),
            "grad": value.requires_grad,
        }
    if type(value) in _PLAIN:
        return {"plain": value}
    if type(value) in (tuple, list):
        return {type(value).__name__: [packed(item) for item in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: packed(item) for key, item in value.items()}}
    raise NotPortableError


def unpacked(record: Any, make: MakeTensor) -> Any:
    """What `packed` was given; tensors are made by `make(shape, strides, dtype)`."""
    if "tensor" in record:
        dtype = getattr(torch, record["dtype"])
        made = make(tuple(record["tensor"]), tuple(record["strides"]), dtype=dtype)
        return made.requires_grad_() if record["grad"] else made
    if "plain" in record:
        return record["plain"]
    if "tuple" in record:
        return tuple(unpacked(item, make) for item in record["tuple"])
    if "list" in record:
        return [unpacked(item, make) for item in record["list"]]
    return {key: unpacked(item, make) for key, item in record["dict"].items()}


def portable(values: Mapping[str, T], record: Callable[[T], R]) -> dict[str, R]:
    """What is known that means the same in another process, by `key_of` its key."""
    records: dict[str, R] = {}
    for call, value in values.items():
        key = key_of(call)
        if key is None:
            continue
        try:
            records[key] = record(value)
        except NotPortableError:
            continue
    return records
