"""What must be true before a plan is launched: it is valid, and the workload is the one it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.check.run import check_plan, require_planned
from spindle_cli.errors import InputError, WorkloadError
from spindle_cli.launch.starting.forked import IMPORTED_LATE, preload
from spindle_cli.plan.types import Plan
from spindle_cli.process.lifetime import lasting_imports
from spindle_cli.program.evaluated import place_evaluated
from spindle_cli.workload.building.load import locate
from spindle_cli.workload.file import TrainSettings, naming_the_file
from spindle_cli.workload.settings.types import SHARES_SLACK, LocalSgd

if TYPE_CHECKING:
    from spindle_cli.analysis.memo import AnalysisMemo
    from spindle_cli.training.optimizing.groups import OptimizerGroups
    from spindle_cli.workload.graph import WorkloadGraph

SHOWN_VIOLATIONS = 3


@dataclass(frozen=True)
class AnalysedWorkload:
    """Where a plan's workload is now, whatever the current folder, its graph, and how it is trained.

    `memo`: what workers need not find again. `groups`: which optimizer settings each parameter has.
    `initial`: which initial values are from files, as lines for people.
    """

    source: str
    train: TrainSettings
    graph: WorkloadGraph
    memo: AnalysisMemo
    groups: OptimizerGroups
    initial: tuple[str, ...] = ()


def require_valid(plan: Plan, plan_path: Path) -> None:
    """Refuse a plan that breaks a rule.

    Raises:
        InputError: the first violations.
    """
    violations = check_plan(plan)
    if violations:
        shown = "".join(f"\n  {violation}" for violation in violations[:SHOWN_VIOLATIONS])
        more = (
            f"\n  and {len(violations) - SHOWN_VIOLATIONS} more" if len(violations) > SHOWN_VIOLATIONS else ""
        )
        raise InputError(
            f"{plan_path}: the plan is not valid:{shown}{more}",
            hint=f"`spindle check {plan_path}` lists everything; make the plan again with `spindle plan`.",
        )


def find_workload(
    plan: Plan, plan_path: Path, given: str | None, *, reads_initial: bool = True
) -> AnalysedWorkload:
    """Find the plan's workload and make sure that it is the same; its code runs here, parameters on meta.

    Args:
        given: where the user says it is; else where the plan says, from the current folder or else from the
            plan's.
        reads_initial: otherwise files of initial values need not be there: the run goes on from a checkpoint.

    Raises:
        InputError: it is not there, or is another workload (or another version of it), or the plan splits
            layers that cannot be split; or a task that is only evaluated takes what no device holds.
        WorkloadError: it cannot be built or traced (in eval mode, too), or its optimizer or schedule cannot
            be made.
    """
    preload(*IMPORTED_LATE)
    with lasting_imports():
        from spindle_cli.analysis.analyse import analyse_for_others
        from spindle_cli.analysis.evaluation import needs_of
        from spindle_cli.operators.tensor_parallel import plan_splits
        from spindle_cli.operators.whole import require_compiler
        from spindle_cli.training.callbacks import refuse_setters
        from spindle_cli.training.optimizing.groups import groups_of_graph, require_elementwise
        from spindle_cli.training.optimizing.schedules import TaskWeights, require_trainable
        from spindle_cli.training.sampling import sets_of, turns_of
        from spindle_cli.workload.building.load import load_abstract
        from spindle_cli.workload.graph import ParameterTable

    source = locate(given or plan.workload.source, () if given else (plan_path.absolute().parent,))
    loaded = load_abstract(source, reads_initial=reads_initial)
    graph, memo = analyse_for_others(loaded.workload, lengths=plan.workload.lengths, evaluates=True)
    if graph.fingerprint != plan.workload.fingerprint:
        raise InputError(
            f"{plan_path}: the plan is for workload {plan.workload.name!r} "
            f"({_short(plan.workload.fingerprint)}); {source} is {loaded.workload.name!r} "
            f"({_short(graph.fingerprint)})",
            hint="Profile and plan this workload again, or name the right one with --workload.",
        )
    require_same_islands(plan, plan_path, loaded.train, source)
    with naming_the_file(source):
        require_trainable(loaded.train)
        refuse_setters(loaded.train, source, loaded.workload)
        require_compiler(loaded.train, "cpu" if plan.cluster.is_cpu else "cuda")
        require_gradient_hooks(plan, graph)
        TaskWeights(loaded.train, loaded.workload.tasks).at(0)
        sets = sets_of(turns_of(loaded.train, loaded.workload.tasks))
        groups = groups_of_graph(loaded.train, graph)
        splits = plan_splits(plan, graph, str(plan_path))
        require_elementwise(groups, splits.split_parameters(plan, graph, ParameterTable.of(graph)))
        for task in loaded.workload.evaluated:
            evaluation_plan = place_evaluated(plan, needs_of(graph, task.name))
            plan_splits(evaluation_plan, graph.only_evaluated(task.name), str(plan_path), only_evaluated=True)
    require_planned(plan, sets, str(plan_path))
    return AnalysedWorkload(source, loaded.train, graph, memo, groups, tuple(loaded.initial.lines()))


def require_gradient_hooks(plan: Plan, graph: WorkloadGraph) -> None:
    """Refuse to move activations, to compute them again, or to take a loss's gradients chunk by chunk, where
    torch loses hooks on parameters' gradients by it (`KEEPS_GRADIENT_HOOKS`).

    Raises:
        WorkloadError: a trained parameter has one, and the plan does any of it.
    """
    from spindle_cli.analysis.autograd import KEEPS_GRADIENT_HOOKS

    if KEEPS_GRADIENT_HOOKS:
        return
    plans = (plan, *plan.set_plans.values())
    in_chunks = any(metaop.loss_chunks for set_plan in plans for metaop in set_plan.metaops)
    does = [
        (what, how)
        for what, how, is_done in (
            (
                "moves activations to host memory",
                "--no-offload",
                any(slice_.offload for slice_ in plan.every_slice),
            ),
            (
                "recomputes activations",
                "for more memory",
                any(slice_.recompute for slice_ in plan.every_slice),
            ),
            ("computes losses in chunks", "with loss_chunks: 1", in_chunks),
        )
        if is_done
    ]
    hooked = _hooked_parameter(graph)
    if not does or hooked is None:
        return
    task_name, name = hooked
    raise WorkloadError(
        f"task {task_name!r}: the parameter {name!r} has a hook on its gradient, and the plan "
        f"{' and '.join(what for what, _ in does)}, by which torch before 2.10 may lose hooks",
        hint=f"Install torch 2.10 or newer, plan {' and '.join(how for _, how in does)}, or multiply inside "
        "of the model in place of the hook.",
    )


def _hooked_parameter(graph: WorkloadGraph) -> tuple[str, str] | None:
    """The first trained parameter that has a hook on its gradient: its task's name and its own."""
    for task in graph.tasks.values():
        for name, parameter in task.root.named_parameters():
            if parameter.requires_grad and parameter._backward_hooks:
                return task.task.name, name
    return None


