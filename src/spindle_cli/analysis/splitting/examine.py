"""One piece of code, a module or a call in glue, run for several sizes of the batch and examined."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spindle_cli.analysis.fixed import is_fixed, reads_values, state_of_values
from spindle_cli.analysis.memo import FindingsRecord, StateRecord, packed, unpacked
from spindle_cli.analysis.outside import noting_outside_reads
from spindle_cli.analysis.own_draws import OwnDraws
from spindle_cli.analysis.rules.batch_norms import by_fixed_statistics, statistics_of
from spindle_cli.analysis.rules.tape import Tape, tensors_in
from spindle_cli.analysis.rules.types import Batch, Mixed, MixesError, Reduced, State, Whole
from spindle_cli.analysis.splitting.backward import Backward, why_coupled_backwards
from spindle_cli.analysis.splitting.carried import (
    Carried,
    Left,
    computes_otherwise,
    goes_into,
    is_no_matter,
    lasting,
)
from spindle_cli.analysis.splitting.follow import Follower, check_shapes
from spindle_cli.analysis.tracing.observe import Observer, failures_unlogged
from spindle_cli.analysis.tracing.shapes import leaves_of
from spindle_cli.analysis.without_data import Remembering, Unread
from spindle_cli.workload.building.attributes import Before, Changes, swapped_tensors
from spindle_cli.workload.building.memory import memory_of, written_by
from spindle_cli.workload.refuse import place_of_error

_STATES: Mapping[str, Any] = {cls.__name__: cls for cls in (Whole, Batch, Reduced, Mixed)}
_OTHER_AGAIN = "its forward computes otherwise each time that it runs, by something that nobody sees change"
_DRAWN_FOR_ALL = "it hands on what is drawn for the whole batch, of which every share would draw its own"
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Findings:
    """What was found out about a module or a call that was run for several sizes of the batch.

    Attributes:
        results: for each size of the batch, the last being 1; None where it failed.
        states: of every tensor in a result.
        why_not: why it must not be split, whatever it gives.
        changed: the module's parameters and buffers that its forward changes, by the names that it has; of a
            call in glue, those that it is given, by their places among its tensors.
        reads: named alike, those whose values from before go into what it gives.
        draws_own: it draws from a generator that somebody holds (`own_draws.py`).
        kept: what its forward leaves for the next one where no checkpoint has it, in attributes, objects,
            classes and files.
        left: what it leaves for whoever looks, named alike.
    """

    results: tuple[Any, ...] | None
    states: tuple[State, ...]
    why_not: Mixed | None = None
    changed: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    draws_own: bool = False
    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def record(self) -> FindingsRecord:
        """As data. Raises NotPortableError: a result is of a type of the user's own."""
        return FindingsRecord(
            results=None if self.results is None else tuple(packed(result) for result in self.results),
            states=tuple(_state_record(state) for state in self.states),
            why_not=None if self.why_not is None else _state_record(self.why_not),
            changed=self.changed,
            reads=self.reads,
            draws_own=self.draws_own,
            kept=self.kept,
            left=self.left,
        )

    @classmethod
    def of(cls, record: FindingsRecord) -> Findings:
        """Make findings from their record; results are on the meta device."""
        why_not = None if record.why_not is None else _state(record.why_not)
        assert why_not is None or isinstance(why_not, Mixed)
        return cls(
            None
            if record.results is None
            else tuple(unpacked(result, _on_meta) for result in record.results),
            tuple(_state(state) for state in record.states),
            why_not,
            record.changed,
            record.reads,
            record.draws_own,
            record.kept,
            record.left,
        )


def _state_record(state: State) -> StateRecord:
    return StateRecord(kind=type(state).__name__, attributes=asdict(state))


def _state(record: StateRecord) -> State:
    made: State = _STATES[record.kind](**record.attributes)
    return made


