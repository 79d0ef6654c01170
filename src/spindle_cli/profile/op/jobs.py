"""What has to be timed: every op on every batch share that a plan may give it, equal ones once.

Two ops are equal when they are of one kind, take values of the same shapes per sample and send gradients to
the same places; which task they are of does not matter. So a component that several tasks share is timed once
per batch share, and a share of 16 samples is the same work whether it is 64 over 4 devices or 32 over 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from spindle_cli.analysis.rules.batch_norms import changes_buffers
from spindle_cli.files.artifact import sha256_of
from spindle_cli.operators.tensor_parallel import layer_split
from spindle_cli.profile.fit import choose_measured
from spindle_cli.workload.graph import MetaOp, Op, TaskGraph, ValueSpec, WorkloadGraph

# Shares for micro-batches, for each device that there is: at most, and where only one size is measured.
MOST_CUTS = 16
MEASURED_CUTS = 4


@dataclass(frozen=True, order=True)
class OpRef:
    """An op: its task and its index there."""

    task: str
    op: int


@dataclass(frozen=True)
class Job:
    """One op on one batch share.

    Attributes:
        key: of all equal jobs, the same in every run on this workload.
        op: the op that stands for all equal ones.
        rows: samples of the share.
        label: for people.
        tp: of how many devices, among which tensor parallelism splits the op, one is run.
        sums_shares: it runs as one of several shares, that sum or gather something (batch norms, contrastive
            losses).
    """

    key: str
    op: OpRef
    rows: int
    label: str
    tp: int = 1
    sums_shares: bool = False


@dataclass(frozen=True)
class JobTable:
    """All jobs of a workload, and which one each op and share is.

    Attributes:
        jobs: in the order in which they are run.
        stand_ins: for every op the equal one whose module is run in its place.
        class_of: of every op, the name of its class of equal ops.
    """

    jobs: tuple[Job, ...]
    stand_ins: Mapping[OpRef, OpRef]
    class_of: Mapping[OpRef, str]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """All sizes of shares that are timed."""
        return tuple(sorted({job.rows for job in self.jobs}))

    def key(self, op: OpRef, rows: int, tp: int = 1, *, sums_shares: bool = False) -> str:
        """Key of the job that times `op` on `rows` samples, split `tp` ways; or as a share that sums
        or gathers with others.
        """
        return _key(self.class_of[op], rows, tp, sums_shares=sums_shares)


def valid_degrees(metaop: MetaOp, batch_size: int, max_devices: int) -> tuple[int, ...]:
    """Degrees of data parallelism that a MetaOp may run with, ascending.

    The divisors of its batch; one device where the samples depend on each other.
    """
    if metaop.coupled:
        return (1,)
    return tuple(n for n in range(1, min(batch_size, max_devices) + 1) if batch_size % n == 0)


def is_cut(graph: WorkloadGraph, metaop: MetaOp) -> bool:
    """Whether a MetaOp's batch may be cut into micro-batches: not where an op needs all of it, or changes
    buffers with it.
    """
    task = graph.tasks[metaop.task]
    ops = [task.ops[index] for index in metaop.ops]
    return not (metaop.coupled or any(op.talks or changes_buffers(task, op) for op in ops))


def degrees_beyond(
    graph: WorkloadGraph, metaop: MetaOp, max_devices: int, max_points: int
) -> tuple[int, ...]:
    """Into how many shares, more than there are devices, the batch is cut for micro-batches; ascending.

    All where points cost nothing, as in an estimate; else one: what lies between two shares is nearly linear.
    """
    batch_size = graph.tasks[metaop.task].task.batch_size
    if not is_cut(graph, metaop):
        return ()
    beyond = [n for n in range(max_devices + 1, MOST_CUTS * max_devices + 1) if batch_size % n == 0]
    if beyond and max_points < MOST_CUTS * max_devices:
        return (min(beyond, key=lambda n: abs(n - MEASURED_CUTS * max_devices)),)
    return tuple(beyond)


def make_jobs(
    graph: WorkloadGraph, max_devices: int, max_points: int, degrees: Sequence[int] = ()
) -> JobTable:
    """Return the jobs of all MetaOps for up to `max_devices` devices, at most about `max_points` per batch.

    `degrees`: of tensor parallelism, for the ops that can be split so many ways.

    Raises:
        WorkloadError: the workload's `tp_plans` do not fit its layers.
    """
    class_of = {
        OpRef(task.task.name, op.index): _op_class(task, op)
        for task in graph.tasks.values()
        for op in task.ops
    }
    stand_ins = _stand_ins(graph, class_of)
    jobs: dict[str, Job] = {}
    for metaop in graph.metaops:
        batch_size = graph.tasks[metaop.task].task.batch_size
        shares = choose_measured(valid_degrees(metaop, batch_size, max_devices), max_points)
        beyond = degrees_beyond(graph, metaop, max_devices, max_points)
        for index in metaop.ops:
            op = OpRef(metaop.task, index)
            talks = graph.tasks[op.task].ops[op.op].talks
            for tp in (1, *_possible(graph, op, degrees)):
                for dp in (*(dp for dp in shares if dp * tp <= max_devices), *beyond):
                    rows, sums = batch_size // dp, talks and dp > 1
                    key = _key(class_of[op], rows, tp, sums_shares=sums)
                    part = f", one of {tp} parts" if tp > 1 else ""
                    label = f"{metaop.name} on {rows} samples{part}"
                    jobs.setdefault(key, Job(key, stand_ins[op], rows, label, tp, sums))
    # By class, large shares first: what does not fit the memory shows early.
    order = sorted(jobs.values(), key=lambda job: (job.op, -job.rows, job.tp))
    return JobTable(tuple(order), stand_ins, class_of)


def _key(op_class: str, rows: int, tp: int = 1, *, sums_shares: bool = False) -> str:
    key = f"{op_class}/{rows}" if tp == 1 else f"{op_class}/{rows}/tp{tp}"
    return f"{key}/shares" if sums_shares else key


def _possible(graph: WorkloadGraph, op: OpRef, degrees: Sequence[int]) -> list[int]:
    """Return the degrees that an op can be split by."""
    task = graph.tasks[op.task]
    return [tp for tp in degrees if layer_split(graph.workload, task, task.ops[op.op], tp) is not None]


def _stand_ins(graph: WorkloadGraph, class_of: Mapping[OpRef, str]) -> dict[OpRef, OpRef]:
    """Choose for each class of ops that of the task with the largest batch, which has all shares' rows."""
    chosen: dict[str, OpRef] = {}
    for op, op_class in class_of.items():
        held = chosen.get(op_class)
        if held is None or _batch(graph, op) > _batch(graph, held):
            chosen[op_class] = op
    return {op: chosen[op_class] for op, op_class in class_of.items()}


def _batch(graph: WorkloadGraph, op: OpRef) -> int:
    return graph.tasks[op.task].task.batch_size


def _op_class(task: TaskGraph, op: Op) -> str:
    """Return a short hash of everything that an op's time depends on but the number of samples."""
    parameters = [task.root.get_parameter(name) for name in op.parameters]
    outputs = [task.values[name] for name in op.outputs if name in task.values]
    described = {
        "kind": op.kind,
        "coupled_batch": task.task.batch_size if op.coupled or op.contrasts else None,
        "is_loss": op.is_loss,
        "fields": _describe(task.fields[name] for name in op.fields),
        "inputs": _describe(task.values[name] for name in op.inputs),
        "outputs": _describe(outputs),
        "parameters": [[list(p.shape), str(p.dtype), p.requires_grad] for p in parameters],
    }
    return sha256_of(described).removeprefix("sha256:")[:16]


def _describe(values: Iterable[ValueSpec]) -> list[list[object]]:
    described: list[list[object]] = []
    for value in values:
        shape = list(value.shape_of(1))
        described.append([shape, value.batch_dim, str(value.dtype), value.requires_grad])
    return described
