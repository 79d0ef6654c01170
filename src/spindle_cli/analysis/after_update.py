"""Find what is done to parameters beside the update of the optimizer: declared, or written in a forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from torch import nn
from torch.optim.swa_utils import AveragedModel

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.graph import Constrained, Following, Op, ParameterTable, TaskGraph
from spindle_cli.workload.types import Constraint, Follows, Workload


def find_following(workload: Workload, tasks: Mapping[str, TaskGraph]) -> tuple[Following, ...]:
    """Find which parameters are moving averages of which others, by canonical names.

    Raises:
        WorkloadError: it cannot; with the parameter and what to do.
    """
    table = ParameterTable.of_tasks(tasks)
    names_by_id = {id(parameter): name for name, parameter in table.parameters.items()}
    following: list[Following] = []
    for follows in workload.follows:
        pairs = tuple(
            (_name(workload, slow, names_by_id, "slow"), _name(workload, fast, names_by_id, "fast"))
            for slow, fast in _pairs(workload, follows)
        )
        _require_used(_declared(workload), table, pairs)
        for names in pairs:
            _require_can_follow(_declared(workload), table, names)
        following.append(Following(pairs, follows.decay, follows.when))
    for task in tasks.values():
        following += _made_by_forward(task, table)
    _require_moved_once(workload, following, _moved_by_operators(tasks, table))
    return tuple(following)


def _declared(workload: Workload) -> str:
    return f"workload {workload.name!r}: follows"


def _refusal(workload: Workload, what: str, hint: str) -> WorkloadError:
    return WorkloadError(f"{_declared(workload)}: {what}", hint=hint)


def _made_by_forward(task: TaskGraph, table: ParameterTable) -> Iterator[Following]:
    """Give the moving averages that a task's forward makes, those of one decay together."""
    name = task.task.name
    pairs: dict[float, list[tuple[str, str]]] = {}
    both = [(table.names[name, move.slow], table.names[name, move.fast]) for move in task.moves]
    for move, (slow, fast) in zip(task.moves, both, strict=True):
        where = f"{move.place}: " if move.place else ""
        _require_used(f"{where}task {name!r}: forward moves a parameter", table, both)
        _require_can_follow(
            f"{where}task {name!r}: forward moves {slow!r} between operators", table, (slow, fast)
        )
        second_user = next((user for user, _ in table.users[slow] if user != name), None)
        if second_user is not None:
            raise WorkloadError(
                f"{where}task {name!r}: forward moves {slow!r}, which task {second_user!r} uses too: whether "
                "moved or not depends on the order in which they run",
                hint="Declare it in the workload, to be done once a step: follows=[Follows(teacher, student, "
                'decay, "before_forward")].',
            )
        pairs.setdefault(move.decay, []).append((slow, fast))
    for decay, decay_pairs in pairs.items():
        yield Following(tuple(decay_pairs), decay, "before_forward", name)


def _require_moved_once(workload: Workload, following: Sequence[Following], by_operators: Set[str]) -> None:
    """Refuse an average that is moved in two ways, or is itself followed."""
    seen: set[str] = set()
    for slow, fast in (pair for average in following for pair in average.pairs):
        if slow in seen or slow in by_operators:
            by = "by two of these" if slow in seen else "by an operator's forward too"
            raise _refusal(workload, f"{slow!r} is moved {by}", "Let one of them alone move it.")
        seen.add(slow)
        if fast in by_operators:
            raise _refusal(
                workload,
                f"{slow!r} follows {fast!r}, which an operator's forward changes, maybe on another device",
                "Let the operator compute with what it would become, without writing it.",
            )
    for slow, fast in (pair for average in following for pair in average.pairs):
        if fast in seen:
            raise _refusal(
                workload,
                f"{slow!r} follows {fast!r}, which is itself an average",
                "Let both follow what is trained.",
            )


