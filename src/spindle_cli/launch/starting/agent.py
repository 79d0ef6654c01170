"""torchrun's agent for workers that are forked: the nodes meet, the workers begin, and are watched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from spindle_cli.launch.build import SHUTDOWN_S
from spindle_cli.launch.starting.forked import ForkedWorker, end_workers
from spindle_cli.launch.starting.other_nodes import OtherNodes
from spindle_cli.launch.types import WorkerExit

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
            own = {
                "RANK": worker.global_rank,
                "LOCAL_RANK": worker.local_rank,
                "WORLD_SIZE": worker.world_size,
            }
            forked.begin({name: str(value) for name, value in (common | own).items()})
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
