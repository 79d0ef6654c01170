"""A worker that runs several requests, one after another: `-m many_worker DIR`, DIR/NN/request.json.

The process that workers are forked from imports this, and so analyses what they run.
"""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host_waits import no_host_waits
from torch.distributed import distributed_c10d

from spindle_cli.errors import SpindleError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import RunRequest, error_path
from spindle_cli.operators.plan_splits import plan_splits
from spindle_cli.plan.file import read_plan
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.process.worker_session import describe_error, worker_session
from spindle_cli.runtime import trainer
from spindle_cli.runtime.connecting import connected
from spindle_cli.runtime.memory.gather_memory import GatherMemory
from spindle_cli.runtime.training import Training
from spindle_cli.runtime.worker import train_plan
from spindle_cli.workload import localise
from spindle_cli.workload.analyse import analyse
from spindle_cli.workload.at_lengths import trace
from spindle_cli.workload.building.source import Source, resolve
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.memo import AnalysisMemo
from spindle_cli.workload.metaops.finding import Finder


def step_without_host_waits(self: Training, step: int, *, is_first: bool) -> None:
    # The second is like all that follow; the first compiles and makes what is made once.
    with no_host_waits() if step == 1 and not is_first else nullcontext():
        train_one_step(self, step, is_first=is_first)


Key = tuple[str, str]  # of a source, and of how its graph is found
train_one_step = Training.step
take_back = GatherMemory.take_back
analyse_source = localise.in_the_abstract
analysed: dict[Key, Any] = {}  # for the first alone of the requests that train it, each in another way


def in_the_abstract(source: Source, find_graph: partial[WorkloadGraph]) -> Any:
    """Analyses a workload once: that is much of what a request takes, and nothing of it is trained."""
    asked = {name: value for name, value in find_graph.keywords.items() if name != "memo"}
    key = repr((source.build.__module__, source.build.__qualname__, source.args)), repr(asked)
    if key not in analysed:
        analysed[key] = analyse_source(source, find_graph)
    return analysed[key]


def requests_in(folder: Path) -> list[RunRequest]:
    """In their order."""
    return [RunRequest.read(path) for path in sorted(folder.glob("[0-9]*/request.json"))]


def analyse_all(folder: Path) -> None:
    """Analyse what workers will run, as they do, in the process that they are forked from: once for all."""
    torch.set_num_threads(1)
    for request in requests_in(folder):
        plan = read_plan(request.plan)
        assert request.memo is not None
        memo = AnalysisMemo.read(request.memo)
        find = partial(analyse, memo=memo, lengths=plan.workload.lengths, evaluates=True)
        with suppress(SpindleError):  # a worker will say so
            _, graph = in_the_abstract(resolve(request.workload), find)
            plan_splits(plan, graph, str(request.plan))  # what this finds, the graph keeps


def take_back_poisoned(self: GatherMemory, flat: torch.Tensor, begin: int) -> None:
    """Whoever still looks at what was gathered trains another model."""
    flat.fill_(float("nan"))
    take_back(self, flat, begin)


def leave_groups() -> None:
    """Those of a request that has ended: the threads of each of gloo's wake up a hundred times a second, so
    that those of fifty requests would take most of the machine.
    """
    dist.barrier()
    for group in [each for each in distributed_c10d._world.pg_map if each is not dist.group.WORLD]:
        if dist.get_backend(group) == "gloo":  # torch destroys its own alone
            dist.destroy_process_group(group)
    gc.collect()


def main(argv: list[str]) -> None:
    folder = Path(argv[1])
    Training.step = step_without_host_waits
    GatherMemory.take_back = take_back_poisoned
    trainer.not_searched_again = nullcontext  # would have all searched that is frozen below
    localise.in_the_abstract = in_the_abstract
    finder = Finder()  # what is found of layers at a length holds for all requests
    trace.Finder = lambda _: finder
    environment = WorkerEnvironment.read()
    requests = requests_in(folder)
    device = torch.device("cpu")
    torch.set_num_threads(1)
    with worker_session(folder, environment.rank), connected(requests[0], environment, device):
        for request in requests:
            try:
                train_plan(request, environment, device)
            except SpindleError as error:  # of the kinds that every worker ends with at the same point
                path = error_path(request.run_dir, environment.rank)
                path.parent.mkdir(exist_ok=True)
                write_json(path, describe_error(error, environment.rank))
            leave_groups()


analyse_all(Path(sys.argv[-1]))
gc.collect()
gc.freeze()  # so that workers search what they have made themselves alone
