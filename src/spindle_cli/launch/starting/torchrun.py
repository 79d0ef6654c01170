"""torchrun with four additions:
`python -m spindle_cli.launch.starting.torchrun EXITS.json <torchrun's arguments>`.

* `--rdzv-backend=spindle`: the store that all processes meet at listens on the address it is given alone, not
  on every interface of the machine as torch's own does; port 0 takes a free one.
* With `--start-method=fork` workers are forked from this process, once it has imported what they need; with
  `spawn` each is a Python of its own.
* Which workers died, and how, is written to EXITS.json instead of being printed over a page.
* SIGTERM asks the workers to save and end, as it does of the launcher: schedulers send it to every process.

`--wait [MODULE]` imports torch and what the workers of MODULE need, and takes the arguments from standard
input: see `head_start`.

torchrun's agent for workers that are forked: the nodes meet, the workers begin, and are watched.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from spindle_cli.launch.build import SHUTDOWN_S
from spindle_cli.launch.starting.forked import IMPORTED_LATE, ForkedWorker, end_workers, fork_workers, preload
from spindle_cli.launch.starting.head_start import WAIT, Orders
from spindle_cli.launch.starting.other_nodes import OtherNodes
from spindle_cli.launch.types import WorkerExit
from spindle_cli.process.lifetime import die_with_parent

_MONITOR_S = 0.05


class ForkingAgent(SimpleElasticAgent):
    """Runs workers that are there already, once; they are told their ranks when the nodes have met."""

    def __init__(self, spec: WorkerSpec, workers: Sequence[ForkedWorker]) -> None:
        spec.monitor_interval = _MONITOR_S
        assert spec.max_restarts == 0, "the launcher starts again, not the agent"
        super().__init__(spec)
        self._workers = workers
        self._ranks: tuple[int, ...] = ()
        self._others: OtherNodes | None = None  # known when the nodes have met
        self.loss: str | None = None  # of another node, for which the workers here were ended

    def exits(self) -> tuple[WorkerExit, ...]:
        """Every worker that ended badly."""
        return tuple(
            WorkerExit(rank=rank, exit_code=worker.exit_code, time_s=worker.ended_s)
            for rank, worker in zip(self._ranks, self._workers, strict=True)
            if worker.exit_code
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ranks = tuple(worker.global_rank for worker in worker_group.workers)
        store: Any = self._store
        rank, count = worker_group.group_rank, worker_group.group_world_size
        assert rank is not None and count is not None, "the nodes have met"
        self._others = OtherNodes(store, rank, count)
        common = {
            "LOCAL_WORLD_SIZE": len(self._workers),
            "GROUP_RANK": worker_group.group_rank,
            "GROUP_WORLD_SIZE": worker_group.group_world_size,
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": worker_group.master_port,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": worker_group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": worker_group.spec.rdzv_handler.use_agent_store,
        }
        for forked, worker in zip(self._workers, worker_group.workers, strict=True):
            rank_variables = {
                "RANK": worker.global_rank,
                "LOCAL_RANK": worker.local_rank,
                "WORLD_SIZE": worker.world_size,
            }
            forked.begin({name: str(value) for name, value in (common | rank_variables).items()})
        return {local_rank: worker.pid for local_rank, worker in enumerate(self._workers)}

    def _monitor_workers(self, _: WorkerGroup) -> RunResult:
        codes = [worker.look() for worker in self._workers]
        assert self._others is not None, "the nodes have met"
        if any(codes):
            self._others.tell_loss()
            return RunResult(state=WorkerState.FAILED)
        if None in codes:
            self.loss = self._others.loss()
            return RunResult(state=WorkerState.HEALTHY if self.loss is None else WorkerState.FAILED)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._ranks))

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        end_workers(self._workers, SHUTDOWN_S)

    def _shutdown(self, *_: Any, **__: Any) -> None:
        end_workers(self._workers, SHUTDOWN_S)


def main(arguments: Sequence[str]) -> int:
    """Start the workers and wait for them; 0 if all ended well, 1 if one did not."""
    die_with_parent()
    if arguments[0] == WAIT:
        preload("torch.distributed.run", *arguments[1:])
        orders = Orders.read(sys.stdin)
        if orders is None:  # the launcher has ended, or needs no workers
            return 0
        orders.redirect_output()
        arguments = orders.arguments
    exits_file, *torchrun_arguments = arguments
    signal.signal(signal.SIGTERM, partial(_ask_workers_to_stop, Path(exits_file)))
    return run(Path(exits_file), torchrun_arguments)


def _ask_workers_to_stop(exits_file: Path, _number: int, _frame: FrameType | None) -> None:
    from spindle_cli.files.request import STOP_FILE

    exits_file.with_name(STOP_FILE).touch()


def run(exits_file: Path, torchrun_arguments: Sequence[str]) -> int:
    """What `main` does once it is sure to end with its parent: importing torch takes seconds."""
    preload("torch.distributed.run")
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    from spindle_cli.files.artifact import write_json
    from spindle_cli.launch.starting.rendezvous import MeetingError, create_rendezvous
    from spindle_cli.launch.starting.torchrun import ForkingAgent
    from spindle_cli.launch.types import WorkerExits

    parse: Any = torchrun.parse_args
    parsed = parse(torchrun_arguments)
    num_nodes, num_workers = int(parsed.nnodes), int(parsed.nproc_per_node)
    module = parsed.training_script
    argv = [module, *parsed.training_script_args]
    forks = parsed.start_method == "fork"
    if forks:
        preload(*IMPORTED_LATE, module)
    # Before the nodes meet: the store that they meet at has threads.
    workers = fork_workers(num_workers, partial(_work if forks else _become, argv))
    meeting_file = exits_file.with_name(exits_file.name.replace(".exits.json", ".meeting"))
    parameters = RendezvousParameters(
        backend=parsed.rdzv_backend,
        endpoint=parsed.rdzv_endpoint,
        run_id=parsed.rdzv_id,
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        **_parse_rendezvous_config(parsed.rdzv_conf),
    )
    spec = WorkerSpec(
        role=parsed.role,
        local_world_size=num_workers,
        rdzv_handler=create_rendezvous(meeting_file, parameters),
        entrypoint=module,
        max_restarts=parsed.max_restarts,
    )
    agent = ForkingAgent(spec, workers)
    try:
        failed = agent.run().is_failed()
    except MeetingError as error:
        write_json(exits_file, WorkerExits(exits=(), problem=str(error)))
        return 1
    if failed:
        write_json(exits_file, WorkerExits(exits=agent.exits(), problem=agent.loss))
    return int(failed)


def _work(argv: list[str]) -> None:
    """What a forked worker does: `main` of its module, which takes the words of the command."""
    sys.argv = argv
    import_module(argv[0]).main(argv)


def _become(argv: list[str]) -> None:
    """What a worker does that is to be a Python of its own."""
    os.execv(sys.executable, [sys.executable, "-u", "-m", *argv])  # noqa: S606 - no shell is the point


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the store could hold up the interpreter's own end
