"""Part of the proof: run all devices to their end, without times, by the rules of the strictest library.

A post never waits. What a device posts waits in a queue, first in first out: an operation runs when it is the
first of the queues of all its members, a send's receiver included. A pass waits for the transfers that it
takes, and for the sums inside of it, of tensor parallelism or of batch norms; UPDATE for the losses and the
sums of what it steps; NORM and STEP for all that the device has posted. At the end nothing may be left in a
queue, so that the next iteration finds them empty.

A device has one queue for all its communicators. NCCL has one for each, but what is started in different
orders on two devices may need the room that the other one holds; gloo has none. A program that comes to its
end here does so under both, and whatever is batched. One run is enough: nothing that an operation waits for
depends on timing. One batch is enough for a step of several: the others leave out what a step does once, on
all devices alike, so that each operation waits for no more than here; and of two batches every device posts
one before the other.
"""

from __future__ import annotations

from collections import Counter, deque

from spindle_cli.program.proof.faults import fault
from spindle_cli.program.proof.proof_moves import Move, Moves, Operation
from spindle_cli.program.types import Program

_Queue = tuple[int, int]  # a device and a communicator, 0 where all share one


def check_run(program: Program) -> None:
    """Run to the end.

    Raises:
        ProgramError: some devices wait for ever; shows where each one stands.
    """
    machine = Machine(program)
    places = machine.run()
    if not places:
        return
    if not Machine(program, per_communicator=True).run():
        message = "devices start what goes over different communicators in different orders"
        raise fault(program, message, *places)
    waiting = f"{len(places)} of {len(program.actions)} devices wait for ever"
    raise fault(program, waiting, *places)


class Machine:
    """All devices, each at one of its moves, with what it has posted.

    `per_communicator`: a device has a queue for each communicator, not one for all.
    """

    def __init__(self, program: Program, *, per_communicator: bool = False) -> None:
        self._program = program
        self._per_communicator = per_communicator
        moves = Moves(program)
        self._moves = {device: moves.of(device) for device in program.actions}
        self._at = dict.fromkeys(program.actions, 0)
        self._queues: dict[_Queue, deque[Operation]] = {}
        self._heads: Counter[Operation] = Counter()  # in how many queues an operation is the first
        self._done: set[Operation] = set()
        self._members: dict[Operation, tuple[_Queue, ...]] = {}  # the queues that it has to be the first of
        self._waiting: dict[Operation, list[int]] = {}  # devices

    def run(self) -> list[tuple[int, int]]:
        """Run until nothing goes on; where each device stands that is not through, or has left something
        behind: its step.
        """
        ready = deque(self._program.actions)
        while ready:
            ready.extend(self._advance(ready.popleft()))
        behind = {device for (device, _), queue in self._queues.items() if queue}
        return [
            (device, moves[self._at[device]].step if self._at[device] < len(moves) else moves[-1].step)
            for device, moves in self._moves.items()
            if self._at[device] < len(moves) or device in behind
        ]

    def _advance(self, device: int) -> list[int]:
        """Run a device until it waits; the devices that can go on because of it."""
        released: list[int] = []
        moves = self._moves[device]
        while self._at[device] < len(moves):
            move = moves[self._at[device]]
            if any(self._waits(device, operation) for operation in move.waits_for):
                break
            if move.posts is not None:
                self._post(device, move, move.posts)
                released.extend(self._carry(move.posts))
            self._at[device] += 1
        return released

    def _waits(self, device: int, operation: Operation) -> bool:
        if operation in self._done:
            return False
        self._waiting.setdefault(operation, []).append(device)
        return True

    def _post(self, device: int, move: Move, operation: Operation) -> None:
        """Put an operation behind all that its queue holds."""
        lane = move.communicator if self._per_communicator else 0
        self._members[operation] = tuple((rank, lane) for rank in move.members)
        queue = self._queues.setdefault((device, lane), deque())
        queue.append(operation)
        if len(queue) == 1:
            self._heads[operation] += 1

    def _carry(self, operation: Operation) -> list[int]:
        """Run an operation if it can, and all that can then; the devices that have waited for any."""
        released: list[int] = []
        candidates = [operation]
        while candidates:
            operation = candidates.pop()
            members = self._members[operation]
            if operation in self._done or self._heads[operation] < len(members):
                continue
            self._done.add(operation)
            released.extend(self._waiting.pop(operation, ()))
            for member in members:
                queue = self._queues[member]
                queue.popleft()
                if queue:
                    self._heads[queue[0]] += 1
                    candidates.append(queue[0])
        return released