def _pairs(workload: Workload, follows: Follows) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """The parameters of two modules that have the same name."""
    if isinstance(follows.slow, nn.Parameter):
        assert isinstance(follows.fast, nn.Parameter), "checked where the workload was built"
        yield follows.slow, follows.fast
        return
    assert isinstance(follows.fast, nn.Module), "checked where the workload was built"
    slow, fast = (dict(module.named_parameters()) for module in (follows.slow, follows.fast))
    odd = next((name for name in (*slow, *fast) if name not in slow or name not in fast), None)
    if odd is not None or not slow:
        what = "has no parameters" if odd is None else f"and fast have not both a parameter {odd!r}"
        hint = (
            "Give modules of the same structure, as copy.deepcopy makes them, or pairs of parameters by "
            "themselves."
        )
        if isinstance(follows.slow, AveragedModel):
            hint = (
                "Give what it averages: Follows(averaged.module, model, decay). Its first update takes the "
                "model's values as they are, so decay is lambda step: 0.99 if step else 0.0, say; for a "
                "plain mean lambda step: step / (step + 1)."
            )
        raise _refusal(workload, f"slow (a {type(follows.slow).__name__}) {what}", hint)
    yield from ((slow[name], fast[name]) for name in slow)


def _name(workload: Workload, parameter: nn.Parameter, names_by_id: Mapping[int, str], key: str) -> str:
    name = names_by_id.get(id(parameter))
    if name is None:
        raise _refusal(
            workload,
            f"{key} has a parameter of shape {tuple(parameter.shape)} that no trained task's module holds",
            "Let the task's module hold both (self.teacher = teacher; self.student = student).",
        )
    return name


def _require_used(where: str, table: ParameterTable, pairs: Sequence[tuple[str, str]]) -> None:
    """Refuse averages that no op computes with."""
    if pairs and not any(table.users[slow] for slow, _ in pairs):
        raise WorkloadError(
            f"{where}: no loss of a trained task depends on {pairs[0][0]!r}",
            hint="For an average of the weights that is only saved and evaluated, set `ema` in the train "
            "settings.",
        )


def _require_can_follow(where: str, table: ParameterTable, names: tuple[str, str]) -> None:
    """Refuse an average, by its name and that of what it follows, that cannot be kept."""
    slow, fast = (table.parameters[name] for name in names)
    if table.is_trainable(names[0]):
        raise WorkloadError(
            f"{where}: {names[0]!r} takes a gradient, so that the optimizer would move it too",
            hint="Freeze it where it is built: teacher.requires_grad_(False).",
        )
    if (slow.shape, slow.is_complex()) != (fast.shape, fast.is_complex()):
        shapes = (
            f"{str(parameter.dtype).removeprefix('torch.')} of shape {tuple(parameter.shape)}"
            for parameter in (slow, fast)
        )
        raise WorkloadError(
            f"{where}: {names[0]!r} and {names[1]!r} are {' and '.join(shapes)}",
            hint="Give parameters of one shape.",
        )


def _moved_by_operators(tasks: Mapping[str, TaskGraph], table: ParameterTable) -> set[str]:
    """Find the parameters that operators change in their own forward."""
    return {
        table.names[task.task.name, name]
        for task in tasks.values()
        for op in task.ops
        for name in op.changes
        if name in op.parameters
    }


def hold_followed(tasks: Mapping[str, TaskGraph], following: tuple[Following, ...]) -> dict[str, TaskGraph]:
    """The tasks, with the ops that use an average holding what it follows: so whoever has one has the other,
    with the values that the last update gave it. Averages that no op uses are held by the first op that uses
    one which is moved with them.

    Raises:
        WorkloadError: a task has an average without what it follows.
    """
    table = ParameterTable.of_tasks(tasks)
    wanted: dict[tuple[str, int], dict[str, None]] = {}
    for average in following:
        first = next(user for slow, _ in average.pairs for user in table.users[slow])
        for slow, fast in average.pairs:
            for user in table.users[slow] or (first,):
                wanted.setdefault(user, {}).update(dict.fromkeys((slow, fast)))
    return {
        name: replace(
            task,
            ops=tuple(_holding(op, task, table, wanted.get((name, op.index), {})) for op in task.ops),
        )
        for name, task in tasks.items()
    }


