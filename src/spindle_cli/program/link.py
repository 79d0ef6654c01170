"""Derive every device's program from a plan.

1. edges: which slice takes whose output; one order of all slices           (account/edges.py)
2. transfers: the chunks that cross devices, forward and back, in one order  (transfers.py)
3. groups: parameters summed together, in the order they are complete        (account/groups.py)
4. actions: each device's own slices, with its posts and sums between them   (here)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from spindle_cli.account.edges import execution_order, slice_edges, slice_layouts
from spindle_cli.account.groups import ParameterUses, parameter_groups, planned_parameters
from spindle_cli.account.types import ParameterGroup
from spindle_cli.plan.types import Plan
from spindle_cli.program.transfers import plan_transfers
from spindle_cli.program.types import Action, Kind, Program, Transfer
from spindle_cli.units import KIB

Compute = tuple[Kind, int]  # F or B, and the slice

# Receives up to this many bytes together are posted as early as they can be: they cost next to no memory, and
# what is posted before its sender sends arrives in one message where gloo would else need three.
EARLY_BYTES = 64 * KIB


def link(plan: Plan, parameters: ParameterUses | None = None) -> Program:
    """Every device's actions for one iteration.

    Args:
        plan: a plan that passes `check`.
        parameters: the trained parameters of each op, from who knows them exactly; every rank must give the
            same. Without them, what the plan says (`planned_parameters`).
    """
    layouts = slice_layouts(plan)
    edges = slice_edges(plan)
    order = execution_order(plan, edges)
    transfers = plan_transfers(plan, layouts, order, edges)
    uses = planned_parameters(plan.metaops) if parameters is None else parameters
    groups = parameter_groups(plan.slices, order, uses, plan.cluster)

    drafts = {device: _Draft(device) for device in range(plan.cluster.num_devices)}
    for index in order:
        for device in plan.slices[index].devices:
            drafts[device].computes.append((Kind.FORWARD, index))
    for index in reversed(order):
        for device in plan.slices[index].devices:
            drafts[device].computes.append((Kind.BACKWARD, index))
    for transfer in transfers:
        drafts[transfer.source].add(transfer)
        drafts[transfer.destination].add(transfer)
    for group in groups:
        for device in group.devices if len(group.devices) > 1 else ():
            drafts[device].add_sum(group)
    return Program(
        plan=plan,
        slices=plan.slices,
        layouts=layouts,
        order=order,
        edges=edges,
        groups=groups,
        actions={device: tuple(draft.write()) for device, draft in drafts.items()},
    )


@dataclass
class _Ahead:
    """Computes by their position: `takers`, what they take is not posted; `posted`, it is, with its bytes."""

    takers: deque[int]
    posted: deque[tuple[int, int]] = field(default_factory=deque)
    num_bytes: int = 0  # of all `posted`

    def pass_by(self, place: int) -> None:
        """The computes up to `place` are reached."""
        while self.takers and self.takers[0] <= place:
            self.takers.popleft()
        while self.posted and self.posted[0][0] <= place:
            self.num_bytes -= self.posted.popleft()[1]

    def post(self, num_bytes: int) -> None:
        """What the first taker takes is posted."""
        self.posted.append((self.takers.popleft(), num_bytes))
        self.num_bytes += num_bytes


@dataclass
class _Draft:
    """A device's program in the making: `write` merges its computes with its posts and sums."""

    device: int
    computes: list[Compute] = field(default_factory=list)  # in program order
    incoming: dict[Compute, list[Transfer]] = field(default_factory=dict)  # what a compute waits for
    outgoing: dict[Compute, list[Transfer]] = field(default_factory=dict)  # what it makes
    unposted: dict[int, deque[Transfer]] = field(default_factory=dict)  # by peer, in the order of keys
    sums_after: dict[int, list[Action]] = field(default_factory=dict)  # by position in `computes`
    last_sum: tuple[int, int] = (0, 0)  # of the latest sum: position in `computes`, and minus the op
    backward_place: dict[int, int] = field(default_factory=dict)  # slice -> position of its B in `computes`

    def add(self, transfer: Transfer) -> None:
        """Register a transfer of which this device is one end; to be called in the order of keys."""
        kind = Kind.BACKWARD if transfer.is_gradient else Kind.FORWARD
        if transfer.source == self.device:
            maker = transfer.consumer if transfer.is_gradient else transfer.producer
            self.outgoing.setdefault((kind, maker), []).append(transfer)
            peer = transfer.destination
        else:
            taker = transfer.producer if transfer.is_gradient else transfer.consumer
            self.incoming.setdefault((kind, taker), []).append(transfer)
            peer = transfer.source
        self.unposted.setdefault(peer, deque()).append(transfer)

    def add_sum(self, group: ParameterGroup) -> None:
        """Register a sum: after the device's last backward slice that adds to it, ready from the first op
        there that does, but never before the sum of an earlier group. To be called in the order of groups,
        when all computes are there.
        """
        if not self.backward_place:
            self.backward_place = {slice_: place for place, (_, slice_) in enumerate(self.computes)}
        own = max(
            (self.backward_place[index], -op)
            for index, op in zip(group.slices, group.first_ops, strict=True)
            if index in self.backward_place
        )
        self.last_sum = max(self.last_sum, own)
        place, minus_op = self.last_sum
        self.sums_after.setdefault(place, []).append(Action(Kind.SUM, group=group.index, op=-minus_op))

    def write(self) -> list[Action]:
        """The device's actions. Receives are posted one compute ahead of the one that waits for them, so that
        the data can come while that one runs, yet few buffers are held at a time; small ones as early as they
        can be (`EARLY_BYTES`).
        """
        actions: list[Action] = []
        ahead = _Ahead(
            deque(place for place, compute in enumerate(self.computes) if compute in self.incoming)
        )
        for place, compute in enumerate(self.computes):
            for transfer in self.incoming.get(compute, ()):
                self._post_through(transfer, actions, must=True)
            self._post_ahead(place, ahead, actions)
            actions.append(Action(compute[0], piece=compute[1]))
            for transfer in self.outgoing.get(compute, ()):
                self._post_through(transfer, actions, must=True)
            actions.extend(self.sums_after.get(place, ()))
        actions.append(Action(Kind.STEP))
        return actions

    def _post_ahead(self, place: int, ahead: _Ahead, actions: list[Action]) -> None:
        """Post what the computes behind `place` take, as far as it may be posted now."""
        ahead.pass_by(place)
        while ahead.takers:
            taker = ahead.takers[0]
            transfers = self.incoming[self.computes[taker]]
            num_bytes = sum(transfer.num_bytes for transfer in transfers)
            if taker > place + 1 and ahead.num_bytes + num_bytes > EARLY_BYTES:
                return
            posted = [self._post_through(transfer, actions, must=False) for transfer in transfers]
            if not all(posted):
                return
            ahead.post(num_bytes)

    def _post_through(self, transfer: Transfer, actions: list[Action], *, must: bool) -> bool:
        """Post everything between this device and the transfer's peer up to and including it; whether that
        is done.

        Without `must`, stop at a send whose data is not computed yet.
        """
        peer = transfer.destination if transfer.source == self.device else transfer.source
        queue = self.unposted[peer]
        while queue and queue[0].key <= transfer.key:
            head = queue[0]
            if head.source == self.device:
                if head is not transfer:
                    assert not must, "a sender has run everything that comes before its transfer"
                    return False
                kind = Kind.SEND_GRAD if head.is_gradient else Kind.SEND
            else:
                kind = Kind.RECV_GRAD if head.is_gradient else Kind.RECV
            actions.append(Action(kind, transfer=queue.popleft()))
        return True
