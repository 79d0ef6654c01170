"""What a rank loads of the workload: all of its graph, and the parameters of its own ops."""

from __future__ import annotations

from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest
from spindle_cli.plan.types import Plan
from spindle_cli.runtime.part.evaluated import evaluated_parts
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.localise import LocalWorkload, PartsOf, load_local
from spindle_cli.workload.memo import AnalysisMemo


def load_part(request: RunRequest, plan: Plan, rank: int, parts_of: PartsOf) -> LocalWorkload:
    """The workload, analysed, with the parameters of this rank's ops; `parts_of`: of which it keeps parts."""

    def choose(graph: WorkloadGraph) -> dict[str, set[int]]:
        require_same_workload(plan, graph, request)
        wanted = ops_of_rank(plan, graph, rank)
        for name, part in evaluated_parts(plan, graph).items():
            wanted.update(ops_of_rank(part.plan, graph.only_evaluated(name), rank))
        return wanted

    memo = None if request.memo is None else AnalysisMemo.read(request.memo)
    # A run that goes on has all values in its checkpoint.
    reads_initial = not request.resume
    lengths = plan.workload.lengths
    return load_local(
        request.workload,
        choose,
        memo=memo,
        lengths=lengths,
        evaluates=True,
        reads_initial=reads_initial,
        parts_of=parts_of,
    )


def require_same_workload(plan: Plan, graph: WorkloadGraph, request: RunRequest) -> None:
    """Refuse a workload whose MetaGraph differs from the one that the plan was made for.

    Raises:
        InputError: naming both fingerprints.
    """
    if graph.fingerprint != plan.workload.fingerprint:
        raise InputError(
            f"{request.workload}: the workload's fingerprint is {graph.fingerprint}, "
            f"but the plan {request.plan} was made for {plan.workload.fingerprint}",
            hint="The workload has changed since it was profiled: profile and plan again.",
        )


def ops_of_rank(plan: Plan, graph: WorkloadGraph, rank: int) -> dict[str, set[int]]:
    """Task name -> indices of the ops that a rank runs."""
    ops: dict[str, set[int]] = {}
    for piece in plan.every_slice:
        if rank in piece.devices:
            metaop = graph.by_name[piece.metaop]
            ops.setdefault(metaop.task, set()).update(metaop.ops[piece.ops[0] : piece.ops[1]])
    return ops
