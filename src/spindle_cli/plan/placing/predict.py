"""The predicted iteration: the schedule, and what transfers and gradient sums add to it.

A plain account of one iteration, slice by slice: forward in the order of the schedule, backward in reverse,
transfers between them, gradient sums behind the backward pass, then the optimizer's step. Compute and
communication overlap. A device moves one thing at a time per direction inside its node, and a network card
one between nodes. (`spindle simulate` is a finer and independent account, for one plan at a time.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spindle_cli.costs.links import all_reduce_s, transfer_s
from spindle_cli.costs.memory import held_param_bytes, inner_bytes, parameter_block
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Piece, Placed

# Of what the same pieces use, how many sums are told apart: enough to see that they start while backward
# still runs.
PARTS_OF_A_SUM = 6


@dataclass(frozen=True)
class Prediction:
    """Seconds of an iteration.

    Attributes:
        iteration_s: all of it: `compute_s` plus the other three.
        compute_s: the schedule alone.
        transfer_s: added by transfers, and by forward and backward passes that do not fit each other as their
            sums do.
        gradient_sum_s: added by gradient sums.
        optimizer_s: added by the optimizer's step.
    """

    iteration_s: float
    compute_s: float
    transfer_s: float
    gradient_sum_s: float
    optimizer_s: float


@dataclass(frozen=True)
class Flow:
    """A tensor that one piece hands to another (indices), whole batch."""

    producer: int
    consumer: int
    num_bytes: int


def predict(problem: Problem, placed: Placed, compute_s: float, steps_s: Sequence[float]) -> Prediction:
    """Predict the iteration of a placed schedule that takes `compute_s` by itself.

    `steps_s`: the optimizer's step on each device.
    """
    account = _Account(problem, placed)
    account.forward()
    account.backward()
    with_transfers_s = max(compute_s, account.now_s)
    summed_s = account.sum_gradients()
    with_sums_s = max(with_transfers_s, *summed_s)
    ready_s = (max(times) for times in zip(summed_s, account.device_free_s, strict=True))
    iteration_s = max(with_sums_s, *(ready + step for ready, step in zip(ready_s, steps_s, strict=True)))
    return Prediction(
        iteration_s=iteration_s,
        compute_s=compute_s,
        transfer_s=with_transfers_s - compute_s,
        gradient_sum_s=with_sums_s - with_transfers_s,
        optimizer_s=iteration_s - with_sums_s,
    )


def flows(problem: Problem, pieces: Sequence[Piece]) -> Iterator[Flow]:
    """Every tensor handed from piece to piece."""
    of_node: dict[int, list[int]] = {}
    for index, piece in enumerate(pieces):
        of_node.setdefault(piece.node, []).append(index)
    for node in problem.nodes:
        own = of_node[node.index]
        before = [] if node.continues is None else of_node[node.continues][-1:]
        for producer, consumer in pairwise(before + own):
            yield Flow(producer, consumer, inner_bytes(node.metaop))
        for j in problem.producers[node.metaop.name]:
            metaop = problem.nodes[j].metaop
            first = [] if before else own[:1]
            consumers = own if metaop.name in node.metaop.inputs_of_every_op else first
            for consumer in consumers:
                yield Flow(of_node[j][-1], consumer, metaop.output_bytes)


# A device's way to others of its node, or a network card: (node, card of the node).
_Port = int | tuple[int, int]


@dataclass(frozen=True)
class _Exchange:
    """Seconds that each port is busy with a flow, out and in."""

    out_s: tuple[tuple[_Port, float], ...]
    in_s: tuple[tuple[_Port, float], ...]

    def reversed(self) -> _Exchange:
        """The same bytes the other way."""
        return _Exchange(self.in_s, self.out_s)


class _Account:
    """The iteration under way."""

    def __init__(self, problem: Problem, placed: Placed) -> None:
        self.problem = problem
        self.cluster: Cluster = problem.cluster
        self.pieces = placed.draft.pieces
        self.devices = placed.devices
        self.flows = list(flows(problem, self.pieces))
        self.exchanges = [self._exchange(flow) for flow in self.flows]
        self.device_free_s = [0.0] * problem.num_devices
        self.now_s = 0.0
        self.backward_start_s: list[float] = []
        self.backward_end_s: list[float] = []

    def forward(self) -> None:
        """Run all pieces forward."""
        moves = [
            (flow.producer, flow.consumer, x) for flow, x in zip(self.flows, self.exchanges, strict=True)
        ]
        seconds = [piece.num_ops * piece.point.forward_s for piece in self.pieces]
        _, end_s = self._run(range(len(self.pieces)), seconds, moves)
        self.now_s = max(end_s)

    def backward(self) -> None:
        """Run all pieces backward, in reverse; gradients take the way of the activations back."""
        moves = [
            (flow.consumer, flow.producer, None if x is None else x.reversed())
            for flow, x in zip(self.flows, self.exchanges, strict=True)
        ]
        seconds = [piece.num_ops * piece.point.backward_s for piece in self.pieces]
        order = range(len(self.pieces) - 1, -1, -1)
        self.backward_start_s, self.backward_end_s = self._run(order, seconds, moves)
        self.now_s = max(self.now_s, *self.backward_end_s)

    def _run(
        self,
        order: Sequence[int],
        seconds: Sequence[float],
        moves: Sequence[tuple[int, int, _Exchange | None]],
    ) -> tuple[list[float], list[float]]:
        """Start and end of each piece in one pass; `moves` are (sender, taker, what moves).

        What has been computed is sent at once, the earliest first.
        """
        sent_by: list[list[int]] = [[] for _ in self.pieces]
        taken_by: list[list[int]] = [[] for _ in self.pieces]
        for move, (sender, taker, _) in enumerate(moves):
            sent_by[sender].append(move)
            taken_by[taker].append(move)
        start_s, end_s = [0.0] * len(self.pieces), [0.0] * len(self.pieces)
        arrived_s = [0.0] * len(moves)
        waiting: list[tuple[float, int]] = []  # heap of (computed at, move)
        out_free: dict[_Port, float] = {}
        in_free: dict[_Port, float] = {}
        for index in order:
            last_s = max((end_s[moves[move][0]] for move in taken_by[index]), default=-1.0)
            while waiting and waiting[0][0] <= last_s:
                computed_s, move = heapq.heappop(waiting)
                arrived_s[move] = _arrive(moves[move][2], computed_s, out_free, in_free)
            ready_s = [self.device_free_s[d] for d in self.devices[index]]
            ready_s += [arrived_s[move] for move in taken_by[index]]
            start_s[index] = max(ready_s)
            end_s[index] = start_s[index] + seconds[index]
            for device in self.devices[index]:
                self.device_free_s[device] = end_s[index]
            for move in sent_by[index]:
                heapq.heappush(waiting, (end_s[index], move))
        return start_s, end_s

    def sum_gradients(self) -> list[float]:
        """When the last sum of each device ends; 0 where it takes part in none.

        A block of parameters can be summed when every piece that uses it has run its op backward. What the
        same pieces use is summed in a few parts, as it becomes ready; a device takes part in one sum at a
        time.
        """
        parts: list[tuple[float, int, float, list[int]]] = []
        for users, shared in shared_parameters(self.problem, self.pieces).items():
            devices = sorted({d for index in users for d in self.devices[index]})
            if len(devices) < 2:
                continue
            sum_s = all_reduce_s(shared.num_bytes, devices, self.cluster)
            ready_s = sorted(self._ready_s(users, ops) for ops in shared.ops)
            num_parts = min(len(ready_s), PARTS_OF_A_SUM)
            for part in range(num_parts):
                last = (part + 1) * len(ready_s) // num_parts - 1
                parts.append((ready_s[last], len(parts), sum_s / num_parts, devices))
        free_s = [0.0] * self.problem.num_devices
        for ready, _, seconds, members in sorted(parts):
            end_s = max(ready, max(free_s[d] for d in members)) + seconds
            for device in members:
                free_s[device] = end_s
        return free_s

    def _ready_s(self, users: Sequence[int], ops: Sequence[int]) -> float:
        """When each of the pieces has run its op backward; a piece runs its last op first."""
        latest_s = 0.0
        for index, op in zip(users, ops, strict=True):
            piece = self.pieces[index]
            start_s, end_s = self.backward_start_s[index], self.backward_end_s[index]
            latest_s = max(latest_s, start_s + (end_s - start_s) * (piece.last - op) / piece.num_ops)
        return latest_s

    def _exchange(self, flow: Flow) -> _Exchange | None:
        """What moves where for a flow; None if nothing does."""
        out_s: dict[_Port, float] = {}
        in_s: dict[_Port, float] = {}
        node_of, card_of, links = self.cluster.node_of, self.cluster.card_of, self.cluster.links
        for sender, taker, num_bytes in messages(self.pieces, self.devices, flow):
            inside = node_of[sender] == node_of[taker]
            seconds = transfer_s(num_bytes, links.intra_node if inside else links.inter_node)
            out, into = (sender, taker) if inside else (card_of[sender], card_of[taker])
            out_s[out] = out_s.get(out, 0.0) + seconds
            in_s[into] = in_s.get(into, 0.0) + seconds
        return _Exchange(tuple(out_s.items()), tuple(in_s.items())) if in_s else None


def messages(
    pieces: Sequence[Piece], devices: Sequence[tuple[int, ...]], flow: Flow
) -> Iterator[tuple[int, int, float]]:
    """(sender, taker, bytes) of everything that a flow moves from one device to another."""
    source, sink = pieces[flow.producer].point, pieces[flow.consumer].point
    senders, takers = devices[flow.producer], devices[flow.consumer]
    if (senders, source.dp, source.tp) == (takers, sink.dp, sink.tp):
        return
    share_of = {device: place // source.tp for place, device in enumerate(senders)}
    for place, taker in enumerate(takers):
        wanted = place // sink.tp
        first, last = wanted * source.dp, (wanted + 1) * source.dp  # in shares of both together
        for share in range(first // sink.dp, -(-last // sink.dp)):
            if share_of.get(taker) == share:
                continue
            rows = min(last, (share + 1) * sink.dp) - max(first, share * sink.dp)
            sender = senders[share * source.tp + place % sink.tp % source.tp]
            yield sender, taker, flow.num_bytes * rows / (source.dp * sink.dp)


@dataclass
class Shared:
    """Parameters that the same pieces use.

    Attributes:
        num_bytes: of their gradients, on each device.
        ops: of each block, the first op of each piece that uses it.
    """

    num_bytes: float
    ops: list[tuple[int, ...]]


def shared_parameters(problem: Problem, pieces: Sequence[Piece]) -> dict[tuple[int, ...], Shared]:
    """All trained parameters, by the pieces (ascending) that use them."""
    users: dict[tuple[str, int], dict[int, int]] = {}
    size: dict[tuple[str, int], float] = {}
    for index, piece in enumerate(pieces):
        metaop = problem.nodes[piece.node].metaop
        for op in range(piece.first, piece.last):
            num_bytes = held_param_bytes(metaop, op, piece.point.tp) * metaop.trainable_fraction
            if num_bytes:
                block = parameter_block(metaop, op)
                users.setdefault(block, {}).setdefault(index, op)
                size[block] = max(size.get(block, 0.0), num_bytes)
    shared: dict[tuple[int, ...], Shared] = {}
    for block, first_ops in users.items():
        of_members = shared.setdefault(tuple(first_ops), Shared(0.0, []))
        of_members.num_bytes += size[block]
        of_members.ops.append(tuple(first_ops.values()))
    return shared


def _arrive(
    exchange: _Exchange | None, computed_s: float, out_free: dict[_Port, float], in_free: dict[_Port, float]
) -> float:
    """When all of an exchange that can start at `computed_s` has arrived; its ports are busy meanwhile."""
    arrived_s = computed_s
    if exchange is not None:
        for free_s, busy in ((out_free, exchange.out_s), (in_free, exchange.in_s)):
            for port, seconds in busy:
                free_s[port] = max(computed_s, free_s.get(port, 0.0)) + seconds
                arrived_s = max(arrived_s, free_s[port])
    return arrived_s
