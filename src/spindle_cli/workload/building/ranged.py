"""Build parameters of which only ranges are to be kept, one whole at a time.

Such a parameter is on the meta device. An operation on it runs on a real stand-in of its whole storage; when
another one is operated on, the ranges are kept and the stand-in goes. So a parameter has true values in all
places while it is filled, and later in its ranges alone: what computes each element by itself may still
change it then (a scale, a cast), what fills it may fill it again, and what looks at other elements cannot be
done, in which case the whole build is done otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.memory import written_by
from spindle_cli.workload.initial.types import OwnPart, OwnValues, fingerprint

_AT_ONCE = 2  # stand-ins: a layer's weight and its bias are filled in turn


class RangesOnlyError(WorkloadError):
    """An operation needs elements of a parameter that are not kept."""


@dataclass
class _Entry:
    """The storage of such a parameter, or of what was made of one; `size`, `stride`: the parameter's.

    Attributes:
        values: of its parts, while it has no stand-in.
        whole: the stand-in, of the storage's size. `is_true`: in all places, not in the parts alone.
        fingerprint: see `OwnValues`.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    num_elements: int
    parts: tuple[OwnPart, ...]
    values: list[Tensor] | None = None
    whole: Tensor | None = None
    is_true: bool = False
    fingerprint: int | None = None

    def shaped(self) -> Tensor:
        """Return the stand-in as the parameter."""
        assert self.whole is not None, "it has one"
        return self.whole.as_strided(self.size, self.stride)

    @property
    def num_bytes(self) -> int:
        """The bytes of a stand-in."""
        return self.num_elements * self.dtype.itemsize

    def fetch(self) -> None:
        """Have a stand-in, true in the parts at least."""
        if self.whole is None:
            self.whole = torch.empty(self.num_elements, dtype=self.dtype)
            for part, values in zip(self.parts, self.values or (), strict=True):
                part.put_into(self.shaped(), values)
            self.values, self.is_true = None, False

    def let_go(self) -> bool:
        """Keep the parts alone; gives whether nobody else has the stand-in, who could still change it."""
        if self.whole is None:
            return True
        self.values = [part.of(self.shaped()) for part in self.parts]
        reference: Any = StorageWeakRef  # torch gives it no types
        storage = reference(self.whole.untyped_storage())
        self.whole, self.is_true = None, False
        is_alone: bool = storage.expired()
        return is_alone


