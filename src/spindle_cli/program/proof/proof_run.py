"""Part of the proof: run all devices to their end, without times.

A post never waits. A compute waits for the transfers that it takes, and where tensor parallelism splits it
also for the other devices of its share, as they run it together. A transfer is carried when both its ends are
posted and it is the next of its pair of devices; a pair carries one after the other, in both directions
together, as one communicator does.

One run is enough: posts do not wait, and what a compute or a transfer waits for does not depend on timing, so
a run comes to its end for every timing or for none.
"""

from __future__ import annotations

from collections import defaultdict, deque

from spindle_cli.program.proof.faults import fault
from spindle_cli.program.types import Action, Kind, Program, Transfer

_RECEIVES = (Kind.RECV, Kind.RECV_GRAD)
_COMPUTES = (Kind.FORWARD, Kind.BACKWARD)


def check_run(program: Program) -> None:
    """Run to the end.

    Raises:
        ProgramError: some devices wait for ever; shows where each one stands.
    """
    machine = Machine(program)
    ready = deque(program.actions)
    while ready:
        ready.extend(machine.advance(ready.popleft()))
    places = [
        (device, machine.step[device])
        for device, actions in program.actions.items()
        if machine.step[device] < len(actions)
    ]
    if places:
        raise fault(program, f"{len(places)} of {len(program.actions)} devices wait for ever", *places)


class Machine:
    """All devices, each at a step of its program, and the transfers carried so far."""

    def __init__(self, program: Program) -> None:
        self.actions = program.actions
        self.step = dict.fromkeys(program.actions, 0)
        self._carried: set[int] = set()  # keys
        self._takes: dict[tuple[int, Kind, int], list[int]] = defaultdict(
            list
        )  # keys that a compute waits for
        self._waiting: dict[int, int] = {}  # key -> the device whose compute waits for it
        self._posted: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # keys, by (device, peer)
        self._layouts = program.layouts
        self._arrived: dict[tuple[Kind, int, int], set[int]] = defaultdict(set)  # by compute and share
        for device, actions in program.actions.items():
            for action in actions:
                if action.kind in _RECEIVES and action.transfer is not None:
                    self._takes[_taker(device, action.transfer)].append(action.transfer.key)

    def advance(self, device: int) -> list[int]:
        """Run a device until it waits; returns the devices that can go on because of it."""
        released: list[int] = []
        actions = self.actions[device]
        while self.step[device] < len(actions):
            action = actions[self.step[device]]
            if action.transfer is not None:
                released.extend(self._post(device, action.transfer))
            elif action.kind in _COMPUTES:
                if self._waits(device, action):
                    break
                partners = self._meet(device, action)
                if partners is None:
                    break
                released.extend(partners)
            self.step[device] += 1
        return released

    def _waits(self, device: int, action: Action) -> bool:
        assert action.piece is not None, "an F or B has a slice"
        for key in self._takes.get((device, action.kind, action.piece), ()):
            if key not in self._carried:
                self._waiting[key] = device
                return True
        return False

    def _meet(self, device: int, action: Action) -> list[int] | None:
        """The other devices of a split compute's share, which now go on; None: some are not there yet."""
        assert action.piece is not None, "an F or B has a slice"
        layout = self._layouts[action.piece]
        if layout.tp == 1:
            return []
        share = layout.share_of[device]
        arrived = self._arrived[action.kind, action.piece, share]
        arrived.add(device)
        if len(arrived) < layout.tp:
            return None
        return [other for other in layout.holders(share) if other != device]

    def _post(self, device: int, transfer: Transfer) -> list[int]:
        """Post one end, and carry what now has both ends at the head of the pair."""
        peer = transfer.destination if transfer.source == device else transfer.source
        mine, theirs = self._posted[device, peer], self._posted[peer, device]
        mine.append(transfer.key)
        released: list[int] = []
        while mine and theirs and mine[0] == theirs[0]:
            key = mine.popleft()
            theirs.popleft()
            self._carried.add(key)
            if key in self._waiting:
                released.append(self._waiting.pop(key))
        return released


def _taker(device: int, transfer: Transfer) -> tuple[int, Kind, int]:
    if transfer.is_gradient:
        return device, Kind.BACKWARD, transfer.producer
    return device, Kind.FORWARD, transfer.consumer
