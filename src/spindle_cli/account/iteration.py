"""One device's iteration, op by op: what it holds at each moment beside what it holds all the time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.account.crossing import slice_inputs
from spindle_cli.account.holdings import (
    Block,
    BlockUse,
    Held,
    Holders,
    SharedOut,
    blocks_of,
    shared_out,
)
from spindle_cli.account.types import Pass
from spindle_cli.costs.memory import OpNeeds, SliceShape, op_needs, slice_output_bytes
from spindle_cli.profile.types import MetaOp
from spindle_cli.units import KIB, MIB

# Under gloo, what gradient sums under way may take in receive buffers where optimizer state is
# sharded; the runtime lets further sums wait. A single sum may be larger.
SUM_BUFFER_BYTES = 32 * MIB
# An op that is recomputed keeps the state of the random numbers (torch's, on the CPU).
_RANDOM_STATE_BYTES = 5056

# Number of a part, which of its `tp` shards, and bytes received for it: inputs, gradients of outputs.
Role = tuple[int, int, float, float]

# Receives up to this many bytes together are posted as early as their data is made, others while the pass
# before theirs runs (program/transfers.py): they cost next to no memory, and what is posted before its sender
# sends arrives in one message where gloo would else need three.
EARLY_BYTES = 64 * KIB


class Part:
    """What a slice takes of each of its devices; where its shares are not equal, of those with one size."""

    __slots__ = (
        "blocks",
        "edges",
        "fields",
        "handed",
        "is_handed_on",
        "kept_inputs",
        "needs",
        "optimizer",
        "piece",
        "recompute",
        "shares",
        "taken_at_once",
        "taken_by_every_op",
        "task",
        "tp",
        "uses",
    )

    def __init__(
        self,
        number: int,
        piece: SliceShape,
        by_name: Mapping[str, MetaOp],
        shares: float,
        *,
        is_handed_on: bool,
    ) -> None:
        """`number`: of the slice. `shares`: into how many shares of this size its batch would be cut."""
        metaop = by_name[piece.metaop]
        self.piece = number
        self.optimizer = metaop.optimizer
        first, last = piece.ops
        self.tp = piece.tp
        self.recompute = piece.recompute
        self.needs: list[tuple[int, OpNeeds]] = op_needs(metaop, piece.ops, shares, piece.tp)
        self.task, self.shares = metaop.task, shares
        self.fields = sum(size for op, size in metaop.field_bytes.items() if first <= op < last)
        handed = slice_output_bytes(metaop, last, metaop.num_ops) / shares
        self.is_handed_on = is_handed_on
        self.handed = handed if is_handed_on else 0.0
        self.kept_inputs = 0.0
        before, after = self.needs[0][1].joined, self.needs[-1][1].joined
        # Of what a slice is given, and hands on, whole, its ops have a part each besides.
        self.edges = after + (0.0 if piece.recompute else before / piece.tp)
        if piece.recompute:
            inner = slice_output_bytes(metaop, first + 1, metaop.num_ops) / shares
            self.kept_inputs = max(inner, handed)
        taken = {name: size / shares for size, name in slice_inputs(piece, by_name)}
        self.taken_by_every_op = sum(taken.pop(name, 0.0) for name in metaop.inputs_of_every_op)
        self.taken_at_once = sum(taken.values())
        self.uses: list[tuple[BlockUse, ...]] = [blocks_of(metaop, op) for op in range(first, last)]
        # Of each block that its ops use: bytes, trained bytes, and which op is the first.
        self.blocks: dict[Block, tuple[float, float, int]] = {}
        for position, uses in enumerate(self.uses):
            for use in uses:
                size, trained, at = self.blocks.get(use.block, (0.0, 0.0, position))
                self.blocks[use.block] = max(size, use.num_bytes), max(trained, use.trained_bytes), at

    def kept_of(self, needs: OpNeeds) -> float:
        """Of an op, from forward to backward."""
        if not self.recompute:
            return needs.kept
        return self.kept_inputs / (self.tp if needs.joined else 1) + _RANDOM_STATE_BYTES

    def ops(self) -> Iterable[tuple[int, OpNeeds]]:
        """(1, what it needs) of each op."""
        return ((1, needs) for count, needs in self.needs for _ in range(count))

    def ops_from_last(self) -> Iterable[tuple[int, OpNeeds]]:
        """(position in the slice, what it needs) of each op, the last one first."""
        position = len(self.uses)
        for count, needs in reversed(self.needs):
            for _ in range(count):
                position -= 1
                yield position, needs


class Fullest:
    """The fullest moment so far of what does not last."""

    def __init__(self) -> None:
        self.gradients = self.activations = self.buffers = 0.0

    @property
    def total(self) -> float:
        """Bytes of all three."""
        return self.gradients + self.activations + self.buffers

    def see(self, gradients: float, activations: float, buffers: float) -> None:
        """A moment."""
        if gradients + activations + buffers > self.total:
            self.gradients, self.activations, self.buffers = gradients, activations, buffers


@dataclass(frozen=True)
class PassBytes:
    """What a device holds at the fullest moment of a pass, and after it, beside what lasts.

    `piece`: the slice whose pass it is; None for the optimizer's update.
    """

    piece: int | None
    is_backward: bool
    fullest: Fullest
    after: Fullest


@dataclass(frozen=True)
class Setting:
    """What is the same for all devices of a plan.

    Attributes:
        parts: one for each slice, by its number; behind them those of further sizes of shares.
        splits: whether any slice is split by tensor parallelism.
        sums_take_buffers: gradient sums under way take receive buffers.
        gradient_width: bytes of gradients for each byte of trained parameters.
        shares_out: devices share out any parameters or gradients.
    """

    parts: Sequence[Part]
    holders: Holders
    splits: bool
    sums_take_buffers: bool
    gradient_width: float
    shares_out: bool


class Iteration:
    """One device's iteration, op by op."""

    def __init__(
        self,
        setting: Setting,
        roles: Sequence[Role],
        passes: Sequence[Pass] | None,
        held: Mapping[Block, Held],
        *,
        keeps_own: bool,
    ) -> None:
        """`roles`: in the order in which the device runs them forward. `passes`: all in its order, by index
        of the slice; None: all forward, then all backward in reverse. `keeps_own`: gradients that are not
        shared are there from the batch before.
        """
        self._setting = setting
        self._roles = roles
        self._passes = passes
        self._held = held
        self._keeps_own = keeps_own
        self._made: set[Block] = set(held) if keeps_own else set()
        self._fullest = Fullest()
        self._width = setting.gradient_width
        self._gradients = self._width * sum(there.own_bytes for there in held.values()) if keeps_own else 0.0
        self._fields = self._loaded()
        self._received = 0.0
        self._kept = self._retained = 0.0
        self._whole = 0.0  # gradients that a backward pass makes before they are scattered
        self._shared: dict[int, SharedOut | None] = {}
        self._summing = 0.0
        self._sums_at_most = 0.0
        if setting.sums_take_buffers:
            largest = max((there.summed_bytes for there in held.values()), default=0.0)
            self._sums_at_most = max(SUM_BUFFER_BYTES, self._width * largest)

    def run(self, own: float, update: float) -> list[PassBytes]:
        """Pass by pass, the optimizer's update last; `own`: gradients that are not shared, `update`: what the
        update takes.
        """
        passes = self._mirrored() if self._passes is None else self._in_order(self._passes)
        self._fullest.see(own, self._fields, self._retained + self._sums())
        self._fullest.see(own, self._fields, update)
        left = Fullest()
        left.see(own if self._keeps_own else 0.0, 0.0, 0.0)
        passes.append(PassBytes(None, is_backward=False, fullest=self._fullest, after=left))
        return passes

    def _mirrored(self) -> list[PassBytes]:
        """All slices forward, then backward in reverse. What a slice receives has its place before the first
        one runs in that direction.
        """
        passes: list[PassBytes] = []
        self._received = sum(received for *_, received, _ in self._roles)
        for role in self._roles:
            self._forward(role)
            passes.append(self._end_pass(self._setting.parts[role[0]].piece, is_backward=False))
        self._received += sum(returned for *_, returned in self._roles)
        self._sum_of_others()
        first_op = sum(len(self._setting.parts[index].uses) for index, *_ in self._roles)
        for role in reversed(self._roles):
            first_op -= len(self._setting.parts[role[0]].uses)
            self._backward(role, first_op)
            passes.append(self._end_pass(self._setting.parts[role[0]].piece, is_backward=True))
        return passes

    def _in_order(self, order: Sequence[Pass]) -> list[PassBytes]:
        """The passes in an order of their own. What one receives has its place while the one before it runs;
        what is small, from the start.
        """
        passes: list[PassBytes] = []
        role_of = {self._setting.parts[role[0]].piece: role for role in self._roles}
        first_op = sum(len(self._setting.parts[index].uses) for index, *_ in self._roles)
        taken = [role_of[piece][3 if is_backward else 2] for piece, is_backward in order]
        self._received = sum(size for size in taken if size <= EARLY_BYTES)
        waiting = [size if size > EARLY_BYTES else 0.0 for size in (*taken, 0.0)]
        self._received += waiting[0]
        self._sum_of_others()
        for number, (piece, is_backward) in enumerate(order):
            self._received += waiting[number + 1]
            if is_backward:
                first_op -= len(self._setting.parts[piece].uses)
                self._backward(role_of[piece], first_op)
            else:
                self._forward(role_of[piece])
            passes.append(self._end_pass(piece, is_backward=is_backward))
        return passes

    def _sum_of_others(self) -> None:
        """What other plans' slices alone hold is summed whenever the others are ready."""
        self._summing = sum(
            self._width * there.summed_bytes
            for there in self._held.values()
            if there.first_use < 0 and there.is_due
        )

    def _end_pass(self, piece: int, *, is_backward: bool) -> PassBytes:
        after = Fullest()
        after.see(self._gradients, self._kept + self._fields, self._buffers())
        fullest, self._fullest = self._fullest, Fullest()
        return PassBytes(piece, is_backward, fullest, after)

    def _loaded(self) -> float:
        """Bytes of the batches' fields."""
        fields: dict[str, int] = {}
        share: dict[str, float] = {}
        for index, *_ in self._roles:
            part = self._setting.parts[index]
            if part.fields:
                fields[part.task] = fields.get(part.task, 0) + part.fields
                share[part.task] = max(share.get(part.task, 0.0), 1 / part.shares)
        return sum(size * share[task] for task, size in fields.items())

    def _forward(self, role: Role) -> None:
        part = self._setting.parts[role[0]]
        shared = self._shared_out(role[0])
        casts = 0.0
        position = -1
        for count, needs in part.needs if shared is None else part.ops():
            position += count
            kept = part.kept_of(needs)
            casts += count * needs.cast if part.recompute else 0.0
            self._kept += (count - 1) * kept
            gathered = 0.0 if shared is None else shared.forward[position]
            self._see(needs.forward + casts, self._buffers() + gathered)
            self._kept += kept
        if not part.recompute:
            self._kept += sum(self._joined(part, uses) for uses in part.uses)
        if part.edges:
            self._kept += part.edges
            self._see(0.0, self._buffers())

    def _backward(self, role: Role, first_op: int) -> None:
        """`first_op`: of the slice, among all that the device runs."""
        index, _, received, returned = role
        part = self._setting.parts[index]
        shared = self._shared_out(index)
        self._retained += part.taken_by_every_op
        for position, needs in part.ops_from_last():
            joined = self._joined(part, part.uses[position])
            running = self._backward_bytes(needs, part.uses[position])
            if part.recompute:
                running = joined + max(needs.forward, needs.kept + running)
            gathered = 0.0
            if shared is not None:
                self._whole = self._width * shared.gradients[position]
                gathered = shared.backward[position] + self._scattering(shared.under_way[position])
            self._see(running, self._buffers() + part.handed + gathered)
            self._kept -= part.kept_of(needs) if part.recompute else needs.kept + joined
            self._end_op(part.uses[position], first_op + position)
        self._kept -= part.edges
        self._retained += part.taken_at_once
        if shared is not None:
            self._whole = self._width * shared.left
            self._see(0.0, self._buffers() + self._scattering(shared.left))
            self._whole = 0.0
        self._received -= received + returned

    def _shared_out(self, index: int) -> SharedOut | None:
        """Of a slice, once for both passes."""
        if not self._setting.shares_out:
            return None
        if index not in self._shared:
            self._shared[index] = shared_out(self._setting.parts[index].uses, self._held)
        return self._shared[index]

    def _scattering(self, under_way: float) -> float:
        """What a scatter takes beside its gradients."""
        return self._width * under_way if self._setting.sums_take_buffers else 0.0

    def _backward_bytes(self, needs: OpNeeds, uses: Sequence[BlockUse]) -> float:
        """Of an op, with the gradients that it makes: those of parameters that the device alone holds."""
        made = sum(self._held[use.block].own_bytes for use in uses if use.block not in self._made)
        if not made:
            return needs.backward
        trained = sum(self._held[use.block].share * use.trained_bytes for use in uses)
        new = made / trained if trained else 0.0
        return needs.backward + new * (needs.first_backward - needs.backward)

    def _end_op(self, uses: Sequence[BlockUse], op: int) -> None:
        for use in uses:
            there = self._held[use.block]
            if use.block not in self._made:
                self._made.add(use.block)
                self._gradients += self._width * there.own_bytes
            if there.first_use == op:
                self._summing += self._width * there.summed_bytes

    def _joined(self, part: Part, uses: Sequence[BlockUse]) -> float:
        """Copies of parameters that the device holds in finer fragments than the slice uses."""
        if not self._setting.splits:
            return 0.0
        return sum(
            use.num_bytes / part.tp
            for use in uses
            if use.block[2] and len(self._setting.holders.of(use.block)) > part.tp
        )

    def _buffers(self) -> float:
        """What was received, what is on its way back, and what sums under way take."""
        return self._received + self._retained + self._sums()

    def _sums(self) -> float:
        return min(self._summing, self._sums_at_most)

    def _see(self, running: float, buffers: float) -> None:
        gradients = self._gradients + self._whole
        self._fullest.see(gradients, self._kept + self._fields + running, buffers)
