"""Part of the proof: run all devices to their end, without times, by the rules of the strictest library.

A post never waits. What a device posts waits in a queue, first in first out: an operation runs when it is the
first of the queues of all its members, a send's receiver included. A pass waits for the transfers that it
takes, and for the sums that tensor parallelism takes inside of it; NORM and STEP for all that the device has
posted. At the end nothing may be left in a queue, so that the next iteration finds them empty.

A device has one queue for all its communicators. NCCL has one for each, but what is started in different
orders on two devices may need the room that the other one holds; gloo has none. A program that comes to its
end here does so under both, and whatever is batched. One run is enough: nothing that an operation waits for
depends on timing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from spindle_cli.program.proof.faults import fault
from spindle_cli.program.types import COMPUTES, RECEIVES, Action, Kind, Program, Transfer

# A transfer's key; or the communicator of a collective, and which of its collectives it is.
_Operation = int | tuple[int, int]
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
    """All devices, each at a step of its program, with what it has posted.

    `per_communicator`: a device has a queue for each communicator, not one for all.
    """

    def __init__(self, program: Program, *, per_communicator: bool = False) -> None:
        self._program = program
        self._per_communicator = per_communicator
        self._step = dict.fromkeys(program.actions, 0)
        self._queues: dict[_Queue, deque[_Operation]] = {}
        self._heads: Counter[_Operation] = Counter()  # in how many queues an operation is the first
        self._done: set[_Operation] = set()
        self._members: dict[_Operation, tuple[_Queue, ...]] = {}  # the queues that it has to be the first of
        self._waiting: dict[_Operation, list[int]] = {}  # devices
        self._collectives: Counter[_Queue] = Counter()  # posted so far, by device and communicator
        self._posted: dict[int, list[_Operation]] = {device: [] for device in program.actions}
        self._inside: dict[int, _Operation] = {}  # the sums of the pass that a device runs
        self._takes: dict[tuple[int, Kind, int], list[int]] = {}
        for device, actions in program.actions.items():
            for action in actions:
                if action.kind in RECEIVES and action.transfer is not None:
                    taker = (device, *_taker(action.transfer))
                    self._takes.setdefault(taker, []).append(action.transfer.key)

    def run(self) -> list[tuple[int, int]]:
        """Run until nothing goes on; where each device stands that is not through, or has left something
        behind.
        """
        ready = deque(self._program.actions)
        while ready:
            ready.extend(self._advance(ready.popleft()))
        behind = {device for (device, _), queue in self._queues.items() if queue}
        return [
            (device, min(self._step[device], len(actions) - 1))
            for device, actions in self._program.actions.items()
            if self._step[device] < len(actions) or device in behind
        ]

    def _advance(self, device: int) -> list[int]:
        """Run a device until it waits; the devices that can go on because of it."""
        released: list[int] = []
        actions = self._program.actions[device]
        while self._step[device] < len(actions):
            action = actions[self._step[device]]
            if device in self._inside:
                if self._waits(device, self._inside[device]):
                    break
                del self._inside[device]
            else:
                if any(self._waits(device, operation) for operation in self._needed(device, action)):
                    break
                if action.communicator is not None:
                    operation = self._post(device, action)
                    released.extend(self._carry(operation))
                    if action.kind in COMPUTES:
                        self._inside[device] = operation
                        continue
            self._step[device] += 1
        return released

    def _needed(self, device: int, action: Action) -> Sequence[_Operation]:
        """What has to be through before a device goes on with an action."""
        if action.kind in COMPUTES:
            assert action.piece is not None, "an F or B has a slice"
            return self._takes.get((device, action.kind, action.piece), ())
        if action.kind in (Kind.NORM, Kind.STEP):
            return self._posted[device]
        return ()

    def _waits(self, device: int, operation: _Operation) -> bool:
        if operation in self._done:
            return False
        self._waiting.setdefault(operation, []).append(device)
        return True

    def _post(self, device: int, action: Action) -> _Operation:
        """Put what an action communicates behind all that its queue holds."""
        communicator = action.communicator
        assert communicator is not None, "asked of what communicates"
        ranks = self._program.communicators[communicator].ranks
        operation: _Operation = (communicator, self._collectives[device, communicator])
        if action.transfer is not None:
            operation, ranks = action.transfer.key, (action.transfer.source, action.transfer.destination)
        else:
            self._collectives[device, communicator] += 1
        lane = communicator if self._per_communicator else 0
        self._members[operation] = tuple((rank, lane) for rank in ranks)
        queue = self._queues.setdefault((device, lane), deque())
        queue.append(operation)
        self._posted[device].append(operation)
        if len(queue) == 1:
            self._heads[operation] += 1
        return operation

    def _carry(self, operation: _Operation) -> list[int]:
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


def _taker(transfer: Transfer) -> tuple[Kind, int]:
    """The pass that takes what is transferred."""
    if transfer.is_gradient:
        return Kind.BACKWARD, transfer.producer
    return Kind.FORWARD, transfer.consumer