def _on_meta(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def examine(
    run: Callable[..., Any],
    inputs: Sequence[Inputs],
    states: Sequence[State],
    sizes: Sequence[int],
    observer: Observer,
    module: nn.Module | None = None,
    held: Sequence[int] = (),
) -> Findings:
    """Run it for every size, and follow the samples through it.

    Args:
        inputs: arguments for each size, on the meta device; the last size is 1.
        states: of every tensor in the arguments, in order.
        module: whose forward it is, if any.
        held: of the arguments' tensors, in order, those that are parameters or buffers.
    """
    with _meta_parameters(module) as parameters:
        watched = {**parameters, **_given(inputs[0], held)}
        findings = _examine(run, inputs, states, sizes, watched, module)
    if findings.results is not None:
        return findings
    # The meta device is quick, but not all can run on it (constants that are elsewhere): then as on a CPU.
    with observer.mode, failures_unlogged(), _fake_parameters(module, observer) as parameters:
        faked = pytree.tree_map(lambda item: empty_like(item, "cpu"), list(inputs))
        watched = {**parameters, **_given(faked[0], held)}
        findings = _examine(run, faked, states, sizes, watched, module)
    if findings.results is None:
        seen = None if module is None else observer.left.get(observer.kinds.behaviour(module))
        if seen is None:
            return findings
        return replace(findings, changed=seen.changed, kept=seen.kept, left=seen.left)
    results = pytree.tree_map(lambda item: empty_like(item, "meta"), findings.results)
    return replace(findings, results=results)


def _examine(
    run: Callable[..., Any],
    inputs: Sequence[Inputs],
    states: Sequence[State],
    sizes: Sequence[int],
    watched: Mapping[int, str],
    module: nn.Module | None,
) -> Findings:
    draws = OwnDraws(module)
    try:
        return _examine_with(draws, run, inputs, states, sizes, watched, module)
    finally:
        draws.finish()


@dataclass
class _Runs:
    """What code does that is run for one size of the batch after another.

    Attributes:
        results, tapes: for each size that it has run for.
        changes: what it has changed in the last run.
        carried: what a second run reads of what the first has left, or writes again.
        backwards: its backward passes, for all sizes but the last.
        normalised: for each size, what batch norms are given that sum over shares.
        is_other_again: whether it changes nothing that is seen, and a second run computes otherwise.
    """

    run: Callable[..., Any]
    module: nn.Module | None
    draws: OwnDraws
    results: list[Any] = field(default_factory=list)
    tapes: list[Tape] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)
    carried: list[Carried] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    normalised: list[list[Tensor]] = field(default_factory=list)
    is_other_again: bool = False

    def add(self, given: Inputs, size: int, *, is_last: bool) -> None:
        """Run the code for a size, which may fail as it pleases; its tape and its changes are there then."""
        tape, self.changes = Tape(), Changes()
        position = len(self.tapes)
        self.tapes.append(tape)
        with contextlib.ExitStack() as stack:
            self.normalised.append(stack.enter_context(by_fixed_statistics(self.module)))
            stack.enter_context(stack.enter_context(noting_outside_reads()).moved(position))
            result = _run_watched(self.run, given, tape, self.changes, self.draws, self.module, stack)
            self.results.append(result)
            if self.module is not None and position == 0:
                left = Left(self.module, tape, self.changes, tensors_in(leaves_of(given)))
                again = partial(self.run, *given[0], **given[1])
                self.carried = list(left.read_by(again))
                if not self.changes:
                    count = len(self.normalised[0])
                    self.is_other_again = computes_otherwise(again, tape, self.module, given)
                    del self.normalised[0][count:]  # of the second run
            if self.module is not None and not is_last:
                self.backwards.append(Backward.of(self.module, result, tape, size))


def _examine_with(
    draws: OwnDraws,
    run: Callable[..., Any],
    inputs: Sequence[Inputs],
    states: Sequence[State],
    sizes: Sequence[int],
    watched: Mapping[int, str],
    module: nn.Module | None,
) -> Findings:
    runs = _Runs(run, module, draws)
    for position, (given, size) in enumerate(zip(inputs, sizes, strict=True)):
        try:
            runs.add(given, size, is_last=position == len(sizes) - 1)
        except Exception as error:
            is_cut_short = position == 0
            changed = _changed(module, watched, runs.tapes, runs.changes, is_cut_short=is_cut_short)
            return Findings(None, (), _why_failed(error, size), changed, _may_read(module, watched))
    tapes, changes = runs.tapes, runs.changes
    counts, left = changes.buffers or changes.counted or changes.elsewhere, changes.left
    if module is not None and counts and is_no_matter(module, run, inputs):
        changes = Changes(tensors=changes.tensors)
    follower = Follower(tuple(sizes[:-1]), watched)
    tensors = [leaf for leaf in leaves_of(inputs[0]) if isinstance(leaf, Tensor)]
    for tensor, state in zip(tensors, states, strict=True):
        follower.give(tensor, state)
    why_mixed = follower.follow([tape.entries for tape in tapes[:-1]])
    result_states = _result_states(follower, runs, sizes)
    why_not = (
        _draws_the_same(draws)
        or why_mixed
        or (_kept(follower, changes) if module is not None else _changes_given(follower))
        or _carries(follower, runs.carried)
        or (Mixed(_OTHER_AGAIN) if runs.is_other_again else None)
        or _given_memory(module, watched)
        or _normalises_other(follower, runs.normalised[0])
        or why_coupled_backwards(follower, runs.backwards, tapes[0])
    )
    return Findings(
        tuple(runs.results),
        result_states,
        why_not,
        _changed(module, watched, tapes, changes),
        goes_into(runs.results[0], tapes[0], watched),
        draws.follows,
        tuple(dict.fromkeys((*changes.kept, *(item.name for item in runs.carried)))),
        left,
    )


