"""The tensors of a checkpoint, read one at a time from whichever shards have them or fragments of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spindle_cli.checkpoint_files import Checkpoint, Part, state_key, state_of
from spindle_cli.errors import InputError
from spindle_cli.fragments import Fragment, fragment_key, fragments_by_name, in_order, parse_key

T = TypeVar("T")


def joined(fragments: Mapping[Fragment | None, Tensor]) -> Tensor:
    """A tensor from its fragments, which lie side by side along one dimension; None: the tensor itself."""
    ordered = in_order(list(fragments))
    first = ordered[0]
    if first is None or len(ordered) == 1:
        return fragments[first]
    return torch.cat([fragments[each] for each in ordered], first.dim)


def refit(
    wanted: Fragment | None,
    saved: Sequence[Fragment | None],
    read: Callable[[Fragment | None], Tensor],
) -> Tensor | None:
    """A fragment of a tensor from whatever fragments of it were saved; None where some of it is in none.

    Args:
        wanted: the fragment; None: the whole tensor.
        saved: fragments of one tensor, in order, all along one dimension; or [None].
        read: one of them. A number (a count of steps) is the same for all.

    Returns:
        A contiguous tensor: fused optimizers take no other for their state.
    """
    if wanted is not None and any(each is not None and each.dim != wanted.dim for each in saved):
        whole = refit(None, saved, read)
        return None if whole is None else cut_out(whole, wanted).contiguous()
    taken: dict[Fragment | None, Tensor] = {}
    for each in saved:
        if wanted is None or each is None:
            common = each or wanted
        else:
            common = Fragment(wanted.dim, max(each.first, wanted.first), min(each.last, wanted.last))
        if common is not None and common.first >= common.last:
            continue
        found = read(each)
        if found.dim() == 0:
            return found.clone()  # it is read more than once, always as the same memory
        taken[common] = found if common is None or common == each else cut_out(found, common, each)
    whole = joined(taken) if taken else None
    if whole is None or (wanted is not None and whole.shape[wanted.dim] != wanted.last - wanted.first):
        return None
    return whole.contiguous()


def cut_out(tensor: Tensor, wanted: Fragment, held: Fragment | None = None) -> Tensor:
    """A fragment, as a view, of a tensor or of a fragment `held` of it along the same dimension."""
    start = wanted.first - (0 if held is None else held.first)
    return tensor.narrow(wanted.dim, start, wanted.last - wanted.first)


class SavedTensors:
    """All shards of a checkpoint by key; a tensor is read when it is asked for.

    Parameters and their names may be those of fragments (fragments.py): they are found whatever fragments
    were saved.
    """

    def __init__(
        self, folder: Path, checkpoint: Checkpoint, stack: ExitStack, own: str | None = None
    ) -> None:
        """`own`: the shard that is asked first for what every rank has its own of."""
        self._folder = folder
        self._stack = stack
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        # Of each parameter, by the optimizer's key: the parts of it that are there; None is all of it.
        self._states: dict[str, dict[str, list[Part | None]]] = {}
        for shard in sorted(checkpoint.shards, key=lambda shard: shard.file != own):
            for key in shard.keys:
                if key not in self._where and (found := state_of(key)) is not None:
                    optimizer_key, name, part = found
                    self._states.setdefault(name, {}).setdefault(optimizer_key, []).append(part)
                self._where.setdefault(key, shard.file)
        self._fragments = fragments_by_name(self._where)
        self._with_state = fragments_by_name(self._states)

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def optimizer_keys(self, name: str) -> tuple[str, ...]:
        """The optimizer's keys for a parameter; none where it has no state of it."""
        return tuple(self._states[name] if name in self._states else self._states.get(self._like(name), {}))

    def state(self, key: str, name: str, part: Part | None) -> Tensor:
        """Optimizer state of a parameter, or of a part of it, however it was cut when saved.

        Args:
            key, name: the optimizer's key, and the parameter.
            part: of the flattened parameter; None: all of it.

        Returns:
            A vector, unless all of it was saved and is asked for; a state without the parameter's elements (a
            count of steps) as it is.

        Raises:
            InputError: a shard cannot be read, or some of the elements are in none.
        """
        if name not in self._states:
            found = self._refitted_state(key, name)
            return found if part is None or found.dim() == 0 else found.flatten()[slice(*part)]
        parts = self._states[name][key]
        if None in parts:
            found = self.get(state_key(key, name))
            return found if part is None or found.dim() == 0 else found.flatten()[slice(*part)]
        cut = sorted(each for each in parts if each is not None)
        first, last = (0, cut[-1][1]) if part is None else part
        taken: list[Tensor] = []
        for begin, end in cut:
            if begin <= first < min(end, last):
                found = self.get(state_key(key, name, (begin, end)))
                if found.dim() == 0:
                    return found
                taken.append(found[first - begin : last - begin])
                first = min(end, last)
        if first < last:
            raise InputError(
                f"{self._folder}: the optimizer's {key} of {name} lacks elements {first} to {last - 1}",
                hint="The checkpoint is of another version of the workload.",
            )
        return torch.cat(taken)

    def _like(self, name: str) -> str:
        """A saved fragment of the same parameter that has optimizer state; `name` if there is none."""
        base, _ = parse_key(name)
        return fragment_key(base, self._with_state[base][0]) if base in self._with_state else name

    def _refitted_state(self, key: str, name: str) -> Tensor:
        """Optimizer state of a parameter that was saved in other fragments, in the parameter's shape."""
        base, wanted = parse_key(name)

        def read(fragment: Fragment | None) -> Tensor:
            saved = fragment_key(base, fragment)
            found = self.state(key, saved, None)
            return found if found.dim() == 0 else found.view(self.get(f"parameter:{saved}").shape)

        found = refit(wanted, self._with_state[base], read)
        if found is None:
            raise InputError(
                f"{self._folder}: the optimizer's {key} of {name} is not whole",
                hint="The checkpoint is of another version of the workload.",
            )
        return found

    def get(self, key: str) -> Tensor:
        """Raises InputError: it is not there, or a shard cannot be read."""
        if key in self._where:
            return self._read(key)
        base, wanted = parse_key(key)
        found = refit(
            wanted, self._fragments.get(base, ()), lambda each: self._read(fragment_key(base, each))
        )
        if found is None:
            raise InputError(
                f"{self._folder}: there is no {key.replace(':', ' ', 1)} in it",
                hint="The checkpoint is of another workload, or of one whose modules had other names.",
            )
        return found

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a whole tensor; nothing but the shards' headers is read.

        Raises:
            InputError: it is not there, or a shard cannot be read.
        """
        fragments = (
            [key]
            if key in self._where
            else [fragment_key(key, each) for each in self._fragments.get(key, ())]
        )
        if not fragments:
            raise InputError(f"{self._folder}: there is no {key.replace(':', ' ', 1)} in it")
        shapes = [self._header(each) for each in fragments]
        _, first = parse_key(fragments[0])
        if first is None:
            return shapes[0]
        whole = sum(shape[first.dim] for shape in shapes)
        return (*shapes[0][: first.dim], whole, *shapes[0][first.dim + 1 :])

    def _header(self, key: str) -> tuple[int, ...]:
        return self._open(key, lambda file: tuple(file.get_slice(key).get_shape()))

    def _read(self, key: str) -> Tensor:
        found: Tensor = self._open(key, lambda file: file.get_tensor(key))
        return found

    def _open(self, key: str, take: Callable[[Any], T]) -> T:
        path = self._folder / self._where[key]
        try:
            if path.name not in self._files:
                self._files[path.name] = self._stack.enter_context(safe_open(path, framework="pt"))
            found = take(self._files[path.name])
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{path}: cannot be read: {error}",
                hint=f"Remove {self._folder}; then --resume takes the checkpoint before it.",
            ) from error
        return found

    def copy_into(self, tensor: Tensor, key: str) -> None:
        """Raises InputError: it is not there, cannot be read, or has another shape."""
        found = self.get(key)
        if found.shape != tensor.shape:
            raise InputError(
                f"{self._folder}: {key.replace(':', ' ', 1)} has shape {tuple(found.shape)}; "
                f"the workload's has {tuple(tensor.shape)}",
                hint="The checkpoint is of another version of the workload.",
            )
        with torch.no_grad():
            tensor.copy_(found)
