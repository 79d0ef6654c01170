"""Part of the proof: what each device's host does one after another, as the runtime goes through its actions.

That is its program with one difference: a sum starts while the backward pass before it still runs, with the
op that it names, and so ahead of what the program has between that pass and the sum. Where the pass is split
by tensor parallelism, or sums the statistics of batch norms, the sum comes between two of the collectives
that the pass takes. And a sum or gather that goes by nodes is two collectives, the second behind the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from spindle_cli.account.types import Purpose
from spindle_cli.program.types import COMPUTES, RECEIVES, Action, Kind, Program, Transfer

# A transfer's key; or the communicator of a collective, and which of its collectives it is.
Operation = int | tuple[int, int]
_Taker = tuple[int, Kind, int]  # a device, and a pass of its own


class Move(NamedTuple):
    """A wait, or a post, that action `step` of a device's program asks for.

    `waits_for`: what has to be through before the next move. `posts`: what is put behind all that the device
    has posted, over `communicator`, with its `members`.
    """

    step: int
    waits_for: tuple[Operation, ...] = ()
    posts: Operation | None = None
    communicator: int = 0
    members: tuple[int, ...] = ()


def place_of(action: Action) -> int:
    """The place of a SUM or UPDATE in the order of sums; what is summed with nobody comes first, with the
    losses.
    """
    return -1 if action.group is None else action.group


def early_ops(program: Program, device: int) -> dict[int, int]:
    """{step of a SUM: the op with whose backward it may start}. A sum starts with those behind it: one that
    may start earlier takes along all that the program has ahead of it behind the same pass.
    """
    ops_by_step: dict[int, int] = {}
    latest: int | None = None  # of the sums between here and the next pass
    for step, action in reversed(list(enumerate(program.actions[device]))):
        if action.kind is Kind.BACKWARD:
            latest = None
        elif action.kind is Kind.SUM and action.op is not None:
            latest = action.op if latest is None else max(latest, action.op)
            ops_by_step[step] = latest
    return ops_by_step


def summing_communicators(program: Program) -> dict[tuple[int, ...], int]:
    """What sums go over between passes, by its devices."""
    return {
        communicator.ranks: communicator.index
        for communicator in program.communicators
        if communicator.purpose in (Purpose.SUMS, Purpose.EVERYONE)
    }


class Moves:
    """The moves of every device of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._takes: dict[_Taker, list[Operation]] = {}
        self._inside: dict[int, dict[int, list[tuple[int, int]]]] = {}  # device -> B's step -> (SUM's, op)
        self._breaks: dict[int, set[int]] = {}  # ops of a slice with which any device starts a sum
        self._summing = summing_communicators(program)
        for device, actions in program.actions.items():
            for action in actions:
                if action.kind in RECEIVES and action.transfer is not None:
                    taker = (device, *_taker(action.transfer))
                    self._takes.setdefault(taker, []).append(action.transfer.key)
            self._inside[device] = self._sums_inside(device)

    def of(self, device: int) -> list[Move]:
        """Return a device's moves, in order."""
        return list(self._write(device))

    def _sums_inside(self, device: int) -> dict[int, list[tuple[int, int]]]:
        """By the step of each backward pass, the sums that start in it: their steps and ops."""
        sums_by_pass: dict[int, list[tuple[int, int]]] = {}
        early = early_ops(self._program, device)
        backward: int | None = None
        for step, action in enumerate(self._program.actions[device]):
            if action.kind is Kind.BACKWARD:
                backward = step
            elif action.kind is Kind.SUM and backward is not None:
                index = self._program.actions[device][backward].slice_index
                assert index is not None, "a B has a slice"
                op = early.get(step)
                if op is not None and op > self._program.slices[index].ops[0]:
                    sums_by_pass.setdefault(backward, []).append((step, op))
                    self._breaks.setdefault(index, set()).add(op)
        return sums_by_pass

    def _write(self, device: int) -> Iterator[Move]:
        actions = self._program.actions[device]
        numbers: Counter[int] = Counter()  # collectives so far, by communicator
        posted: list[Operation] = []
        before_updates: dict[int, Operation] = {}  # sums by their places; that of the losses first
        started = {sum_step for sums in self._inside[device].values() for sum_step, _ in sums}

        def post(step: int, action: Action) -> Iterator[Move]:
            for communicator in self._over(device, action):
                move = _post(self._program, step, action, communicator, numbers)
                assert move.posts is not None, "it is a post"
                posted.append(move.posts)
                if action.kind in (Kind.LOSSES, Kind.SUM):
                    before_updates[place_of(action)] = move.posts
                yield move

        for step, action in enumerate(actions):
            if action.kind in COMPUTES:
                yield from self._pass(device, step, numbers, post)
                continue
            if action.kind is Kind.UPDATE:
                waits = (sum_ for place, sum_ in before_updates.items() if place <= place_of(action))
                yield Move(step, tuple(waits))
            if action.kind in (Kind.NORM, Kind.STEP):
                yield Move(step, tuple(posted))
            if action.communicator is not None and step not in started:
                yield from post(step, action)

    def _pass(
        self, device: int, step: int, numbers: Counter[int], post: Callable[[int, Action], Iterator[Move]]
    ) -> Iterator[Move]:
        """The moves of a pass: it waits for what it takes, and for what it gives up to have left; a backward
        pass is broken at each op with which a sum starts on any of its devices, and posts its own there.
        """
        actions = self._program.actions[device]
        action = actions[step]
        assert action.slice_index is not None, "an F or B has a slice"
        yield Move(step, (*action.left, *self._takes.get((device, action.kind, action.slice_index), ())))
        breaks = self._breaks.get(action.slice_index, ()) if action.kind is Kind.BACKWARD else ()
        for op in sorted(breaks, reverse=True):
            yield from self._inside_of(step, action, numbers)
            for sum_step, start in self._inside[device].get(step, ()):
                if start == op:
                    yield from post(sum_step, actions[sum_step])
        yield from self._inside_of(step, action, numbers)

    def _over(self, device: int, action: Action) -> tuple[int, ...]:
        """The communicators of what a post starts, one after another."""
        assert action.communicator is not None, "asked of what communicates"
        group = None if action.group is None else self._program.groups[action.group]
        if group is None or not group.nodes:
            return (action.communicator,)
        inside, across = (
            next(self._summing[part] for part in parts if device in part)
            for parts in (group.nodes, group.across)
        )
        if action.kind is Kind.SUM:
            return (action.communicator,) if group.sums_whole else (inside, across)
        return (action.communicator,) if group.gathers_whole else (across, inside)

    def _inside_of(self, step: int, action: Action, numbers: Counter[int]) -> Iterator[Move]:
        """What a stretch of a pass sums and gathers inside: over each of its communicators, and waits."""
        for communicator in (action.communicator, *action.shards):
            if communicator is not None:
                move = _collective(self._program, step, communicator, numbers)
                assert move.posts is not None, "it is a post"
                yield move
                yield Move(step, (move.posts,))


def _post(program: Program, step: int, action: Action, communicator: int, numbers: Counter[int]) -> Move:
    if action.transfer is not None:
        ends = (action.transfer.source, action.transfer.destination)
        return Move(step, (), action.transfer.key, communicator, ends)
    return _collective(program, step, communicator, numbers)


def _collective(program: Program, step: int, communicator: int, numbers: Counter[int]) -> Move:
    number = numbers[communicator]
    numbers[communicator] += 1
    return Move(step, (), (communicator, number), communicator, program.communicators[communicator].ranks)


def _taker(transfer: Transfer) -> tuple[Kind, int]:
    """The pass that takes what is transferred."""
    if transfer.is_gradient:
        return Kind.BACKWARD, transfer.producer
    return Kind.FORWARD, transfer.consumer
