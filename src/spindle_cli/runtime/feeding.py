"""What loads a rank's part of the batches. Datasets that differ from rank to rank and are read for the same
batches are noticed before the first step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from spindle_cli.errors import WorkloadError
from spindle_cli.files.request import SeenData
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.loading.start import Place, Readers, start_loaders
from spindle_cli.runtime.part.at_lengths import TasksAtLengths
from spindle_cli.runtime.part.localise import LocalModel, StepPart, dtype_of
from spindle_cli.runtime.step.counting import Counting, Portion, counted_shares, labels_that_must_count
from spindle_cli.runtime.step.data import Feed, Share, portions
from spindle_cli.runtime.step.losses import LossAccumulator
from spindle_cli.runtime.worker_context import WorkerContext
from spindle_cli.training.batches import Batches
from spindle_cli.training.data.reading import known_shapes
from spindle_cli.training.data.streams import UNREADABLE, is_stream, look_at
from spindle_cli.workload.types import FlowTask, Task


def make_feed(
    context: WorkerContext,
    model: LocalModel,
    accumulator: LossAccumulator,
    steps: range,
    streams: Mapping[str, Any],
    at_lengths: TasksAtLengths,
    readers: Readers,
) -> Feed:
    """What loads this rank's part of the steps' batches; collective. `streams`: where they go on. `readers`:
    of this node.
    """
    per_step, train, schedule = model.train.accumulate, model.train, model.schedule
    tasks = model.graph.workload.tasks
    wanted = {part.tasks: portions(part.slices.values()) for part in model.steps}
    taken = {portion.task for task_portions in wanted.values() for portion in task_portions}
    shapes = {name: known_shapes(task) for name, task in model.graph.tasks.items()}
    apart = {task.name for task in readers.trained}
    loaders = start_loaders(
        readers,
        train,
        taken,
        schedule.own_numbers(steps),
        Place(context.rank, context.first_of_node),
        streams,
        shapes,
    )
    require_same_data([task for task in tasks if task.name in taken - apart])
    here = {
        task.name: Batches(task, train.seed, shapes[task.name]) for task in tasks if task.name not in apart
    }
    shares = {
        part.tasks: Share(
            (*wanted[part.tasks], *_asked_alone(part.tasks, wanted[part.tasks], taken & loaders.keys())),
            _counting(part, accumulator, per_step),
        )
        for part in model.steps
    }
    return Feed(
        {**here, **loaders},
        shares,
        schedule,
        steps,
        context.device,
        dtype_of(context.request, model.train),
        labels_that_must_count(model.slices.values(), per_step),
        reads_ahead=context.request.dtype is None,
        counters_of=at_lengths.counters,
        varying=at_lengths.names,
        states={name: state for name, state in streams.items() if name in taken},
    )


def _counting(part: StepPart, accumulator: LossAccumulator, per_step: int) -> Counting | None:
    if accumulator.layout.size == 0:
        return None
    return Counting(counted_shares(part.slices.values(), accumulator.layout, per_step), accumulator.layout)


def _asked_alone(
    tasks: Collection[str], wanted: Collection[Portion], loaded_apart: Collection[str]
) -> Iterator[Portion]:
    """No samples of the tasks that this rank takes samples of at other steps: who loads them for several
    ranks goes on when all have asked.
    """
    for task in tasks:
        if task in loaded_apart and all(portion.task != task for portion in wanted):
            yield Portion(task, (0, 0), ())


def require_same_data(tasks: Sequence[Task | FlowTask]) -> None:
    """Refuse a dataset of another length or with another first sample than on another rank; collective.

    Args:
        tasks: whose samples this rank reads itself. Streams are left out.

    Raises:
        WorkloadError: one differs; the same on all ranks.
    """
    seen_here = {task.name: look_at(task, (0,)) for task in tasks if not is_stream(task)}
    gathered: list[dict[str, SeenData]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, seen_here, group=host_group())
    first_seen: dict[str, tuple[int, SeenData]] = {}
    for rank, datasets in enumerate(gathered):
        for name, seen in datasets.items():
            first, before = first_seen.setdefault(name, (rank, seen))
            difference = _difference(before, seen)
            if difference is not None:
                raise WorkloadError(
                    f"task {name!r}: the dataset of rank {rank} {difference} than that of rank {first}, and "
                    "both read rows of the same batches",
                    hint="Let it be the same in every process: draw in build(), where torch is seeded, or "
                    "from a seed of your own, and not while a file is imported; sort what comes out of sets "
                    "and folders; leave ranks to Spindle.",
                )


def _difference(first: SeenData, second: SeenData) -> str | None:
    if first.num_samples != second.num_samples:
        return "has another length"
    digests = {first.samples.get(0), second.samples.get(0)}
    return "has another first sample" if len(digests) > 1 and UNREADABLE not in digests else None
