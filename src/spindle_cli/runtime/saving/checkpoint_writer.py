"""Write checkpoints through `torch.distributed.checkpoint`: who writes what, and the files.

`torch.distributed.checkpoint.save` gathers what every rank has, lets one of equal copies be written, by
the rank with the least to write, and makes sure that every element of every tensor is. A rank's part goes
into one safetensors file; the index is JSON. Torch's own storage keeps the index as a pickle.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from spindle_cli.checkpoint.files import forget_old
from spindle_cli.checkpoint.index import (
    INDEX_FILE,
    SUMS_FILE,
    Checkpoint,
    Region,
    SavedTensor,
    Shard,
    shard_name,
    sums_text,
)
from spindle_cli.checkpoint.tensors import HeldTensor, TensorSpec, write_tensors
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import to_compact_json
from spindle_cli.files.writing import write_text
from spindle_cli.runtime.saving.train_state import Numbers, NumbersOfGroups


class PartsSavePlanner(DefaultSavePlanner):
    """Offers what this rank has, and hands out what it is to write."""

    def __init__(
        self,
        held: Mapping[str, HeldTensor],
        numbers: NumbersOfGroups,
        copied: threading.Event | None = None,
        streams: Mapping[str, Any] | None = None,
    ) -> None:
        """`numbers`: none where this rank trains nothing. `copied`: set when training may go on, as all that
        this rank is to write is copied; None: nothing is copied. `streams`: where those are that this rank
        takes samples of.
        """
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._numbers = numbers
        self._streams = dict(streams or {})
        self._copied = copied
        self._tensors: dict[MetadataIndex, Tensor] = {}
        self._items: list[WriteItem] = []
        for name, tensor in held.items():
            for part in tensor.parts:
                item = _write_item(name, tensor, part.region)
                if item.index not in self._tensors:  # several pieces have the same count of steps
                    self._items.append(item)
                    self._tensors[item.index] = part.tensor

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Part of torch's interface; all is known already."""

    def create_local_plan(self) -> SavePlan:
        """Plan to write all that this rank has."""
        return SavePlan(self._items, planner_data=(self._numbers, self._streams))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what; in its `planner_data` the metadata has the numbers and the streams."""
        plans, metadata = super().create_global_plan(all_plans)
        numbers: NumbersOfGroups = {}
        streams: dict[str, Any] = {}
        for plan in all_plans:
            of_rank, places = plan.planner_data
            numbers = {**of_rank, **numbers}
            streams.update(places)
        return plans, replace(metadata, planner_data=(numbers, streams))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What this rank is to write is known: copy it, if training is to go on."""
        if self._copied is not None:
            self._tensors = {
                item.index: self._tensors[item.index].to("cpu", copy=True) for item in new_plan.items
            }
            self._copied.set()
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the elements that an item of the plan writes."""
        return self._tensors[write_item.index]


def _write_item(name: str, tensor: HeldTensor, region: Region) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
    return WriteItem(
        MetadataIndex(name, region.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape)),
    )


class ShardWriter(StorageWriter):
    """One checkpoint's folder: a shard per rank, written aside and renamed when the last is on the disk."""

    def __init__(
        self,
        target: Path,
        rank: int,
        make_outline: Callable[[], Checkpoint],
        keep: int,
        saved_steps: frozenset[int] = frozenset(),
        began: int = 0,
    ) -> None:
        """`make_outline`: gives the index, without what writing finds out; called on the first rank alone;
        its tensors are those that are in no shard. `keep`: how
        many checkpoints are kept. `saved_steps`, `began`: see `forget_old`.
        """
        self._target = target
        self._aside = target.with_name(f".{target.name}.tmp")
        self._rank = rank
        self._make_outline = make_outline
        self._keep = keep
        self._saved_steps = saved_steps
        self._began = began

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Part of torch's interface; a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Part of torch's interface; nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Part of torch's interface; the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder, on the first rank, before anything is written.

        Raises:
            InputError: it cannot be made.
        """
        try:
            if self._aside.exists():  # an earlier attempt that was cut short
                shutil.rmtree(self._aside)
            self._aside.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"{self._aside}: cannot be made: {error.strerror}") from error
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard.

        Raises:
            InputError: it cannot be written.
        """
        items = {_key_of(item): item for item in plan.items}
        path = self._aside / shard_name(self._rank)

        def tensor_of(key: str) -> Tensor:
            tensor = planner.resolve_data(items[key])
            assert isinstance(tensor, Tensor)
            return tensor

        digest = hashlib.sha256()
        try:
            specs = {key: _layout(item) for key, item in items.items()}
            num_bytes = write_tensors(path, specs, tensor_of, digest)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error}") from error
        shard = Shard(file=path.name, num_bytes=num_bytes, keys=tuple(items), sha256=digest.hexdigest())
        results: Future[list[WriteResult]] = Future()
        results.set_result([WriteResult(item.index, 0, shard) for item in plan.items])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and give the folder its name, on the first rank; delete the oldest checkpoints.

        Raises:
            InputError: the index cannot be written, or the folder not renamed.
        """
        numbers: NumbersOfGroups
        numbers, streams = metadata.planner_data
        only = numbers.get(None, Numbers({}, {}))
        outline = self._make_outline()
        tensors = outline.tensors | {
            name: SavedTensor(
                shape=tuple(saved.size), dtype=str(saved.properties.dtype).removeprefix("torch.")
            )
            for name, saved in metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)  # nothing else is offered
        }
        checkpoint = outline.model_copy(
            update={
                "tensors": tensors,
                "streams": streams,
                "shards": tuple(of_rank[0].storage_data for of_rank in results if of_rank),
                "hyperparameters": only.hyperparameters,
                "schedule": only.schedule,
                "groups": {
                    name: group.model_copy(
                        update={
                            "hyperparameters": numbers[name].hyperparameters,
                            "schedule": numbers[name].schedule,
                        }
                    )
                    for name, group in outline.groups.items()
                    if name in numbers  # all that has parameters which some op uses
                },
            }
        )
        index = to_compact_json(checkpoint)
        write_text(self._aside / INDEX_FILE, index)
        index_sha256 = hashlib.sha256(index.encode()).hexdigest()
        write_text(self._aside / SUMS_FILE, sums_text(index_sha256, checkpoint.files))
        try:
            if self._target.exists():  # one that could not be gone on from, or a run's end that is trained on
                shutil.rmtree(self._target)
            self._aside.rename(self._target)
            _sync(self._target.parent)
            run_dir = self._target.parent.parent
            forget_old(run_dir, checkpoint.step, self._keep, saved_steps=self._saved_steps, began=self._began)
        except OSError as error:
            raise InputError(f"{self._target}: cannot be written: {error.strerror}") from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Part of torch's interface: a path says nothing of whether it can be written."""
        return True


def _key_of(item: WriteItem) -> str:
    assert item.tensor_data is not None, "only tensors are offered"
    chunk = item.tensor_data.chunk
    region = Region(tuple(chunk.offsets), tuple(chunk.sizes))
    return region.key(item.index.fqn, item.tensor_data.size)


def _layout(item: WriteItem) -> TensorSpec:
    assert item.tensor_data is not None, "only tensors are offered"
    return TensorSpec(tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype)


def _sync(path: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
