"""What loads a rank's part of the batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from spindle_cli.runtime.loading.same_data import require_same_data
from spindle_cli.runtime.loading.start import Place, Readers, start_loaders
from spindle_cli.runtime.part.at_lengths import TasksAtLengths
from spindle_cli.runtime.part.localise import LocalModel, StepPart, dtype_of
from spindle_cli.runtime.seat import Seat
from spindle_cli.runtime.step.counting import Counting, Portion, counted_shares, labels_that_must_count
from spindle_cli.runtime.step.data import Feed, Share, portions
from spindle_cli.runtime.step.losses import LossBoard
from spindle_cli.workload.data.lengths import known_shapes
from spindle_cli.workload.training.batches import Batches


def make_feed(
    seat: Seat,
    model: LocalModel,
    board: LossBoard,
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
    taken = {portion.task for found in wanted.values() for portion in found}
    shapes = {name: known_shapes(task) for name, task in model.graph.tasks.items()}
    apart = {task.name for task in readers.trained}
    loaders = start_loaders(
        readers,
        train,
        taken,
        schedule.own_numbers(steps),
        Place(seat.rank, seat.first_of_node),
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
            _counting(part, board, per_step),
        )
        for part in model.steps
    }
    return Feed(
        {**here, **loaders},
        shares,
        schedule,
        steps,
        seat.device,
        dtype_of(seat.request, model.train),
        labels_that_must_count(model.slices.values(), per_step),
        reads_ahead=seat.request.dtype is None,
        counters_of=at_lengths.counters,
        varying=at_lengths.names,
        states={name: state for name, state in streams.items() if name in taken},
    )


def _counting(part: StepPart, board: LossBoard, per_step: int) -> Counting | None:
    if board.layout.size == 0:
        return None
    return Counting(counted_shares(part.slices.values(), board.layout, per_step), board.layout)


def _asked_alone(
    tasks: Collection[str], wanted: Collection[Portion], loaded_apart: Collection[str]
) -> Iterator[Portion]:
    """No samples of the tasks that this rank takes samples of at other steps: who loads them for several
    ranks goes on when all have asked.
    """
    for task in tasks:
        if task in loaded_apart and all(portion.task != task for portion in wanted):
            yield Portion(task, (0, 0), ())