def _holding(op: Op, task: TaskGraph, table: ParameterTable, names: Iterable[str]) -> Op:
    held = table.of_op(task.task.name, op.parameters)
    missing = [name for name in names if name not in held]
    if not missing:
        return op
    dotted = {canonical: name for (owner, name), canonical in table.names.items() if owner == task.task.name}
    lacking = next((name for name in missing if name not in dotted), None)
    if lacking is not None:
        raise WorkloadError(
            f"follows: task {task.task.name!r} uses a moving average of {lacking!r}, which its module does "
            "not hold",
            hint="Let the modules of all tasks that use the teacher hold the student too "
            "(self.student = student).",
        )
    followed = tuple(dotted[name] for name in missing)
    return replace(op, parameters=(*op.parameters, *followed), followed=followed)


def find_constraints(workload: Workload, tasks: Mapping[str, TaskGraph]) -> tuple[Constrained, ...]:
    """The constraints on trained parameters, by canonical name, in the order in which they are applied.

    Raises:
        WorkloadError: one is of nothing that is trained, or of a parameter without such a dimension.
    """
    table = ParameterTable.of_tasks(tasks)
    names_by_id = {id(parameter): name for name, parameter in table.parameters.items()}
    constrained: list[Constrained] = []
    for constraint in workload.constraints:
        names = [
            names_by_id[id(parameter)]
            for parameter in _constrained(constraint)
            if id(parameter) in names_by_id
        ]
        trained = [name for name in names if table.is_trainable(name)]
        if not trained:
            raise WorkloadError(
                f"workload {workload.name!r}: constraints: no trained task's module holds a trained "
                f"parameter of {type(constraint.of).__name__} {tuple(getattr(constraint.of, 'shape', ()))}",
                hint="Give a parameter that a task trains.",
            )
        for name in trained:
            _require_dimension(workload, name, table.parameters[name], constraint)
            clamp = None if constraint.clamp is None else (constraint.clamp[0], constraint.clamp[1])
            constrained.append(Constrained(name, clamp, constraint.unit_norm))
    return tuple(constrained)


def _constrained(constraint: Constraint) -> Iterator[nn.Parameter]:
    if isinstance(constraint.of, nn.Parameter):
        yield constraint.of
    else:
        yield from constraint.of.parameters()


def _require_dimension(
    workload: Workload, name: str, parameter: nn.Parameter, constraint: Constraint
) -> None:
    where = f"workload {workload.name!r}: constraints: {name}"
    if parameter.is_complex() and constraint.clamp is not None:
        raise WorkloadError(
            f"{where} is {str(parameter.dtype).removeprefix('torch.')}, which has no order to clamp by",
            hint="Keep it as pairs of real numbers, and let forward take torch.view_as_complex of them.",
        )
    dim = constraint.unit_norm
    if dim is not None and not -parameter.dim() <= dim < parameter.dim():
        raise WorkloadError(
            f"{where} has shape {tuple(parameter.shape)}, which has no dimension {dim} (unit_norm)",
            hint="Count dimensions from 0: rows of a matrix get length 1 by unit_norm=1.",
        )


def described(following: tuple[Following, ...], constraints: tuple[Constrained, ...]) -> list[object]:
    """Describe moving averages and constraints for a fingerprint: whether a plan fits depends on them."""
    said: list[object] = [
        ["follows", average.when, average.forwards_of, [list(pair) for pair in average.pairs]]
        for average in following
    ]
    said += [["whole", constraint.name] for constraint in constraints if not constraint.treats_elements_alone]
    return said
