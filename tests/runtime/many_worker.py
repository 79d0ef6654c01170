"""A worker that runs several requests, one after another: `-m many_worker DIR`, DIR/NN/request.json.

The process that workers are forked from imports this, and so reads, checks, links, proves and analyses what
they run: each of them would find the same.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host_waits import no_host_waits
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from helpers.analysed_once import in_the_abstract, key_of
from spindle_cli.account import groups, step_end
from spindle_cli.account.groups import ParameterUses
from spindle_cli.analysis import at_lengths as trace
from spindle_cli.analysis import localise
from spindle_cli.analysis.analyse import analyse
from spindle_cli.analysis.at_lengths import LengthTracer, Shape, TaskAtLength
from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.analysis.metaops.finding import Finder
from spindle_cli.check.types import Violation
from spindle_cli.checkpoint.carry_over import settings_of_run
from spindle_cli.errors import SpindleError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import RunRequest, error_path
from spindle_cli.operators.heads.chunked import loss_in_chunks
from spindle_cli.plan.types import Plan
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.process.worker_session import describe_error, worker_session
from spindle_cli.program.link import Programs
from spindle_cli.program.types import Program, StepSettings
from spindle_cli.runtime import ready, trainer
from spindle_cli.runtime.backends.strict_backend import STRICT_BACKENDS, StrictGroup
from spindle_cli.runtime.connecting import connected
from spindle_cli.runtime.memory.gather_memory import GatherMemory
from spindle_cli.runtime.part import at_lengths
from spindle_cli.runtime.part import localise as part
from spindle_cli.runtime.training import Training
from spindle_cli.runtime.worker import train_plan
from spindle_cli.training.data.reading import open_batches
from spindle_cli.workload.building.load import LoadedWorkload, load, resolve
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.types import Workload


def step_without_host_waits(self: Training, step: int, *, is_first: bool) -> None:
    # The second is like all that follow; the first compiles and makes what is made once.
    with no_host_waits() if step == 1 and not is_first else nullcontext():
        train_one_step(self, step, is_first=is_first)


FINE_SUMS = "SPINDLE_TEST_FINE_SUMS"  # in the environment: little is summed at a time
train_one_step = Training.step
take_back = GatherMemory.take_back
build_abstractly = at_lengths.load_abstract
check_anew, link_anew, prove_anew = ready.check_plan, part.link_sets, part.prove
checked: dict[int, Sequence[Violation]] = {}
linked: list[tuple[tuple[int, StepSettings], ParameterUses, Programs]] = []
proven: dict[int, Program] = {}
built: dict[str, LoadedWorkload] = {}  # by source, to be traced at lengths
traced: dict[tuple[int, str, str], TaskAtLength] = {}  # by workload built for it, planned and other shapes


def load_abstract(source: str, *, reads_initial: bool) -> LoadedWorkload:
    """Builds once what is traced at other lengths: nothing of it is trained."""
    key = key_of(resolve(source))
    if key not in built:
        built[key] = build_abstractly(source, reads_initial=reads_initial)
    return built[key]


class Tracer(LengthTracer):
    """Traces a length once for all requests that train the same."""

    def __init__(self, workload: Workload, planned: WorkloadGraph, memo: AnalysisMemo | None = None) -> None:
        super().__init__(workload, planned, memo)
        self._key = id(workload)
        self._fields = {name: repr(task.fields) for name, task in planned.tasks.items()}

    def at(self, name: str, shapes: Mapping[str, Shape]) -> TaskAtLength:
        key = self._key, name, f"{self._fields[name]} at {shapes}"
        if key not in traced:
            traced[key] = super().at(name, shapes)
        else:  # whoever had it has forgotten its constants
            for constant, value in traced[key].constants.items():
                setattr(traced[key].abstract.root, constant, value)
        return traced[key]


def check_once(plan: Plan) -> Sequence[Violation]:
    """What breaks a plan's rules; plans are read once, and stay."""
    if id(plan) not in checked:
        checked[id(plan)] = check_anew(plan)
    return checked[id(plan)]


def link_once(plan: Plan, uses: ParameterUses, settings: StepSettings) -> Programs:
    """Links anew whoever has other parameters than those that the plan was linked for."""
    same = [programs for key, others, programs in linked if key == (id(plan), settings) and others == uses]
    if not same:
        same.append(link_anew(plan, uses, settings))
        linked.append(((id(plan), settings), uses, same[0]))
    return same[0]


def prove_once(program: Program) -> None:
    """A program that was linked once, and stays."""
    if id(program) not in proven:
        prove_anew(program)
        proven[id(program)] = program


def requests_in(folder: Path) -> list[RunRequest]:
    """In their order."""
    return [RunRequest.read(path) for path in sorted(folder.glob("[0-9]*/request.json"))]