def _why_failed(error: Exception, size: int) -> Mixed:
    """Why code must not be split that fails for a size of the batch."""
    text = str(error).strip().split("\n")[0]
    why = f"it fails for a batch of {size}: {type(error).__name__}: {text}"
    if reads_values(error):
        why = "it decides by the values of its batch, so that it runs as it is written"
    return Mixed(why, place_of_error(error))


def _run_watched(
    run: Callable[..., Any],
    given: Inputs,
    tape: Tape,
    changes: Changes,
    draws: OwnDraws,
    module: nn.Module | None,
    stack: contextlib.ExitStack,
) -> Any:
    """Run code with its operations on a tape, and tell in `changes` what it has changed of its module, which
    is put back at the end of the stack.
    """
    before = None if module is None else Before(module)
    if before is not None:
        stack.callback(before.restore)
    try:
        with Remembering(), tape, draws.seen(), Unread():
            return run(*given[0], **given[1])
    finally:
        if before is not None:
            before.compare(changes)
            written = lasting(tape)
            changes.within += before.written(lambda tensor: memory_of(tensor) in written)


def _draws_the_same(draws: OwnDraws) -> Mixed | None:
    """Say why every share would draw the same random numbers; None: it would not."""
    why = draws.why_same
    return None if why is None else Mixed(*why)


def _draws_for_all(follower: Follower, tape: Tape) -> bool:
    """Whether anything is drawn that is no row of a sample."""
    return any(
        isinstance(follower.state_of(tensor), Whole)
        for entry in tape.entries
        if torch.Tag.nondeterministic_seeded in entry.func.tags
        for tensor in tensors_in(entry.result)
    )


def _changed(
    module: nn.Module | None,
    watched: Mapping[int, str],
    tapes: Sequence[Tape],
    changes: Changes,
    *,
    is_cut_short: bool = False,
) -> tuple[str, ...]:
    """What was written to, replaced, or has other memory; whatever else the code does, and however far it
    came.
    """
    written = {
        memory_of(tensor)
        for tape in tapes
        for entry in tape.entries
        for tensor in written_by(entry.func, entry.args, entry.kwargs)
    }
    now = {} if module is None else _by_storage(module)
    changed = [name for storage, name in watched.items() if storage in written]
    others = [name for storage, name in now.items() if storage not in watched]
    if (changed or others) and module is not None and (is_cut_short or changes.counted or changes.elsewhere):
        # What it may move besides, behind where it stopped or in other steps than this one.
        others += [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return tuple(dict.fromkeys(changed + others + changes.buffers))


def _may_read(module: nn.Module | None, watched: Mapping[int, str]) -> tuple[str, ...]:
    """What code may read that was not followed to its end: all but running statistics."""
    unread = () if module is None else statistics_of(module)
    return tuple(name for name in watched.values() if name not in unread)


def _result_states(follower: Follower, runs: _Runs, sizes: Sequence[int]) -> tuple[State, ...]:
    """States of the results' tensors, which must have the sizes to be expected, for one sample too."""
    leaves = [[leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor)] for result in runs.results]
    if len({len(tensors) for tensors in leaves}) > 1:
        return (Mixed("it gives other results for another size of the batch"),) * len(leaves[0])
    states = tuple(_state_for(follower, tensors, sizes) for tensors in zip(*leaves, strict=True))
    if runs.module is None or not _draws_for_all(follower, runs.tapes[0]):
        return states
    return tuple(Mixed(_DRAWN_FOR_ALL) if isinstance(state, Whole) else state for state in states)