def require_same_islands(plan: Plan, plan_path: Path, train: TrainSettings, source: str) -> None:
    """Refuse a plan that has islands otherwise than the workload asks for: it trains another model.

    Raises:
        InputError: naming both.
    """
    if plan.local_sgd == train.local_sgd:
        return
    raise InputError(
        f"{plan_path}: the plan is for train.local_sgd {_islands(plan.local_sgd)}; {source} has "
        f"{_islands(train.local_sgd)}",
        hint="Plan again from a profile of this workload.",
    )


def _islands(local_sgd: LocalSgd | None) -> str:
    return "none" if local_sgd is None else str(local_sgd.model_dump())


def compiled_otherwise(plan: Plan, train: TrainSettings) -> tuple[str, ...]:
    """Where torch.compile is not used as the plan's times expect, or as the workload asks, for people."""
    lines = []
    if plan.compile != train.compile:
        lines.append(
            f"the plan's times are of layers {_how(plan.compile)}, and they run {_how(train.compile)} "
            "(train.compile): predictions will be off; profile and plan again"
        )
    split = dict.fromkeys(slice_.metaop for slice_ in plan.slices if slice_.tp > 1)
    if train.compile is not None and split:
        lines.append(f"not compiled, as tensor parallelism splits them: {', '.join(split)}")
    return tuple(lines)


def chunked_otherwise(plan: Plan, train: TrainSettings) -> tuple[str, ...]:
    """Where losses are not computed in chunks as the plan expects, for people."""
    has_chunks = any(metaop.loss_chunks for metaop in plan.metaops)
    may_have = isinstance(train.loss_chunks, int) and train.loss_chunks > 1
    if plan.loss_chunks == train.loss_chunks or not (has_chunks or may_have):
        return ()
    return (
        f"the plan's times and memory are for loss_chunks: {plan.loss_chunks}, and the workload has "
        f"loss_chunks: {train.loss_chunks}: predictions may be off; profile and plan again",
    )


def sampled_otherwise(plan: Plan, workload: AnalysedWorkload) -> tuple[str, ...]:
    """Where steps run other tasks, or some of them more or less often, than the plan expects, for people."""
    from spindle_cli.training.sampling import sets_of, turns_of

    tasks = workload.graph.workload.tasks
    now = {task_set.tasks: task_set.share for task_set in sets_of(turns_of(workload.train, tasks))}
    planned = {task_set.tasks: task_set.share for task_set in plan.task_sets} or {
        tuple(task.name for task in tasks): 1.0
    }
    if all(abs(now.get(names, 0.0) - planned.get(names, 0.0)) <= SHARES_SLACK for names in {*now, *planned}):
        return ()
    return (
        f"the plan's times are for steps that run {_often(planned)}, and the workload's steps run "
        f"{_often(now)} (train.sampling): predictions will be off; profile and plan again",
    )


def _often(shares: Mapping[tuple[str, ...], float]) -> str:
    return "; ".join(f"{' + '.join(tasks)} ({share:.1%})" for tasks, share in shares.items())


def kept_by_device(workload: AnalysedWorkload) -> tuple[str, ...]:
    """Buffers that will not be those of one process, for people."""
    from spindle_cli.analysis.rules.batch_norms import shared_statistics

    return shared_statistics(workload.graph)


def stepped_by_each(plan: Plan, workload: AnalysedWorkload) -> tuple[str, ...]:
    """Optimizers whose state devices do not share out, for people."""
    from spindle_cli.training.optimizing.groups import stepped_whole

    if plan.cluster.num_devices == 1:
        return ()
    return stepped_whole(workload.train, workload.groups, workload.graph)


def _how(backend: str | None) -> str:
    return "as they are" if backend is None else f"compiled by {backend}"


def _short(fingerprint: str) -> str:
    return fingerprint[: len("sha256:") + 12]