def analyse_all(folder: Path) -> None:
    """Analyse what workers will run, as they do, in the process that they are forked from: once for all.

    Builds of torch with CUDA refuse backward passes in what is forked from a process that had some.
    """
    if torch.version.cuda is not None:
        return
    torch.set_num_threads(1)
    for request in requests_in(folder):
        plan = Plan.read(request.plan)
        assert request.memo is not None
        memo = AnalysisMemo.read(request.memo)
        find = partial(analyse, memo=memo, lengths=plan.workload.lengths, evaluates=True)
        with suppress(SpindleError):  # a worker will say so
            _, graph = in_the_abstract(resolve(request.workload), find)
            # What these find, the graph keeps.
            ready.check_plan(plan)
            train = settings_of_run(resolve(request.workload).train, request.dtype)
            part.Linked.of(request, plan, graph, train)
            for task in graph.tasks.values():
                loss_in_chunks(task, task.ops[-1], task.task.batch_size, "auto")
            trace_lengths(request, graph, memo)


def trace_lengths(request: RunRequest, graph: WorkloadGraph, memo: AnalysisMemo) -> None:
    """Of the batches that workers will come upon; there may be more than they take."""
    if not any(task.varying for task in graph.tasks.values()):
        return
    loaded = load(request.workload)
    tracer = Tracer(load_abstract(request.workload, reads_initial=False).workload, graph, memo)
    for task in loaded.workload.tasks:
        planned = graph.tasks[task.name]
        if not planned.varying:
            continue
        batches = open_batches(task, loaded.train.seed, varies=True)
        for number in range((request.steps or 1) * loaded.train.accumulate):
            batches.rows(number, 0, task.batch_size)
            found = batches.shapes(number)
            shapes = {name: tuple(found[name]) for name in planned.varying}
            if any(planned.fields[name].shape[1:] != shape for name, shape in shapes.items()):
                tracer.at(task.name, shapes).forget()


def take_back_poisoned(self: GatherMemory, flat: torch.Tensor, begin: int) -> None:
    """Whoever still looks at what was gathered trains another model."""
    flat.fill_(float("nan"))
    take_back(self, flat, begin)


def leave_groups() -> None:
    """Those of a request that has ended: the threads of each of gloo's wake up a hundred times a second, so
    that those of fifty requests would take most of the machine.
    """
    world = distributed_c10d._world._default_pg  # dist.group.WORLD is that of one process, here
    dist.barrier(world)
    for group in [each for each in distributed_c10d._world.pg_map if each is not world]:
        if dist.get_backend(group) == "gloo":  # torch destroys its own alone
            dist.destroy_process_group(group)
    gc.collect()
    gc.freeze()  # what is kept: it would be searched for each request again


# Of one rank with another, or of objects and their sizes: NCCL would connect these ranks for them.
OUTSIDE_OF_STEPS = ("send", "recv", "gather", "scatter", "broadcast", "allgather")
OF_OBJECTS = (torch.uint8, torch.int64)


def refuse_all_but_steps_on_the_world() -> None:
    """Over a strict backend, what is no part of a step is refused on the communicator of everyone: it has the
    hosts' group.
    """

    def refusing(name: str) -> Callable[..., object]:
        original = getattr(StrictGroup, name)

        def checked(self: StrictGroup, tensors: Any, *args: Any, **options: Any) -> object:
            first = tree_leaves(tensors)[0]
            if self is dist.group.WORLD and (name != "allgather" or first.dtype in OF_OBJECTS):
                raise AssertionError(f"{name} of {first.dtype} on the communicator of everyone")
            return original(self, tensors, *args, **options)

        return checked

    for name in OUTSIDE_OF_STEPS:
        setattr(StrictGroup, name, refusing(name))


def sum_little_at_a_time() -> None:
    """Toys have few bytes, which would be summed, and updated, in one go."""
    groups.LEAST_SUM_BYTES = groups.MOST_SUM_BYTES = 2048
    step_end.PART_BYTES = 1


def main(argv: list[str]) -> None:
    folder = Path(argv[1])
    GatherMemory.take_back = take_back_poisoned
    trainer.not_searched_again = nullcontext  # would have all searched that is frozen below
    localise.in_the_abstract = in_the_abstract
    at_lengths.load_abstract = load_abstract
    at_lengths.LengthTracer = Tracer
    environment = WorkerEnvironment.read()
    if environment.backend in STRICT_BACKENDS:
        refuse_all_but_steps_on_the_world()
    requests = requests_in(folder)
    device = torch.device("cpu")
    torch.set_num_threads(1)
    with worker_session(folder, environment.rank), connected(requests[0], environment, device):
        for number, request in enumerate(requests):
            # Looking at each operation takes a while: one rank is watched, with each request another one.
            watched = number % environment.world_size == environment.rank
            Training.step = step_without_host_waits if watched else train_one_step
            try:
                train_plan(request, environment, device)
            except SpindleError as error:  # of the kinds that every worker ends with at the same point
                path = error_path(request.run_dir, environment.rank)
                path.parent.mkdir(exist_ok=True)
                write_json(path, describe_error(error, environment.rank))
            leave_groups()


gc.set_threshold(100_000, 5, 20)  # as in the process that starts this one
if FINE_SUMS in os.environ:
    sum_little_at_a_time()
ready.check_plan, part.link_sets, part.prove = check_once, link_once, prove_once
finder = Finder()  # what is found of layers at a length holds for all requests
trace.Finder = lambda _: finder
Plan.read = cache(Plan.read)
AnalysisMemo.read = cache(AnalysisMemo.read)
analyse_all(Path(sys.argv[-1]))
gc.collect()
gc.freeze()  # so that workers search what they have made themselves alone
