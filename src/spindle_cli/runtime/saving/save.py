"""Save the trained parameters: one safetensors file keyed by canonical name, written whole by rank 0.

No rank ever holds more than its part, and rank 0 one parameter of the others' besides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from spindle_cli.checkpoint.tensors import Digest, TensorSpec, file_order, put_tensors
from spindle_cli.errors import InputError
from spindle_cli.files.run_files import model_path
from spindle_cli.files.tensors import Fragment, fragment_key, fragments_by_name, joined
from spindle_cli.files.writing import written_whole
from spindle_cli.runtime.backends.host_group import host_group

# (keys of tensors) -> inside, those that this rank holds are whole; gives whether any are for as long alone;
# collective
Whole = Callable[[Collection[str]], AbstractContextManager[bool]]


def _as_they_are(_: Collection[str]) -> AbstractContextManager[bool]:
    return nullcontext(False)


def save_model(
    run_dir: Path,
    step: int,
    names: Sequence[str],
    held: Mapping[str, Tensor],
    whole: Whole = _as_they_are,
) -> None:
    """Send every parameter to rank 0, each fragment from the first rank that holds it, and write them one by
    one. Collective.

    Args:
        names: canonical names of all parameters, the same on every rank; what no rank holds is left out.
        held: this rank's, or fragments of them by the keys of files/tensors.py.
        whole: makes those whole that are shared out.

    Raises:
        InputError: the folder is not writable, or the disk is full.
    """
    save_tensors(model_path(run_dir, step), names, held, whole=whole)


def save_tensors(
    path: Path,
    names: Sequence[str],
    held: Mapping[str, Tensor],
    key_of: Callable[[str], str] = str,
    digest: Digest | None = None,
    whole: Whole = _as_they_are,
) -> dict[str, TensorSpec]:
    """What `save_model` does with any tensors and any file. Collective.

    Args:
        key_of: from a name to its key in the file.
        digest: on rank 0, takes in the file's bytes.

    Returns:
        What is in the file, by key.
    """
    fragments = _Fragments.of(held, whole)
    specs = {key_of(name): fragments.spec(name) for name in names if name in fragments.by_name}
    name_of = {key_of(name): name for name in names}
    if dist.get_rank() == 0:
        write_model(path, specs, lambda key: fragments.receive(name_of[key]), digest)
    else:
        for key in file_order(specs):
            fragments.send(name_of[key])
    return specs


@dataclass(frozen=True)
class _Fragments:
    """The tensors that all ranks hold together, each fragment of the first rank that holds it.

    Attributes:
        held: this rank's, by key.
        whole: see `Whole`.
        by_name: the fragments of each tensor.
        owners: the rank that a fragment is taken from, by its key.
        specs: of the fragments, by key.
    """

    held: Mapping[str, Tensor]
    whole: Whole
    by_name: Mapping[str, Sequence[Fragment | None]]
    owners: Mapping[str, int]
    specs: Mapping[str, TensorSpec]

    @classmethod
    def of(cls, held: Mapping[str, Tensor], whole: Whole) -> _Fragments:
        """Learn what every rank holds. Collective."""
        owners: dict[str, int] = {}
        specs: dict[str, TensorSpec] = {}
        for rank, of_rank in enumerate(_gather_specs(held)):
            for key, spec in of_rank.items():
                owners.setdefault(key, rank)
                specs.setdefault(key, spec)
        return cls(held, whole, fragments_by_name(specs), owners, specs)

    def spec(self, name: str) -> TensorSpec:
        """The spec of a tensor from those of its fragments, which lie side by side along one dimension."""
        fragments = self.by_name[name]
        specs = [self.specs[fragment_key(name, fragment)] for fragment in fragments]
        first, shape = fragments[0], list(specs[0].shape)
        if first is not None:
            shape[first.dim] = sum(spec.shape[first.dim] for spec in specs)
        return TensorSpec(tuple(shape), specs[0].dtype)

    def receive(self, name: str) -> Tensor:
        """Put a tensor together on rank 0, on the host, while every other rank calls `send` with its name."""
        keys = {fragment: fragment_key(name, fragment) for fragment in self.by_name[name]}
        with self.whole(keys.values()) as is_lent:
            tensor = joined({fragment: self._fragment(key) for fragment, key in keys.items()})
            return tensor.clone() if is_lent else tensor

    def _fragment(self, key: str) -> Tensor:
        """A fragment on rank 0: its own, or received from the one that it is taken from."""
        if self.owners[key] == 0:
            return self.held[key].detach().cpu()
        received = torch.empty(self.specs[key].shape, dtype=self.specs[key].dtype)
        dist.recv(received, self.owners[key], group=host_group())
        return received

    def send(self, name: str) -> None:
        """Send rank 0 the fragments of a tensor that it takes from this rank."""
        keys = [fragment_key(name, fragment) for fragment in self.by_name[name]]
        with self.whole(keys):
            for key in keys:
                if self.owners[key] == dist.get_rank():
                    dist.send(self.held[key].detach().cpu().contiguous(), 0, group=host_group())


def _gather_specs(held: Mapping[str, Tensor]) -> list[dict[str, TensorSpec]]:
    """Return the specs of what every rank holds, by rank. Collective."""
    held_specs = {name: TensorSpec.of(tensor) for name, tensor in held.items()}
    gathered: list[dict[str, TensorSpec] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, held_specs, group=host_group())
    return [specs for specs in gathered if specs is not None]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder}: the trained parameters cannot be written there: {error.strerror}",
            hint="Check that the run's folder is writable and that the disk is not full.",
        ) from error


def write_model(
    path: Path,
    specs: Mapping[str, TensorSpec],
    tensor_of: Callable[[str], Tensor],
    digest: Digest | None = None,
) -> None:
    """Write a safetensors file, whole or not at all, and its folder if need be.

    Raises:
        InputError: the folder cannot be made or is not writable, or the disk is full.
    """
    _make_folder(path.parent)
    with written_whole(path) as file:
        put_tensors(file, specs, tensor_of, digest)