def _state_for(follower: Follower, tensors: Sequence[Tensor], sizes: Sequence[int]) -> State:
    """The state of one result, of which there is a tensor for each size."""
    if all(is_fixed(tensor) for tensor in tensors):
        return state_of_values(tensors, sizes)
    state = follower.state_of(tensors[0])
    try:
        check_shapes(state, [tuple(tensor.shape) for tensor in tensors], sizes)
    except MixesError as error:
        return Mixed(str(error))
    return state


def _normalises_other(follower: Follower, normalised: Sequence[Tensor]) -> Mixed | None:
    """Why statistics of what batch norms are given do not add up over shares."""
    if all(isinstance(follower.state_of(tensor), Batch | Mixed) for tensor in normalised):
        return None
    return Mixed("a batch norm of it takes what is no row for each sample")


def _kept(follower: Follower, changes: Changes) -> Mixed | None:
    """Why what it keeps from one call to the next forbids to split it."""
    for name, place in follower.written.items():
        return Mixed(f"its forward changes {name!r}, which every share would do by itself", place)
    for name in changes.buffers:
        return Mixed(f"its forward changes {name!r}, which every share would do by itself")
    for name in changes.counted:
        return Mixed(f"its forward changes self.{name}, which every share would do by itself")
    for name in changes.elsewhere:
        return Mixed(f"its forward changes {name}, which every share would do by itself")
    return None


def _changes_given(follower: Follower) -> Mixed | None:
    """Say why a call in glue is not split that changes what it is given."""
    for place in follower.written.values():
        return Mixed("it changes a parameter or buffer, which every share would do by itself", place)
    return None


def _carries(follower: Follower, carried: Sequence[Carried]) -> Mixed | None:
    """Why what a call leaves for the next one forbids to split it."""
    for item in carried:
        is_own = item.is_written or not isinstance(follower.state_of(item.tensor), Whole)
        of_what = "its own batch" if is_own else "parameters, or drawn"
        made = "written into with" if item.is_written else "made of"
        why = f"its forward reads {item.name}, which an earlier one has {made} {of_what}"
        return Mixed(why, item.place)
    return None


def _given_memory(module: nn.Module | None, watched: Mapping[int, str]) -> Mixed | None:
    """Why other memory for a parameter, which is no operation of torch (`teacher.data = ...`), forbids it."""
    now = {} if module is None else _by_storage(module)
    moved = next((name for storage, name in now.items() if storage not in watched), None)
    if moved is None:
        return None
    return Mixed(f"its forward changes {moved!r}, which every share would do by itself")


@contextlib.contextmanager
def _meta_parameters(module: nn.Module | None) -> Iterator[Mapping[int, str]]:
    """Work on the meta device, the module's parameters and buffers too; by storage, what each is called."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one kernel for a layer: the same, and nothing to see
    made: dict[int, Tensor] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = empty_like(tensor, "meta")
        return made[id(tensor)]

    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.enable_grad():
            if module is None:
                yield {}
                return
            with swapped_tensors(module, stand_in):
                yield _by_storage(module)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


@contextlib.contextmanager
def _fake_parameters(module: nn.Module | None, observer: Observer) -> Iterator[Mapping[int, str]]:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        if module is None:
            yield {}
            return
        with swapped_tensors(module, observer.fake):
            yield _by_storage(module)


def _given(inputs: Inputs, held: Sequence[int]) -> dict[int, str]:
    """By storage, the place of each of these tensors among all that are given."""
    tensors = [leaf for leaf in leaves_of(inputs) if isinstance(leaf, Tensor)]
    return {tensors[place].untyped_storage()._cdata: str(place) for place in held}


def _by_storage(module: nn.Module) -> dict[int, str]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {memory_of(tensor): name for name, tensor in named}


def empty_like(item: Any, device: str) -> Any:
    """A tensor without values like another."""
    if not isinstance(item, Tensor) or is_fixed(item):
        return item
    made = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=device)
    if isinstance(item, nn.Parameter):
        return nn.Parameter(made, item.requires_grad)
    return made.requires_grad_().clone() if item.requires_grad else made
