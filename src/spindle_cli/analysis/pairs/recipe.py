"""A contrastive loss as the steps that one share of its batch takes: actions on tensors in one of few forms.

Every tensor is needed in one of few forms: whole, the share's own rows, the rows of all shares (gathered), or
of pairs the part that is cut along one of their dimensions. Starting from the loss, each step is asked for in
the form that its user needs, so that a loss that goes both ways has a strip of rows and one of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from spindle_cli.analysis.pairs.follow import Numbered, Recording, Step, arguments_of, record_share
from spindle_cli.analysis.pairs.op_split import BOTH_WAYS, Along
from spindle_cli.analysis.pairs.rules import ADDS
from spindle_cli.analysis.rules.tape import Varying
from spindle_cli.analysis.rules.types import WHOLE, Batch, Mixed, MixesError, Pairs, Part
from spindle_cli.workload.graph import Op, TaskGraph

OWN = -1  # the share's rows, or all of what has no samples
SHIFTED = -2  # the share's own numbers, counted from the batch's first sample
ALL = -3  # the rows of all shares
PARTED = -4  # of what every share has alike, the part of one
Key = tuple[int, int]  # a tensor's number, and in what form: one of these, or the dimension that is cut


@dataclass(frozen=True)
class Slot:
    """In the place of a tensor among an operator's arguments."""

    key: Key


@dataclass(frozen=True)
class Grows:
    """In the place of a number that is `fixed + slope * samples of the share`."""

    fixed: int
    slope: int


@dataclass(frozen=True)
class Run:
    """An action that runs an operator.

    `scaled`: by the share's part of the batch, as it gives a mean. `results`: keys of what it gives, None for
    what nobody needs.
    """

    func: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[Key | None, ...]
    grad: bool
    scaled: bool = False


@dataclass(frozen=True)
class Gather:
    """Gather the rows of all shares, which lie along `dim`."""

    source: Key
    result: Key
    dim: int


@dataclass(frozen=True)
class Number:
    """Count samples by `step` from the batch's first one along `dim`: the share's own, or those of all."""

    source: Key
    result: Key
    dim: int
    step: int
    of_all: bool


@dataclass(frozen=True)
class Share:
    """Takes of what every share has alike as much as the share has of the batch."""

    source: Key
    result: Key


@dataclass(frozen=True)
class Count:
    """How many samples the batch has, on the device of `source`."""

    source: Key
    result: Key


@dataclass(frozen=True)
class Diagonal:
    """Takes of each sample of the share the pair with itself; pairs are cut along `cut` of the dimensions 0,
    1.
    """

    source: Key
    result: Key
    cut: int


@dataclass(frozen=True)
class Eye:
    """1 for each sample's pair with itself, else 0; of two dimensions, cut along `cut`."""

    result: Key
    cut: int
    named: dict[str, Any]


Action = Run | Gather | Number | Share | Count | Diagonal | Eye


@dataclass
class Recipe:
    """The actions that a share runs, in order.

    Attributes:
        size: samples of the batch.
        given: keys of the arguments; `held`: by key, names of parameters and buffers; `constants`: by key.
        loss: key of the result.
        ended: by action, the keys of which it is the last user.
    """

    size: int
    given: tuple[Key, ...]
    held: dict[Key, str]
    constants: dict[Key, Tensor]
    loss: Key
    actions: tuple[Action, ...]
    ended: tuple[tuple[Key, ...], ...] = field(default=())