@dataclass
class Ranged:
    """The parameters of a build of which only parts are kept.

    Attributes:
        wanted: by number of birth, the parts.
        failed: an operation was asked for that cannot be done.
        most_bytes: of stand-ins at any time.
    """

    wanted: Mapping[int, tuple[OwnPart, ...]] = field(default_factory=dict)
    failed: bool = False
    most_bytes: int = 0
    _entries: dict[int, tuple[Any, _Entry]] = field(default_factory=dict)  # by storage, with a weak reference
    _real: list[_Entry] = field(default_factory=list)  # that have stand-ins

    def take(self, parts: tuple[OwnPart, ...], whole: Tensor, meta: Tensor) -> None:
        """`meta` stands for `whole` from now on."""
        if _is_meta(whole):  # nothing, or a copy of another one
            self.failed = True
            return
        base = whole.detach()
        made = base.as_strided((_extent(base),), (1,), base.storage_offset())
        entry = _Entry(base.shape, base.stride(), base.dtype, made.numel(), parts, None, made, is_true=True)
        entry.fingerprint = fingerprint(entry.shaped())
        self._note(meta, entry)
        self._keep_real([entry])

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is such a parameter, a view of one, or was made of one."""
        return self._entry_of(tensor) is not None

    def values_of(self, parameter: Tensor) -> tuple[OwnValues, ...] | None:
        """Return what is kept of a parameter; None where it is no such one."""
        entry = self._entry_of(parameter)
        if entry is None:
            return None
        if (entry.size, entry.stride) != (parameter.shape, parameter.stride()):
            raise self._refusal("another shape")
        self._let_go(entry)
        self._real = [real for real in self._real if real is not entry]
        return tuple(
            OwnValues(part, values, entry.fingerprint)
            for part, values in zip(entry.parts, entry.values or (), strict=True)
        )

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation of which at least one argument is a parameter that is kept in part.

        Raises:
            RangesOnlyError: it needs what is not kept.
        """
        if func.is_view:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name in _FACTORIES:
            return func(*pytree.tree_map(self._shape_alone, args), **_on_cpu(kwargs))
        given, written = _tensors((args, kwargs)), written_by(func, args, kwargs)
        self._fetch(given, name)
        read = [tensor for tensor in given if name not in _FILLING or tensor is not written[0]]
        false = [
            tensor for tensor in read if (entry := self._entry_of(tensor)) is not None and not entry.is_true
        ]
        metas = {id(tensor): tensor for tensor in read if _is_meta(tensor)}
        is_alone = len(metas) == 1 and _is_of_each_element(func, name)
        if name in _COPIES or (false and is_alone and not written):
            if len(metas) != 1:
                raise self._refusal(name)
            return self._derived(func, args, kwargs, next(iter(metas.values())))
        if false and not (is_alone and false[0] is written[0]):
            raise self._refusal(name)
        return self._run_real(func, args, kwargs, written, fills=name in _FILLING)

    def _fetch(self, given: Sequence[Tensor], name: str) -> None:
        """Have stand-ins of the tensors that an operation of this name takes; refuse those without values."""
        if any(_is_meta(tensor) and not self.has(tensor) for tensor in given):
            raise self._refusal(name)
        self._keep_real([entry for tensor in given if (entry := self._entry_of(tensor)) is not None])

    def _run_real(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: list[Tensor], *, fills: bool
    ) -> Any:
        made = func(*pytree.tree_map(self._real_of, args), **_on_cpu(pytree.tree_map(self._real_of, kwargs)))
        for tensor in written:
            entry = self._entry_of(tensor)
            if entry is not None:
                is_all = fills and tensor.numel() == entry.num_elements
                entry.is_true = entry.is_true or is_all
                entry.fingerprint = fingerprint(entry.shaped()) if is_all else None
        if not written or not func._schema.returns:
            return made
        return written[0] if len(func._schema.returns) == 1 else tuple(written)

    def _derived(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor) -> Tensor:
        """Return what an operation makes of each element: true where these are."""
        entry = self._entry_of(tensor)
        made = func(*pytree.tree_map(self._real_of, args), **_on_cpu(pytree.tree_map(self._real_of, kwargs)))
        is_all = entry is not None and (tensor.shape, tensor.stride()) == (entry.size, entry.stride)
        if entry is None or not is_all or not isinstance(made, Tensor) or made.shape != tensor.shape:
            raise self._refusal(func._schema.name)
        meta = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="meta")
        whole = made.as_strided((_extent(made),), (1,), 0)
        derived = _Entry(made.shape, made.stride(), made.dtype, whole.numel(), entry.parts, None, whole)
        derived.is_true = entry.is_true
        self._note(meta, derived)
        self._keep_real([derived])
        return meta

    def _refusal(self, what: str) -> RangesOnlyError:
        self.failed = True
        return RangesOnlyError(f"{what} needs more of a parameter than its own range")

    def _note(self, meta: Tensor, entry: _Entry) -> None:
        reference: Any = StorageWeakRef  # torch gives it no types
        storage = reference(meta.untyped_storage())
        self._entries[storage.cdata] = storage, entry

    def _entry_of(self, tensor: Tensor) -> _Entry | None:
        if not self._entries or not _is_meta(tensor):
            return None
        storage, entry = self._entries.get(tensor.untyped_storage()._cdata, (None, None))
        return None if storage is None or storage.expired() else entry

    def _let_go(self, entry: _Entry) -> None:
        if not entry.let_go():
            self.failed = True

    def _keep_real(self, needed: Iterable[_Entry]) -> None:
        """Have stand-ins of these, and of no others but one."""
        now = list({id(entry): entry for entry in needed}.values())
        others = [entry for entry in self._real if not any(entry is needed_now for needed_now in now)]
        kept = others[-1:] if len(now) < _AT_ONCE else []
        for unneeded in others:
            if not any(unneeded is still_kept for still_kept in kept):
                self._let_go(unneeded)
        for entry in now:
            entry.fetch()
        self._real = [*kept, *now]
        self.most_bytes = max(self.most_bytes, sum(entry.num_bytes for entry in self._real))

    def _real_of(self, item: Any) -> Any:
        entry = self._entry_of(item) if isinstance(item, Tensor) else None
        if entry is None:
            return item
        assert entry.whole is not None, "arguments have stand-ins"
        return entry.whole.as_strided(item.shape, item.stride(), item.storage_offset())

    def _shape_alone(self, item: Any) -> Any:
        if not isinstance(item, Tensor) or self._entry_of(item) is None:
            return item
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="cpu")


# They look at no values.
_FACTORIES = {
    *(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")),
    *(f"new_{kind}" for kind in ("empty", "zeros", "ones", "full", "empty_strided")),
}
# They give each element that they write a value that none had before.
_FILLING = {
    *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("zero_", "fill_", "copy_"),
}
# They are of each element by itself, and are not tagged so.
_BY_ELEMENT = {*_FILLING, "masked_fill_", "abs_", "_to_copy"}


# They make a tensor of the same values, which may take the place of a parameter's.
_COPIES = {"clone", "_to_copy"}


def _is_of_each_element(func: Any, name: str) -> bool:
    """Whether what an operation makes of an element depends on no other."""
    is_known = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    return is_known or name in _BY_ELEMENT


def _tensors(tree: Any) -> list[Tensor]:
    return [item for item in pytree.tree_leaves(tree) if isinstance(item, Tensor)]


def _on_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Where a plain build has what is made of a parameter."""
    return {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else dict(kwargs)


def _is_meta(tensor: Tensor) -> bool:
    """Asked itself, a tensor of which ranges are kept says what it would say in a plain build."""
    return tensor.layout is torch.strided and tensor.untyped_storage().device.type == "meta"


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last of a tensor in its memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
