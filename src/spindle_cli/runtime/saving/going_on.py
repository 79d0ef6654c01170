"""Where a rank's training begins: anew, or with a checkpoint of its own run or another's in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from spindle_cli.checkpoint.carried import carried_over, require_same_optimizer
from spindle_cli.checkpoint.files import find_checkpoint, require_steps_left
from spindle_cli.checkpoint.same_run import require_same_run
from spindle_cli.files.request import RunRequest
from spindle_cli.runtime.backends.host_group import host_group
from spindle_cli.runtime.part.replicas import check_replicas
from spindle_cli.runtime.saving.restore import restore
from spindle_cli.runtime.saving.train_state import TrainState


@dataclass(frozen=True)
class Start:
    """Where training begins: steps that are done, where streams were behind them, by task, and the numbers
    that callbacks have set, by name.
    """

    step: int = 0
    streams: Mapping[str, Any] = field(default_factory=dict)
    step_values: Mapping[str, float] = field(default_factory=dict)


def resume(request: RunRequest, state: TrainState, rank: int, total_steps: int) -> Start:
    """Put the run's newest whole checkpoint in place, or one of another run, where the request says so;
    collective.

    Raises:
        InputError: there is no checkpoint, or it does not belong to this workload and its train settings.
    """
    run_dir, step = request.run_dir, request.resume_step
    if not request.resume:
        if request.begin_from is None:
            return Start()
        run_dir, step = request.begin_from, request.begin_step
    # Rank 0 chooses, so that all ranks take the same one whatever happens to the files meanwhile.
    chosen = [find_checkpoint(run_dir, step=step) if rank == 0 else None]
    dist.broadcast_object_list(chosen, group=host_group())
    (found,) = chosen
    assert found is not None
    require_steps_left(found, total_steps)
    carried = None
    if request.resume:
        model = state.model
        require_same_run(
            found.checkpoint,
            model.graph.fingerprint,
            model.train,
            model.groups.names(),
            request.dtype,
            found.folder,
        )
    else:
        carried = carried_over(found.checkpoint, state.model.graph)
        require_same_optimizer(found.checkpoint, carried, state.model.groups, found.folder)
    restore(found.folder, found.checkpoint, state, rank, carried)
    there = {key: value for key, value in state.model.parameters.items() if key not in state.fetched}
    check_replicas(state.model.cuts.keys, there)
    return Start(found.checkpoint.step, found.checkpoint.streams, found.checkpoint.step_values)
