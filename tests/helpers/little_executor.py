"""Runs the programs of all ranks in one place, by the rules of a communication library, and keeps account of
what each rank has: a second opinion on what `prove` says, which shares nothing with it.

A rank is a generator that does what the runtime does and yields each operation that it waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from spindle_cli.account import step_end
from spindle_cli.account.activations import Layout
from spindle_cli.program.types import ONCE_A_STEP, Action, Kind, Program, Transfer


class Rules(Enum):
    """How posted operations get their turn; sends wait for their receivers under all of them."""

    NCCL = auto()  # one after another on each communicator of a rank
    ONE_ROOM = auto()  # NCCL on devices that have room for one operation at a time
    GLOO = auto()  # as NCCL for collectives; each message by itself, found by its tag
    GLOO_HOLDING_BACK = auto()  # every other rank starts a gradient sum when the one before is through


class FailsError(Exception):
    """Ranks wait for ever, or take one thing for another, or use what they do not have."""


@dataclass(eq=False)
class _Post:
    """`content`: what all that take part have to say alike."""

    rank: int
    communicator: int
    content: object
    members: Sequence[int]
    done: bool = False


def execute(program: Program, rules: Rules, batches: int = 1) -> None:
    """One step of all ranks, of several batches: all but the last leave out what is done once a step, and
    each rank waits at a batch's end for what it has posted, not for other ranks.

    Raises:
        FailsError: it does not come to its end, or another model would be trained.
    """
    library = _Library(rules)
    hosts = {device: _run_step(program, device, library, batches) for device in program.actions}
    awaited: dict[int, _Post | None] = dict.fromkeys(hosts)
    moved = True
    while moved:
        moved = library.carry()
        for device, host in list(hosts.items()):
            post = awaited[device]
            while post is None or post.done:
                moved = True
                try:
                    post = awaited[device] = next(host)
                except StopIteration:
                    del hosts[device]
                    break
    if hosts:
        raise FailsError(f"ranks {sorted(hosts)} wait for ever")


def _run_step(program: Program, device: int, library: _Library, batches: int) -> Iterator[_Post]:
    for _ in range(batches - 1):
        yield from _Rank(program, device, library, ends_step=False).run()
    yield from _Rank(program, device, library).run()


class _Library:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._queues: dict[object, deque[_Post]] = {}

    def post(self, post: _Post) -> _Post:
        self._queues.setdefault(self._queue(post, post.rank), deque()).append(post)
        return post

    def carry(self) -> bool:
        """Run what has its turn at all its members."""
        carried = False
        for queue in list(self._queues.values()):
            while queue and self._run(queue[0]):
                carried = True
        return carried

    def _queue(self, post: _Post, rank: int) -> object:
        if self.rules is Rules.ONE_ROOM:
            return rank
        tagged = isinstance(post.content, Transfer) and self.rules is not Rules.NCCL
        return rank, post.communicator, post.content if tagged else None

    def _run(self, post: _Post) -> bool:
        queues = [self._queues.get(self._queue(post, rank)) for rank in post.members]
        heads = [queue[0] for queue in queues if queue]
        if len(heads) < len(post.members):
            return False
        if any((h.communicator, set(h.members)) != (post.communicator, set(post.members)) for h in heads):
            return False
        if any(head.content != post.content for head in heads):
            raise FailsError(f"{[(head.rank, head.content) for head in heads]} are taken for one another")
        for queue in queues:
            assert queue
            queue.popleft().done = True
        return True


class _Rank:
    def __init__(self, program: Program, device: int, library: _Library, *, ends_step: bool = True) -> None:
        self.device = device
        self._program, self._library = program, library
        self._ends_step = ends_step
        self._actions = tuple(
            action for action in program.actions[device] if ends_step or action.kind not in ONCE_A_STEP
        )
        self._slices = [index for index, each in enumerate(program.slices) if device in each.devices]
        self._groups = [each for each in program.groups if device in each.devices and len(each.devices) > 1]
        self._made: set[tuple[Kind, int]] = set()
        self._backward: tuple[int, int] | None = None  # the slice that runs, and the op that it has come to
        self._receiving: dict[tuple[Kind, int], list[tuple[Transfer, _Post]]] = {}
        self._posted: list[_Post] = []
        self._sent: dict[int, _Post] = {}
        self._waiting: deque[Action] = deque()  # sums behind the pass that runs
        self._held_back: deque[Action] = deque()  # sums, and flags behind them
        self._sums: list[_Post] = []

    def run(self) -> Iterator[_Post]:
        for step, action in enumerate(self._actions):
            match action.kind:
                case Kind.FORWARD | Kind.BACKWARD:
                    yield from self._compute(step, action)
                case Kind.SUM | Kind.FLAGS:
                    self._reach(action)
                case Kind.UPDATE:
                    yield from self._update(step, action)
                case Kind.NORM | Kind.STEP:
                    yield from self._finish()
                    if action.kind is Kind.NORM:
                        yield self._post(action)
                case _:
                    self._check_source(action)
                    self._post(action)
        yield from self._posted
        self._check_whole()

    def _compute(self, step: int, action: Action) -> Iterator[_Post]:
        assert action.slice_index is not None
        if not self._sent.keys() >= set(action.left):
            raise FailsError(f"rank {self.device} gives up what it has not sent")
        for key in action.left:
            yield self._sent.pop(key)
        taking = self._receiving.pop((action.kind, action.slice_index), [])
        for _, post in taking:
            yield post
        self._check_rows(action.kind, action.slice_index, [transfer for transfer, _ in taking])
        if action.kind is Kind.BACKWARD:
            self._waiting = deque(self._sums_behind(step))
        first, last = self._program.slices[action.slice_index].ops
        for op in range(last - 1, first - 1, -1):
            if action.communicator is not None:
                yield self._post(action)
            if action.kind is Kind.FORWARD:
                continue
            self._backward = (action.slice_index, op)
            early = [each for each in self._waiting if each.op is not None and each.op >= op > first]
            while early and early[-1] in self._waiting:
                self._start(self._waiting.popleft())
        self._backward = None
        self._made.add((action.kind, action.slice_index))

    def _sums_behind(self, step: int) -> Iterator[Action]:
        for action in self._actions[step + 1 :]:
            if action.kind is Kind.BACKWARD:
                return
            if action.kind is Kind.SUM:
                yield action

    def _reach(self, action: Action) -> None:
        """Start a sum, with those ahead of it, unless that has been done; or flags. A sum to which the rank
        adds nothing may come before all of its backward passes, and has no op.
        """
        before = self._actions[: self._actions.index(action)]
        ran = any(each.kind is Kind.BACKWARD for each in before)
        if action.kind is Kind.FLAGS:
            self._start(action)
        elif ran != (action.op is not None):
            raise FailsError("a sum with an op before any backward pass, or without one behind it")
        elif not ran:
            self._start(action)
        while action in self._waiting:
            self._start(self._waiting.popleft())

    def _start(self, action: Action) -> None:
        self._check_source(action)
        self._held_back.append(action)
        self._let_go()

    def _let_go(self) -> None:
        holds = self._library.rules is Rules.GLOO_HOLDING_BACK and self.device % 2 == 0
        while self._held_back and not (holds and self._sums and not self._sums[-1].done):
            self._sums.append(self._post(self._held_back.popleft()))

    def _update(self, step: int, action: Action) -> Iterator[_Post]:
        """Wait for the losses and for the sums up to a group; nothing but updates may be left to do then."""
        if any(each.kind not in (Kind.UPDATE, Kind.STEP) for each in self._actions[step:]):
            raise FailsError(f"rank {self.device} updates before it has run and posted everything")
        last = -1 if action.group is None else action.group
        while any(each.group is not None and each.group <= last for each in self._held_back):
            yield self._sums[-1]
            self._let_go()
        for post in self._posted:
            kind, _, group = post.content if isinstance(post.content, tuple) else (None, None, None)
            if kind is Kind.LOSSES or (kind is Kind.SUM and group <= last):
                yield post

    def _parts(self) -> list[int]:
        """The groups behind which a part ends, as docs/program.md says, but for the last one; -1: what is
        summed with nobody.
        """
        settings = self._program.settings
        if not settings.by_parts or settings.sharded or settings.clips or settings.scales:
            return []
        alone = sum(each.num_bytes for each in self._program.groups if each.devices == (self.device,))
        sizes = [(-1, alone), *((each.index, each.num_bytes) for each in self._groups if each.is_trained)]
        total = sum(size for _, size in sizes)
        least = max(step_end.PART_BYTES, total / step_end.MOST_PARTS)
        found, gone, taken = [], 0, 0
        for index, size in sizes:
            taken += size
            if taken >= least and total - gone - taken >= least:
                found.append(index)
                gone, taken = gone + taken, 0
        return found

    def _finish(self) -> Iterator[_Post]:
        while self._held_back:
            yield self._sums[-1]
            self._let_go()
        yield from self._posted

    def _post(self, action: Action) -> _Post:
        assert action.communicator is not None
        transfer = action.transfer
        content = transfer or (action.kind, action.slice_index, action.group)
        ranks = self._program.communicators[action.communicator].ranks
        members = (transfer.source, transfer.destination) if transfer else ranks
        post = self._library.post(_Post(self.device, action.communicator, content, members))
        self._posted.append(post)
        if transfer and transfer.source == self.device:
            self._sent[transfer.key] = post
        if transfer and transfer.destination == self.device:
            taker = transfer.producer if transfer.is_gradient else transfer.consumer
            kind = Kind.BACKWARD if transfer.is_gradient else Kind.FORWARD
            self._receiving.setdefault((kind, taker), []).append((transfer, post))
        return post

    def _check_source(self, action: Action) -> None:
        """What is sent, summed or told is known by then."""
        transfer = action.transfer
        needed: set[tuple[Kind, int]] = set()
        if action.kind is Kind.SEND and transfer:
            needed = {(Kind.FORWARD, transfer.producer)}
        elif action.kind is Kind.SEND_GRAD and transfer:
            needed = {(Kind.BACKWARD, transfer.consumer)}
        elif action.kind is Kind.LOSSES:
            needed = {(Kind.FORWARD, index) for index in self._slices}
        else:
            for group in self._groups:
                told = action.kind is Kind.FLAGS and self._over(group.devices, action.communicator)
                if told or group.index == action.group:
                    users = zip(group.slices, group.first_ops, strict=True)
                    needed |= {(Kind.BACKWARD, index) for index, op in users if not self._through(index, op)}
        if not needed <= self._made:
            raise FailsError(f"{action} of rank {self.device} needs {needed - self._made}")

    def _through(self, index: int, op: int) -> bool:
        """Whether nothing is left to do backward from an op of a slice on, if it is this rank's at all."""
        running = self._backward is not None and self._backward[0] == index and self._backward[1] <= op
        return running or index not in self._slices

    def _over(self, devices: tuple[int, ...], communicator: int | None) -> bool:
        assert communicator is not None
        return self._program.communicators[communicator].ranks == devices

    def _check_rows(self, kind: Kind, piece: int, taken: Sequence[Transfer]) -> None:
        """A pass has each of its samples once from each slice that it takes from."""
        layouts, forward = self._program.layouts, kind is Kind.FORWARD
        for edge in self._program.edges:
            if piece != (edge.consumer if forward else edge.producer):
                continue
            other = edge.producer if forward else edge.consumer
            has = [
                row
                for each in taken
                if (each.producer, each.consumer) == (edge.producer, edge.consumer)
                for row in range(each.first, each.last)
            ]
            needed = _rows(layouts[piece], self.device)
            own = _rows(layouts[other], self.device) if (kind, other) in self._made else range(0)
            if sorted([*has, *(row for row in own if row in needed)]) != list(needed):
                raise FailsError(f"{kind} {piece} of rank {self.device} has rows {has} of {other}")

    def _check_whole(self) -> None:
        """A step has done all that there is to do."""
        wanted = {(kind, index) for kind in (Kind.FORWARD, Kind.BACKWARD) for index in self._slices}
        if not self._ends_step:
            if self._made != wanted or self._receiving:
                raise FailsError(f"rank {self.device} leaves something out of a batch")
            return
        settings = self._program.settings
        updates = [-1 if a.group is None else a.group for a in self._actions if a.kind is Kind.UPDATE]
        if updates != self._parts():
            raise FailsError(f"rank {self.device} updates {updates} by themselves, not {self._parts()}")
        done = sorted(
            (str(a.kind), a.group or 0)
            for a in self._actions
            if a.transfer is None and a.slice_index is None and a.kind is not Kind.UPDATE
        )
        summing = {group.devices for group in self._groups}
        kinds = [(Kind.LOSSES, 1), (Kind.STEP, 1), (Kind.NORM, int(settings.clips or settings.scales))]
        kinds += [(Kind.FLAGS, len(summing) if settings.sharded else 0)]
        expected = [(str(kind), 0) for kind, times in kinds for _ in range(times)]
        expected += [(str(Kind.SUM), group.index) for group in self._groups]
        expected += [(str(Kind.GATHER), group.index) for group in self._groups if settings.sharded]
        if self._made != wanted or done != sorted(expected) or self._receiving:
            raise FailsError(f"rank {self.device} leaves something out, or does it twice")


def _rows(layout: Layout, device: int) -> range:
    return range(*layout.rows_of(device)) if device in layout.share_of else range(0)
