"""Run a piece of code for several sizes of the batch, and follow samples, pairs of them and sums over both
through its operators.

On tensors without data, outside of whatever else looks at what runs: it may be called in the middle of a
training step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from spindle_cli.analysis.autograd import SavedTensorsHooks
from spindle_cli.analysis.pairs.op_split import OpSplit, have_all_samples
from spindle_cli.analysis.pairs.rules import split_of
from spindle_cli.analysis.rules.tape import Call, Entry, Operand, Tape, tensors_in
from spindle_cli.analysis.rules.types import WHOLE, Batch, Mixed, MixesError, Pairs, Part, State
from spindle_cli.analysis.splitting.follow import Follower, UnlikeError, check_shapes
from spindle_cli.analysis.tracing.observe import failures_unlogged
from spindle_cli.workload.building.attributes import Changes, swapped_tensors, watching
from spindle_cli.workload.building.memory import memory_of
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec
from spindle_cli.workload.refuse import place_of_error

# Sizes of the batch to run with besides its own: as those of `Samples`.
_TRIED = (3, 5, 7)


def record(run: Callable[..., Any], module: nn.Module, arguments: Sequence[Argument], size: int) -> Recording:
    """Record `run(*arguments)` for a batch of `size` samples.

    Args:
        run: uses the parameters and buffers of `module`, and gives a loss.

    Raises:
        MixesError: shares of it do not add up, or nothing is known of that; with the user's line.
    """
    sizes = (*[tried for tried in _TRIED if tried != size][:2], size)
    tapes: list[Tape] = []
    results: list[Any] = []
    autocast = _Autocast()
    with _apart() as mode, autocast.again():
        made: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                with mode:
                    like = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=arguments[0].device
                    )
                # Of what is not trained torch may take an operator without a backward pass (embedding_bag's).
                made[id(tensor)] = like.requires_grad_(tensor.requires_grad)
            return made[id(tensor)]

        with swapped_tensors(module, fake):
            named = {
                id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())
            }
            given: list[list[Tensor]] = []
            for tried in sizes:
                tape = Tape()
                with mode:
                    tensors = [argument.made(tried) for argument in arguments]
                    given.append(tensors)
                    with watching(module) as changes, tape:
                        results.append(_run(run, tensors, tried))
                _require_unchanged(changes)
                tapes.append(tape)
        follower = PairsFollower(sizes, named)
        for tensor, argument in zip(given[0], arguments, strict=True):
            follower.give_argument(tensor, argument)
        return follower.recorded(tapes, results[0])


def record_share(
    module: nn.Module, arguments: Sequence[Argument], num_counts: int, share: float, size: int
) -> Recording:
    """Record a loss as its shares compute it, for a whole batch of `size` samples.

    Args:
        module: takes `arguments`, then the batch's share of the step's samples and `num_counts` counts.

    Raises:
        MixesError: as `record`.
    """
    given = len(arguments)
    counts = [Argument((), torch.float64, arguments[0].device, None)] * num_counts

    def run(*taken: Tensor) -> Any:
        return module(*taken[:given], share, *taken[given:])

    return record(run, module, [*arguments, *counts], size)


def arguments_of(task: TaskGraph, op: Op, tensors: Sequence[Tensor] = ()) -> list[Argument]:
    """What an op is given; `tensors`: a share of it, for their dtypes and devices."""
    specs = task.specs_of(op)
    cpu = torch.device("cpu")
    if not tensors:
        return [_argument(spec, spec.dtype, cpu) for spec in specs]
    return [_argument(spec, t.dtype, t.device) for spec, t in zip(specs, tensors, strict=True)]


def _argument(spec: ValueSpec, dtype: torch.dtype, device: torch.device) -> Argument:
    return Argument(spec.shape, dtype, device, spec.batch_dim, spec.rows_per_sample)


def _run(run: Callable[..., Any], tensors: Sequence[Tensor], size: int) -> Any:
    try:
        return run(*tensors)
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        mixed = Mixed(
            f"it fails for a batch of {size}: {type(error).__name__}: {text}", place_of_error(error)
        )
        raise MixesError(str(mixed)) from error


def _require_unchanged(changes: Changes) -> None:
    """Raises MixesError: what ran keeps something for its next call, as every share would by itself."""
    for name in (*changes.buffers, *changes.counted):
        raise MixesError(f"its forward changes {name!r}, which every share would do by itself")


class _Autocast:
    """Enters the autocast that was on where the object was made."""

    def __init__(self) -> None:
        self._on = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype in self._on:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
            yield


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def _apart() -> Iterator[FakeTensorMode]:
    """Where no mode and no hook of others sees what runs, nor is a random number drawn."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            _disable_current_modes(),
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            # What autograd saves here is none of what a layer that recomputes its activations has saved.
            SavedTensorsHooks(_as_it_is, _as_it_is),
            failures_unlogged(),
        ):
            yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


