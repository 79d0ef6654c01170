"""What one rank's passes read of a batch that a task is evaluated on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.communication.rows import Samples
from spindle_cli.runtime.evaluating.passes import Fields, present
from spindle_cli.runtime.evaluating.prepared import Prepared
from spindle_cli.workload.evaluated.in_order import ReadBatch, require_fields
from spindle_cli.workload.graph import IGNORED_LABEL
from spindle_cli.workload.losses.shares import share_of_samples
from spindle_cli.workload.training.precision import dtype_in

if TYPE_CHECKING:
    from torch import Tensor

Loaded = Mapping[Samples, Mapping[str, "Tensor"]]  # by samples, on the host


def load(prepared: Prepared, batch: ReadBatch) -> Loaded:
    """What this rank's slices read of a batch.

    Raises:
        WorkloadError: it has other fields or shapes than the task was traced with; or labels of an
            operator's mean are ignored, of which shares know nothing.
        Exception: whatever the dataset raised.
    """
    wanted: dict[Samples, dict[str, None]] = {}
    for local in prepared.slices.values():
        there = present(local.samples, batch.size)
        if local.wired.fields and there[0] < there[1]:
            wanted.setdefault(there, {}).update(dict.fromkeys(local.wired.fields))
    name, found = prepared.graph.task.name, {}
    for there, names in wanted.items():
        found[there] = batch.rows(*there, tuple(names))
        require_fields(name, prepared.graph.fields, names, found[there])
    _require_all_count(prepared, found)
    return found


def _require_all_count(prepared: Prepared, loaded: Loaded) -> None:
    for local in prepared.slices.values():
        whole = (0, prepared.graph.task.batch_size)
        if local.wired.loss_shares is None or local.samples == whole:
            continue
        for name in local.wired.loss_shares.all_must_count:
            held = [rows[name] for rows in loaded.values() if name in rows]
            if any(bool((labels == IGNORED_LABEL).any()) for labels in held):
                raise WorkloadError(
                    f"task {prepared.graph.task.name!r}: the dataset to evaluate it on ignores labels "
                    f"({IGNORED_LABEL}) of field {name!r}, of which an operator takes the mean, and the plan "
                    "splits its batch",
                    hint="Take the mean in the task's forward; or list the operator in `coupled`.",
                )


def fields_of(prepared: Prepared, loaded: Loaded, device: torch.device, dtype: torch.dtype | None) -> Fields:
    """What passes take of it, on the device; `dtype`: of all floating-point numbers, None: their own."""
    specs = prepared.graph.fields

    def none_of(name: str) -> Tensor:
        return torch.empty((0, *specs[name].shape[1:]), dtype=specs[name].dtype)

    def fields(samples: Samples, names: Sequence[str]) -> dict[str, Tensor]:
        held = loaded.get(samples) or {name: none_of(name) for name in names}
        return {name: held[name].to(device, dtype_in(held[name].dtype, dtype)) for name in names}

    return fields


def counts_of(prepared: Prepared, loaded: Loaded, size: int, device: torch.device) -> Sequence[Tensor]:
    """What the loss counts of a batch, over all ranks; collective where it counts anything."""
    shares = prepared.graph.loss_shares
    if shares.num_counts == 0:
        return ()
    total = torch.zeros(shares.num_counts, dtype=torch.float64)
    for local in prepared.slices.values():
        there = present(local.samples, size)
        speaks = local.wired.loss_shares is not None and local.is_first
        if prepared.counter is not None and speaks and there[0] < there[1]:
            share = share_of_samples(there[1] - there[0], size, 1)
            total += prepared.counter.count(loaded[there], share)
    dist.all_reduce(total, group=host_group())
    return total.to(device).unbind()
