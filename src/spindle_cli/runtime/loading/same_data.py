"""Datasets that differ from rank to rank and are read for the same batches: noticed before the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from spindle_cli.errors import WorkloadError
from spindle_cli.files.request import SeenData
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.workload.data.kind import is_stream
from spindle_cli.workload.data.seen_data import UNREADABLE, look_at
from spindle_cli.workload.types import FlowTask, Task


def require_same_data(tasks: Sequence[Task | FlowTask]) -> None:
    """Refuse a dataset of another length or with another first sample than on another rank; collective.

    Args:
        tasks: whose samples this rank reads itself. Streams are left out.

    Raises:
        WorkloadError: one differs; the same on all ranks.
    """
    own = {task.name: look_at(task, (0,)) for task in tasks if not is_stream(task)}
    gathered: list[dict[str, SeenData]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own, group=host_group())
    known: dict[str, tuple[int, SeenData]] = {}
    for rank, found in enumerate(gathered):
        for name, seen in found.items():
            first, before = known.setdefault(name, (rank, seen))
            difference = _difference(before, seen)
            if difference is not None:
                raise WorkloadError(
                    f"task {name!r}: the dataset of rank {rank} {difference} than that of rank {first}, and "
                    "both read rows of the same batches",
                    hint="Let it be the same in every process: draw in build(), where torch is seeded, or "
                    "from a seed of your own, and not while a file is imported; sort what comes out of sets "
                    "and folders; leave ranks to Spindle.",
                )


def _difference(one: SeenData, other: SeenData) -> str | None:
    if one.num_samples != other.num_samples:
        return "has another length"
    digests = {one.samples.get(0), other.samples.get(0)}
    return "has another first sample" if len(digests) > 1 and UNREADABLE not in digests else None