def filled(
    action: Run, tensor: Callable[[Slot], Any], number: Callable[[Grows], int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An operator's arguments, with tensors and numbers in their places."""

    def fill(value: Any) -> Any:
        match value:
            case Slot():
                return tensor(value)
            case Grows():
                return number(value)
            case list():
                return [fill(item) for item in value]
        return value

    return tuple(fill(v) for v in action.arguments), {n: fill(v) for n, v in action.named.items()}


def recipe_of_share(
    module: nn.Module, task: TaskGraph, loss: Op, share: float, size: int, tensors: Sequence[Tensor] = ()
) -> Recipe:
    """The steps of a share of a contrastive loss, for a whole batch of `size` samples.

    Args:
        module: computes the loss as shares do.
        share: the batch's part of the step's samples.
        tensors: a share of what the loss is given, for their dtypes and devices.

    Raises:
        MixesError: the loss cannot be computed by shares.
    """
    counts = task.loss_shares.num_counts
    return make_recipe(record_share(module, arguments_of(task, loss, tensors), counts, share, size))


def make_recipe(recording: Recording) -> Recipe:
    """Make the recipe by which a share computes a recorded loss.

    Raises:
        MixesError: a share cannot run them.
    """
    maker = _Maker(recording)
    loss = maker.need(recording.loss, OWN)
    return Recipe(
        recording.sizes[-1],
        tuple((number, OWN) for number in recording.given),
        {(number, OWN): name for number, name in recording.held.items()},
        {(number, OWN): tensor for number, tensor in recording.constants.items()},
        loss,
        tuple(maker.actions),
        _ended(maker.actions, loss),
    )


def _ended(actions: list[Action], loss: Key) -> tuple[tuple[Key, ...], ...]:
    last: dict[Key, int] = {}
    for index, action in enumerate(actions):
        for key in _keys_of(action):
            last[key] = index
    last.pop(loss, None)
    ended: list[list[Key]] = [[] for _ in actions]
    for key, index in last.items():
        ended[index].append(key)
    return tuple(tuple(keys) for keys in ended)


def _keys_of(action: Action) -> list[Key]:
    """The keys of what an action takes and gives."""
    if isinstance(action, Run):
        keys: list[Key] = [key for key in action.results if key is not None]
        filled(action, lambda slot: keys.append(slot.key), lambda _: 0)
        return keys
    source = () if isinstance(action, Eye) else (action.source,)
    return [*source, action.result]


class _Maker:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._made_by = {number: step for step in recording.steps for number in step.results}
        self._known: set[Key] = set()
        self.actions: list[Action] = []

    def need(self, number: int, form: int) -> Key:
        """Have a tensor in a form, and all that it takes."""
        key = (number, form)
        if key in self._known:
            return key
        state = self._recording.states[number]
        if isinstance(state, Mixed):
            raise MixesError(str(state))
        self._known.add(key)
        if form == PARTED:
            self.actions.append(Share(self.need(number, OWN), key))
        elif form in (ALL, SHIFTED):
            assert isinstance(state, Batch), "only rows of samples are gathered"
            source = self.need(number, OWN)
            if state.numbered:
                self.actions.append(Number(source, key, state.dim, state.numbered, form == ALL))
            else:
                self.actions.append(Gather(source, key, state.dim))
        elif number in self._made_by:
            self._run(self._made_by[number], form)
        return key

    def _run(self, step: Step, form: int) -> None:
        """Run a step so that its results are in this form."""
        results = tuple(
            None if isinstance(state, Mixed) else (number, form)
            for number, state in zip(step.results, step.split.states, strict=True)
        )
        self._known.update(key for key in results if key is not None)
        along, state = step.split.along, step.split.states[0]
        cut = form if form >= 0 else self._cut_of(step)
        action = None if results[0] is None else self._other_action(step, results[0], cut)
        if action is not None:
            self.actions.append(action)
        elif along is None:
            self._append(step, results, [(number, OWN) for number in step.operands], _linear(self._recording))
        else:
            sized = cut if isinstance(state, Pairs | Batch) else None
            self._append(
                step, results, self._forms(step, along, cut), lambda varying: varying.values[-1], sized
            )

    def _other_action(self, step: Step, result: Key, cut: int) -> Action | None:
        """What a share does for a step whose operator, run on the share's rows, would give something else.
        None: it runs the operator.
        """
        along, name = step.split.along, step.func.overloadpacket.__name__
        if step.split.counts:
            return Count(self.need(step.operands[0], OWN), result)
        if along is None:
            return None
        if name in ("diagonal", "diagonal_copy", "index") and isinstance(step.split.states[0], Batch):
            ((cut_dim, _),) = along[0]
            return Diagonal(self.need(step.operands[0], cut_dim), result, cut_dim)
        if name == "eye":
            named = {n: v for n, v in step.arguments.items() if n not in ("n", "m", "out")}
            return Eye(result, cut, named)
        return None

    def _forms(self, step: Step, along: tuple[Along, ...], cut: int) -> list[Key]:
        """What a step takes, in the forms that it takes it in where its result is cut along `cut`."""
        adds = isinstance(step.split.states[0], Part) and step.func.overloadpacket.__name__ in ADDS
        return [
            (number, PARTED)
            if adds and self._recording.states[number] == WHOLE
            else (number, self._form_of(number, dict(along[place]), cut))
            for place, number in enumerate(step.operands)
        ]

    def _cut_of(self, step: Step) -> int:
        """The dimension of a step's result, or of what it sums up, that is cut."""
        state = step.split.states[0]
        if isinstance(state, Batch):
            return state.dim
        return OWN if step.split.cut is None else step.split.cut

    def _form_of(self, number: int, along: dict[int, int], cut: int) -> int:
        """The form in which a step takes a tensor where its result is cut along `cut`."""
        state = self._recording.states[number]
        if isinstance(state, Pairs):
            source_dims = [dim for dim, result in along.items() if result == cut] or [cut]
            if source_dims[0] not in state.cuts:
                raise MixesError(BOTH_WAYS)
            return source_dims[0]
        if isinstance(state, Batch):
            ((_, result),) = along.items()
            if result != cut:
                return ALL
            return SHIFTED if state.numbered else OWN
        return OWN

    def _append(
        self,
        step: Step,
        results: tuple[Key | None, ...],
        operands: list[Key],
        number: Callable[[Varying], Any],
        cut: int | None = None,
    ) -> None:
        keys = iter([self.need(*operand) for operand in operands])

        def put(value: Any) -> Any:
            match value:
                case Numbered():
                    return Slot(next(keys))
                case Varying():
                    return number(value)
                case list():
                    return [put(item) for item in value]
            return value

        arguments: list[Any] = []
        named: dict[str, Any] = {}
        for argument in step.func._schema.arguments:
            value = put(step.arguments[argument.name])
            if (
                argument.name in ("size", "shape")
                and cut is not None
                and cut >= 0
                and isinstance(value, list)
            ):
                value = [Grows(0, 1) if dim == cut and item != -1 else item for dim, item in enumerate(value)]
            if argument.kwarg_only:
                named[argument.name] = value
            else:
                arguments.append(value)
        scaled = step.split.is_mean
        self.actions.append(Run(step.func, tuple(arguments), named, results, step.grad, scaled))


def _linear(recording: Recording) -> Callable[[Varying], Grows]:
    """A number as a share of the batch has it, which grows with its samples by a constant slope."""
    sizes = recording.sizes

    def grows(varying: Varying) -> Grows:
        values = varying.values
        if all(isinstance(value, int) for value in values):
            slope = (values[1] - values[0]) // (sizes[1] - sizes[0])
            growth = Grows(values[0] - slope * sizes[0], slope)
            if all(growth.fixed + slope * s == v for s, v in zip(sizes, values, strict=True)):
                return growth
        raise MixesError("it computes with the size of the batch")

    return grows