@dataclass(frozen=True)
class Argument:
    """A tensor that the code is given: its shape for one sample, dtype and device, and where its samples are
    (None: it has none); `rows`: of each sample.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    batch_dim: int | None = 0
    rows: int = 1

    def made(self, size: int) -> Tensor:
        """Make a tensor without values for a batch of this size."""
        shape = list(self.shape)
        if self.batch_dim is not None:
            shape[self.batch_dim] = self.rows * size
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Step:
    """One operator of a recorded loss.

    Attributes:
        arguments: by the schema's names; tensors are `Operand`s (with what number each is in `operands`), a
            number that depends on the batch's size is `Varying`, the last value being that of the batch.
        operands: of each tensor among the arguments, in order, its number.
        results: of each tensor that it gives, its number.
        shape: of its first result, for the batch's own size.
        grad: whether it is differentiated (it is not inside of torch.no_grad).
    """

    func: Any
    arguments: dict[str, Any]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    split: OpSplit
    shape: tuple[int, ...]
    grad: bool


@dataclass
class Recording:
    """What was run: tensors are numbered in the order in which they come.

    Attributes:
        sizes: of the batch; the last is its own.
        given: numbers of the arguments; `held`: of parameters and buffers, by name; `constants`: of others.
        loss: number of what was given back.
    """

    sizes: tuple[int, ...]
    steps: list[Step] = field(default_factory=list)
    given: tuple[int, ...] = ()
    held: dict[int, str] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    loss: int = -1


@dataclass(frozen=True)
class Numbered(Operand):
    """An operand with the number of its tensor."""

    number: int = -1


class PairsFollower(Follower):
    """Follows samples, pairs of them and sums over them through the tapes."""

    follows_loops = False

    def __init__(self, sizes: tuple[int, ...], named: dict[int, str]) -> None:
        super().__init__(sizes)
        self._named = named
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, set[int]] = {}
        self._certain: dict[int, bool] = {}  # by number, of tensors that are the same for every sample
        self.recording = Recording(sizes)

    def give_argument(self, tensor: Tensor, argument: Argument) -> None:
        """Say that a tensor of the first tape is an argument."""
        state = WHOLE if argument.batch_dim is None else Batch(argument.batch_dim, 1, argument.rows)
        self.recording.given += (self._add(tensor, state),)

    def recorded(self, tapes: Sequence[Tape], result: Any) -> Recording:
        """Return the recording of what the tapes hold.

        Raises:
            MixesError: shares of it do not add up.
        """
        unlike = self.follow([tape.entries for tape in tapes])
        if unlike is not None:
            raise MixesError(str(unlike))
        if not isinstance(result, Tensor) or id(result) not in self._numbers:
            raise MixesError("it gives no loss")
        state = self.state_of(result)
        if not isinstance(state, Part):
            why = str(state) if isinstance(state, Mixed) else "its loss is no sum or mean over pairs"
            raise MixesError(why)
        self.recording.loss = self._numbers[id(result)]
        return self.recording

    def _add(self, tensor: Tensor, state: State) -> int:
        """A number of its own for a tensor; for one that was changed in place a new one."""
        number = len(self.recording.states)
        self.recording.states.append(state)
        self._numbers[id(tensor)] = number
        self._storages.setdefault(memory_of(tensor), set()).add(id(tensor))
        self._states[id(tensor)] = state
        return number

    def _number_of(self, tensors: Sequence[Tensor], entry: Entry) -> int:
        """The number of the tensor that each of the tapes has in one place."""
        tensor = tensors[0]
        if id(tensor) not in self._numbers:
            name = self._named.get(id(tensor))
            if name is not None:
                self.recording.held[self._add(tensor, WHOLE)] = name
            elif entry.func is torch.ops.aten.lift_fresh.default and all(map(tensor.equal, tensors[1:])):
                self.recording.constants[self._add(tensor, WHOLE)] = tensor
            else:
                raise MixesError(f"it takes a tensor that is no parameter and no buffer ({entry.place})")
        return self._numbers[id(tensor)]

    def _combined(self, values: Sequence[Any], entries: Sequence[Entry]) -> Any:
        made = super()._combined(values, entries)
        if isinstance(made, Operand):
            number = self._number_of(values, entries[0])
            return Numbered(made.state, made.shapes, made.dtype, number=number)
        return made

    def _apply(self, entries: Sequence[Entry]) -> None:
        first = entries[0]
        if len({len(entry.made) for entry in entries}) > 1:
            raise UnlikeError
        func = self._without_writes(first)
        shapes = tuple(zip(*(entry.made for entry in entries), strict=True))
        call = Call(func, self.sizes, self._bound(entries), shapes)
        numbers = tuple(operand.number for operand in call.operands if isinstance(operand, Numbered))
        try:
            split = self._counted(call, numbers) or split_of(call)
            for state, seen in zip(split.states, shapes, strict=True):
                _check(state, seen, self.sizes)
        except MixesError as error:
            split = OpSplit((Mixed(str(error), first.place),) * len(shapes))
        results = tuple(
            self._add(tensor, state)
            for tensor, state in zip(tensors_in(first.result), split.states, strict=True)
        )
        certain = _certain(call, [self._certain.get(number) for number in numbers])
        if certain is not None:
            self._certain[results[0]] = certain
        shape = shapes[0][-1] if shapes else ()
        self.recording.steps.append(Step(func, call.arguments, numbers, results, split, shape, first.grad))

    def _counted(self, call: Call, numbers: Sequence[int]) -> OpSplit | None:
        """Take a sum of what is true of every sample for the number of samples; else None. A cross entropy
        with label smoothing counts the labels that are not ignored, of labels that are the samples' own
        numbers.
        """
        over = call["dim"] in (None, [], [0], [-1]) and not call["keepdim"]
        if call.name != "sum" or not over or len(numbers) != 1 or not self._certain.get(numbers[0]):
            return None
        (operand,) = call.operands
        if operand.ndim != 1 or operand.state != Batch(0) or call["dtype"] is not None:
            return None
        return OpSplit((WHOLE,), ((),), counts=True)

    def _without_writes(self, entry: Entry) -> Any:
        """The operator, or for one that changes its first argument the one that gives the result anew.

        Raises:
            MixesError: others see the change too.
        """
        schema = entry.func._schema.arguments
        writes = [a for a in schema if a.alias_info is not None and a.alias_info.is_write]
        if not writes:
            return entry.func
        packet, name = entry.func.overloadpacket, entry.func.overloadpacket.__name__
        changed = entry.args[0] if entry.args else None
        pure = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
        overload = None if pure is None else getattr(pure, entry.func._overloadname, None)
        if overload is None or len(writes) > 1 or not isinstance(changed, Tensor):
            raise MixesError(f"{packet.__name__} changes a tensor in place ({entry.place})")
        if id(changed) in self._named or self._storages.get(memory_of(changed), set()) - {id(changed)}:
            raise MixesError(f"{name} changes a tensor in place of which there are views ({entry.place})")
        return overload


def _certain(call: Call, operands: Sequence[bool | None]) -> bool | None:
    """What an operator gives for every sample alike: whether a sample's number is some negative number (it is
    not), and the opposite of what is known; None: nothing is known.
    """
    if call.name == "eq" and len(operands) == 1:
        state, compared = call.operands[0].state, call["other"]
        numbered = isinstance(state, Batch) and state.numbered > 0
        return False if numbered and isinstance(compared, int) and compared < 0 else None
    if call.name in ("bitwise_not", "logical_not") and operands[0] is not None:
        return not operands[0]
    return None


def _check(state: State, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> None:
    """Refuse a state that the shapes do not bear out. Raises MixesError."""
    if not isinstance(state, Pairs):
        check_shapes(state, shapes, sizes)
        return
    others = {tuple(n for dim, n in enumerate(shape) if dim not in state.dims) for shape in shapes}
    if len(others) > 1 or not have_all_samples(state.dims, shapes, sizes):
        raise MixesError("its size is no multiple of the batch's")
