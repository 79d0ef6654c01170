"""One device's iteration, op by op: what it holds at each moment beside what it holds all the time.

Ops in a row that need the same and use parameters of the same kinds are gone through at once: from one to the
next as much comes or goes, so that the first or the last of them is the fullest. Between passes there stay
what replica groups hand to each other (`HandedOn`), and what a device gathers (`KeptGathered`) and casts
(`KeptCasts`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from spindle_cli.account.activations import EARLY_BYTES, PASSES_AHEAD, PassOrder
from spindle_cli.account.device.parts import Keeping, Kinds, Part, Run, in_blocks
from spindle_cli.account.holdings import Held, Holders, SharedOut, shared_out
from spindle_cli.account.types import Pass
from spindle_cli.costs.memory import SUM_BUFFER_BYTES, OpNeeds
from spindle_cli.costs.parameters import Block


class HandedOn:
    """Bytes of what replica groups hand to each other of what they have stepped, in buffers, from pass to
    pass.

    All exchanges start behind the update. What a pass uses is gathered with the op before it, and what was
    handed on of it is taken to where it belongs first: its buffers go then. What other plans' slices alone
    use stays.
    """

    def __init__(self, held: Mapping[int, Held], kinds: Kinds) -> None:
        """`held`: by kind."""
        handed = {kind: num_bytes for kind, there in held.items() if (num_bytes := there.handed_on_bytes)}
        self._waiting: dict[Block, float] = {}
        if handed:
            self._waiting = {block: handed[kind] for block, kind in kinds.kind_of.items() if kind in handed}
        self.num_bytes = self.at_first = sum(self._waiting.values())

    @property
    def is_any(self) -> bool:
        """Whether anything that was handed on is left in its buffers."""
        return bool(self._waiting)

    def come_to(self, part: Part, run: Run) -> None:
        """Free what ops of a slice take, which run forward now."""
        for of_op in part.uses[run.position : run.position + run.num_ops + 1]:
            for use in of_op:
                self.num_bytes -= self._waiting.pop(use.block, 0.0)


class KeptGathered:
    """Bytes of the parameters that a device has gathered and keeps, from pass to pass.

    What a slice keeps is taken to be there from the begin of its forward pass to the end of the backward one:
    it comes op by op, and all of it is there between the two. A slice to which no gradients come keeps
    nothing: what an op uses comes with the op before it, and goes behind the last that uses it, but for what
    another slice keeps.
    """

    def __init__(self, held: Mapping[int, Held], kinds: Kinds, unreached: Set[int]) -> None:
        """`held`: by kind. `unreached`: slices to which no gradients come."""
        self._held = held
        self._kinds = kinds
        self._unreached = unreached
        self.is_any = any(there.kept_bytes for there in held.values())
        self._open: Counter[Block] = Counter()  # slices that have yet to run backward
        self._kept = 0.0
        self._of_ops: Sequence[float] = ()  # of the slice that runs, what goes behind its ops
        self._passing = 0.0

    @property
    def num_bytes(self) -> float:
        """All that is there now."""
        return self._kept + self._passing

    def begin_forward(self, part: Part) -> None:
        """Have what a slice keeps, whose forward pass begins."""
        if self.is_any and part.slice_index in self._unreached:
            self._of_ops = self._gathered_by_op(part)
            return
        for block, num_bytes in self._blocks(part):
            self._kept += 0.0 if self._open[block] else num_bytes
            self._open[block] += 1

    def come_to(self, run: Run) -> None:
        """Have the most that is there beside any of these ops of the slice, which run now."""
        if self._of_ops:
            self._passing = max(self._of_ops[run.position : run.position + run.num_ops])

    def end_forward(self) -> None:
        """Free what went with the slice's ops, all of which have run."""
        self._of_ops, self._passing = (), 0.0

    def end_backward(self, part: Part) -> None:
        """Free what a slice kept, whose backward pass ends."""
        if part.slice_index in self._unreached:
            return
        for block, num_bytes in self._blocks(part):
            self._open[block] -= 1
            self._kept -= 0.0 if self._open[block] else num_bytes

    def _blocks(self, part: Part) -> Iterator[tuple[Block, float]]:
        """The blocks of this level that a slice uses, and their bytes."""
        if self.is_any:
            kind_of = self._kinds.kind_of
            for block in dict.fromkeys(use.block for of_op in part.uses for use in of_op):
                if num_bytes := self._held[kind_of[block]].kept_bytes:
                    yield block, num_bytes

    def _gathered_by_op(self, part: Part) -> Sequence[float]:
        """Bytes of the parameters that are gathered while each op runs, its own and those of the op behind
        it, in a slice that keeps nothing.
        """
        there = [0.0] * len(part.uses)
        for block, num_bytes in self._blocks(part):
            if not self._open[block]:
                used = [at for at, of_op in enumerate(part.uses) if any(use.block == block for use in of_op)]
                for position in range(max(0, used[0] - 1), used[-1] + 1):
                    there[position] += num_bytes
        return there


class KeptCasts:
    """Bytes of parameters that autocast has cast, from pass to pass.

    Those of a forward pass are among what its ops keep until it has run backward. They stay behind it until
    the next forward pass that uses the same parameters takes them over, if any does in this batch, unless a
    slice of the device gives up what it keeps or passes gather parameters or sum gradients themselves
    (`runtime/step/casts.py`). Where several passes are between forward and backward they share them, and are
    taken to have some each.
    """

    def __init__(
        self, order: Sequence[Pass], parts: Mapping[int, Part], kinds: Kinds, *, are_kept: bool
    ) -> None:
        """`order`: all passes of the device. `parts`: of each slice in it, as the device runs it."""
        self.are_kept = are_kept and all(part.keeps_all for part in parts.values())
        self.num_bytes = 0.0  # all that no pass has among what its ops keep
        self._kinds = kinds
        self._to_come: Counter[int] = Counter()  # forward passes that use a kind
        if self.are_kept:
            for index, is_backward in order:
                if not is_backward:
                    self._to_come.update(kinds.trained[parts[index].slice_index])
        self._of_ops: dict[tuple[tuple[int, ...], int], float] = {}  # by kinds, and the first op's place

    def begin_forward(self, part: Part) -> None:
        """A slice takes over the casts of what it uses."""
        if not self.are_kept:
            return
        used = self._kinds.trained[part.slice_index]
        self._to_come.subtract(used)
        if self._of_ops:
            self._of_ops = {ops: size for ops, size in self._of_ops.items() if used.isdisjoint(ops[0])}
            self.num_bytes = sum(self._of_ops.values())

    def staying(self, part: Part, run: Run) -> float:
        """Bytes of each op of a run that do not go with its backward pass, as a later forward pass uses
        them.
        """
        if not self.are_kept or not any(self._to_come[kind] > 0 for kind in run.trained):
            return 0.0
        return part.needs[run.segment][1].cast

    def end_backward(self, part: Part) -> float:
        """Bytes of the slice's casts that stay, which its ops have no longer."""
        if not self.are_kept:
            return 0.0
        casts = {
            (run.kinds, run.position): run.num_ops * size
            for run in self._kinds.runs[part.slice_index]
            if (size := self.staying(part, run))
        }
        if casts:
            self._of_ops |= casts
            self.num_bytes = sum(self._of_ops.values())
        return sum(casts.values())


# Number of a part, which of its `tp` shards, and bytes received for it: inputs, gradients of outputs.
Role = tuple[int, int, float, float]


class Fullest:
    """The fullest moment so far of what does not last. `total`: bytes of all three."""

    __slots__ = ("activations", "buffers", "gradients", "total")

    def __init__(self) -> None:
        self.gradients = self.activations = self.buffers = self.total = 0.0

    def see(self, gradients: float, activations: float, buffers: float) -> None:
        """Take note of a moment."""
        total = gradients + activations + buffers
        if total > self.total:
            self.gradients, self.activations, self.buffers = gradients, activations, buffers
            self.total = total


class PassBytes(NamedTuple):
    """What a device holds at the fullest moment of a pass, and after it, beside what lasts.

    `slice_index`: of the slice whose pass it is; None for the optimizer's update.
    """

    slice_index: int | None
    is_backward: bool
    fullest: Fullest
    after: Fullest


@dataclass(frozen=True)
class Setting:
    """What is the same for all devices of a plan.

    Attributes:
        parts: one for each slice, by its number; behind them those of further sizes of shares.
        kinds: of the parameters that they use.
        sums_take_buffers: gradient sums under way take receive buffers, or padded copies;
            `only_replica_groups_take_buffers`: none but those over replica groups.
        buffers_are_small: no sum takes more than `SUM_BUFFER_BYTES`, as padded copies do not.
        gradient_width: bytes of gradients for each byte of trained parameters.
        shares_out: devices share out any parameters or gradients.
        on_cpu: a device's memory is that of its node.
        order: of all passes.
        unreached: slices to which no gradients come, of plans that keep any parameters gathered.
    """

    parts: Sequence[Part]
    kinds: Kinds
    holders: Holders
    sums_take_buffers: bool
    only_replica_groups_take_buffers: bool
    buffers_are_small: bool
    gradient_width: float
    shares_out: bool
    on_cpu: bool
    order: PassOrder
    unreached: Set[int] = frozenset()


class Iteration:
    """One device's iteration, op by op."""

    def __init__(
        self,
        setting: Setting,
        roles: Sequence[Role],
        passes: Sequence[Pass] | None,
        held: Mapping[int, Held],
        *,
        keeps_own: bool,
    ) -> None:
        """`roles`: in the order in which the device runs them forward. `passes`: all in its order, by index
        of the slice; None: all forward, then all backward in reverse. `held`: by kind. `keeps_own`: gradients
        that are not shared are there from the batch before.
        """
        self._setting = setting
        self._roles = roles
        self._passes = passes
        self._held = held
        self._keeps_own = keeps_own
        self._own_bytes = {kind: there.own_bytes for kind, there in held.items()}
        self._made: set[int] = set(held) if keeps_own else set()
        self._fullest = Fullest()
        self._width = setting.gradient_width
        self._gradients = 0.0
        if keeps_own:
            self._gradients = self._width * sum(there.count * there.own_bytes for there in held.values())
        self._joins = any(there.num_fragments > there.least_tp for there in held.values())
        self._fields = self._loaded()
        self._received = 0.0
        self._kept = 0.0
        self._retained = 0.0  # gradients of what slices take in, until they have been used, or have left
        self._leaving_at: dict[int, float] = {}  # bytes of these, by the own pass before which they go
        self._own_numbers: Sequence[int] = ()
        self._leaving = 0.0  # of the op whose activations are copied out
        self._back = 0.0  # of ops whose activations have been copied back, or are
        self._in_host = self.most_in_host = 0.0
        self._whole = 0.0  # gradients that a backward pass makes before they are scattered
        self._shared: dict[object, SharedOut | None] = {}  # by runs of kinds
        self._gathered = KeptGathered(held, setting.kinds, setting.unreached)
        self._casts = KeptCasts(
            passes or (),
            {setting.parts[index].slice_index: setting.parts[index] for index, *_ in roles},
            setting.kinds,
            are_kept=not any(there.sharding.is_by_pass for there in held.values()),
        )
        self._handed_on = HandedOn(held, setting.kinds)
        self._summing = 0.0
        self._sums_at_most = 0.0
        if setting.sums_take_buffers:
            largest = max(
                (
                    self._buffer_of(there)
                    for there in held.values()
                    if not setting.buffers_are_small or there.num_replica_groups > 1
                ),
                default=0.0,
            )
            self._sums_at_most = max(SUM_BUFFER_BYTES, self._width * largest)

    def run(self, unshared: float, update: float, *, by_parts: bool = False) -> list[PassBytes]:
        """Go through the iteration pass by pass, the optimizer's update last; `unshared`: bytes of gradients
        that no other device has, `update`: what the update takes. `by_parts`: some parameters are updated
        while sums, and what is on its way back, are still there. Which ones is not looked at: no part takes
        more than the whole.
        """
        passes = self._mirrored() if self._passes is None else self._in_order(self._passes)
        early, handed_on = update if by_parts else 0.0, self._handed_on.num_bytes
        self._fullest.see(unshared, self._fields, self._retained + self._sums() + early + handed_on)
        self._fullest.see(unshared, self._fields, update + handed_on)
        self._fullest.see(unshared, self._fields, self._handed_on.at_first)
        left = Fullest()
        left.see(unshared if self._keeps_own else 0.0, 0.0, self._handed_on.at_first)
        passes.append(PassBytes(None, is_backward=False, fullest=self._fullest, after=left))
        return passes

    def _mirrored(self) -> list[PassBytes]:
        """Go through all slices forward, then backward in reverse. What a slice receives has its place before
        the first one runs in that direction.
        """
        passes: list[PassBytes] = []
        indices = [self._setting.parts[role[0]].slice_index for role in self._roles]
        order = [
            *(Pass(index, False) for index in indices),
            *(Pass(index, True) for index in reversed(indices)),
        ]
        self._own_numbers = [self._setting.order.place_of(pass_) for pass_ in order]
        self._received = sum(received for *_, received, _ in self._roles)
        for role, index in zip(self._roles, indices, strict=True):
            self._forward(role)
            passes.append(self._end_pass(index, is_backward=False))
        self._received += sum(returned for *_, returned in self._roles)
        self._sum_of_others()
        for number, role in enumerate(reversed(self._roles), len(indices)):
            self._retained -= self._leaving_at.get(number, 0.0)
            self._backward(role)
            passes.append(self._end_pass(self._setting.parts[role[0]].slice_index, is_backward=True))
        return passes

    def _in_order(self, order: Sequence[Pass]) -> list[PassBytes]:
        """Go through the passes in an order of their own. What one receives has its place from `PASSES_AHEAD`
        before it on; what is small, from the start.
        """
        passes: list[PassBytes] = []
        self._own_numbers = [self._setting.order.place_of(pass_) for pass_ in order]
        role_of = {self._setting.parts[role[0]].slice_index: role for role in self._roles}
        taken = [role_of[index][3 if is_backward else 2] for index, is_backward in order]
        self._received = sum(size for size in taken if size <= EARLY_BYTES)
        waiting = [size if size > EARLY_BYTES else 0.0 for size in (*taken, *[0.0] * PASSES_AHEAD)]
        self._received += sum(waiting[:PASSES_AHEAD])
        self._sum_of_others()
        for number, (index, is_backward) in enumerate(order):
            self._retained -= self._leaving_at.get(number, 0.0)
            self._received += waiting[number + PASSES_AHEAD]
            if is_backward:
                self._backward(role_of[index])
            else:
                self._forward(role_of[index])
            passes.append(self._end_pass(index, is_backward=is_backward))
        return passes

    def _sum_of_others(self) -> None:
        """Count what other plans' slices alone hold as being summed: it is whenever the others are ready."""
        self._summing = sum(
            self._width * there.count * self._buffer_of(there)
            for there in self._held.values()
            if there.last_part < 0 and there.is_due
        )

    def _end_pass(self, slice_index: int, *, is_backward: bool) -> PassBytes:
        self._leaving = 0.0  # a pass ends when nothing is on its way out any more
        after = Fullest()
        after.see(self._gradients, self._held_of_ops(), self._buffers())
        fullest, self._fullest = self._fullest, Fullest()
        return PassBytes(slice_index, is_backward, fullest, after)

    def _loaded(self) -> float:
        """Bytes of the batches' fields: on GPUs of two batches, as the next one is copied ahead."""
        fields: dict[str, int] = {}
        share: dict[str, float] = {}
        for index, *_ in self._roles:
            part = self._setting.parts[index]
            if part.fields:
                fields[part.task] = fields.get(part.task, 0) + part.fields
                share[part.task] = max(share.get(part.task, 0.0), 1 / part.shares)
        batches = 1 if self._setting.on_cpu else 2
        return batches * sum(size * share[task] for task, size in fields.items())

    def _forward(self, role: Role) -> None:
        part = self._setting.parts[role[0]]
        runs = self._setting.kinds.runs[part.slice_index]
        gathered, handed_on = self._gathered, self._handed_on
        self._casts.begin_forward(part)
        buffers = self._buffers()
        self._see(0.0, buffers)
        gathered.begin_forward(part)
        casts = 0.0
        if gathered.is_any:
            buffers = self._buffers()
        for run in runs:
            if gathered.is_any or handed_on.is_any:
                gathered.come_to(run)
                handed_on.come_to(part, run)
                buffers = self._buffers()
            needs, keeping, num_ops = part.needs[run.segment][1], run.keeping, run.num_ops
            kept = needs.kept if keeping is Keeping.ALL else part.kept_of(needs, keeping)
            casts += 0.0 if keeping.has_casts else num_ops * needs.cast
            is_offloaded = part.moves_out and keeping.is_offloaded
            if is_offloaded:
                self._see(needs.forward + casts, buffers)
                self._move_out(part, run)
            self._kept += (num_ops - 1) * kept
            self._see(needs.forward + casts, buffers)
            self._kept += kept
            if is_offloaded and not self._setting.on_cpu:
                self._leaving = self._moved_bytes(part, run)
        gathered.end_forward()
        if self._joins:
            self._kept += sum(
                run.num_ops * self._joined(part, run) for run in runs if run.keeping is Keeping.ALL
            )
        if part.edges:
            self._kept += part.edges
            self._see(0.0, self._buffers())

    def _backward(self, role: Role) -> None:
        index, _, received, returned = role
        part = self._setting.parts[index]
        runs = self._setting.kinds.runs[part.slice_index]
        held, made = self._held, self._made
        shared = self._shared_out(index)
        self._retain(part, by_every_op=True)
        moved = [run for run in runs if run.keeping.is_offloaded] if part.moves_out else []
        self._bring_back(part, moved)
        lasting = self._lasting_buffers()
        scattering = 0.0
        for run in reversed(runs):
            made_bytes = sum(self._own_bytes[kind] for kind in run.kinds if kind not in made)
            running, gone = self._running_and_gone(part, run, made_bytes)
            if shared is not None:
                self._whole = self._width * shared.gradients[run.position]
                scattering = self._scattering(shared.under_way[run.position])
            is_offloaded = part.moves_out and run.keeping.is_offloaded
            if is_offloaded:
                moved.pop()
                self._use_moved(part, run, moved)
            summing = self._summing_of(run, index)
            made_bytes *= self._width
            self._see(running, lasting + self._sums() + part.handed + scattering)
            self._advance(run.num_ops - 1, gone, made_bytes, summing)
            if run.num_ops > 1:
                self._see(running, lasting + self._sums() + part.handed + scattering)
            self._advance(1, gone, made_bytes, summing)
            if is_offloaded:
                self._in_host -= run.num_ops * in_blocks(self._moved_bytes(part, run))
                self._bring_back(part, moved)
            made.update(kind for kind in run.kinds if held[kind].count == 1)
        made.update(self._setting.kinds.used[part.slice_index])
        self._kept -= part.edges
        self._retain(part, by_every_op=False)
        if shared is not None:
            self._whole = self._width * shared.left
            self._see(0.0, self._buffers() + self._scattering(shared.left))
            self._whole = 0.0
        self._gathered.end_backward(part)
        self._kept -= self._casts.end_backward(part)
        self._received -= received + returned

    def _running_and_gone(self, part: Part, run: Run, made_bytes: float) -> tuple[float, float]:
        """The bytes that each op of a run takes while it runs backward, beyond what it has kept, and those
        that are free behind it. `made_bytes`: as for `_backward_bytes`.
        """
        needs, keeping = part.needs[run.segment][1], run.keeping
        joined = self._joined(part, run)
        running = self._backward_bytes(needs, run, made_bytes) if made_bytes else needs.backward
        gone = needs.kept + joined if keeping is Keeping.ALL else part.kept_of(needs, keeping)
        if keeping in (Keeping.INPUTS, Keeping.SELECTED):
            running = joined + part.while_recomputed(needs, keeping, running)
        return running, gone - self._casts.staying(part, run)

    def _retain(self, part: Part, *, by_every_op: bool) -> None:
        """Have gradients of what a slice takes in: until the first pass behind the backward pass of the slice
        that has made it, which takes them, and `PASSES_AHEAD` more where they are sent, as that pass may wait
        for them still; where none comes behind it, to the end.
        """
        for num_bytes, taken in part.taken:
            if taken.by_every_op == by_every_op:
                taken_at = self._setting.order.backward_at[taken.producer]
                place = bisect_right(self._own_numbers, taken_at) + (0 if taken.stays else PASSES_AHEAD)
                self._leaving_at[place] = self._leaving_at.get(place, 0.0) + num_bytes
                self._retained += num_bytes

    def _moved_bytes(self, part: Part, run: Run) -> float:
        """Bytes of each op of a run that are copied out and back."""
        return part.needs[run.segment][1].kept + self._joined(part, run)

    def _move_out(self, part: Part, run: Run) -> None:
        """Come to the last op of a run. While it runs, what the one before it has made is on its way out; on
        CPUs a copy is made at once.
        """
        moved = self._moved_bytes(part, run)
        if run.num_ops > 1 and not self._setting.on_cpu:
            self._leaving = moved
        self._in_host += run.num_ops * in_blocks(moved)
        self.most_in_host = max(self.most_in_host, self._in_host)

    def _bring_back(self, part: Part, moved: Sequence[Run]) -> None:
        """Have what the last of these runs needs next on its way back."""
        self._back = self._moved_bytes(part, moved[-1]) if moved else 0.0

    def _use_moved(self, part: Part, run: Run, before: Sequence[Run]) -> None:
        """The ops of a run go backward: beside what one needs, that of its neighbour is on its way back."""
        run_bytes = self._moved_bytes(part, run)
        is_neighbour = bool(before) and before[-1].position + before[-1].num_ops == run.position
        following = self._moved_bytes(part, before[-1]) if is_neighbour else 0.0
        self._back = run_bytes + (max(run_bytes, following) if run.num_ops > 1 else following)

    def _held_of_ops(self) -> float:
        """What is there of ops between their forward and their backward passes, with the batches' fields."""
        here = self._kept + self._casts.num_bytes + self._leaving + self._back + self._fields
        return here + self._in_host if self._setting.on_cpu else here

    def _summing_of(self, run: Run, index: int) -> float:
        """Bytes of gradients of each op whose sum can start behind it; 0 where sums take no buffers."""
        if not self._sums_at_most:
            return 0.0
        return self._width * sum(
            self._buffer_of(self._held[kind]) for kind in run.completes if self._held[kind].last_part == index
        )

    def _advance(self, ops: int, gone: float, made: float, summing: float) -> None:
        """Take note of what has come and gone behind the backward pass of so many ops."""
        self._kept -= ops * gone
        self._gradients += ops * made
        self._summing += ops * summing

    def _shared_out(self, index: int) -> SharedOut | None:
        """What a slice holds of shared-out gradients, worked out once for all slices that use the same
        parameters in the same way.
        """
        if not self._setting.shares_out:
            return None
        part = self._setting.parts[index]
        alike = tuple((run.num_ops, run.kinds) for run in self._setting.kinds.runs[part.slice_index])
        if alike not in self._shared:
            kind_of = self._setting.kinds.kind_of
            held = {use.block: self._held[kind_of[use.block]] for of_op in part.uses for use in of_op}
            self._shared[alike] = shared_out(part.uses, held)
        return self._shared[alike]

    def _scattering(self, under_way: float) -> float:
        """What a scatter takes beside its gradients."""
        if not self._setting.sums_take_buffers or self._setting.only_replica_groups_take_buffers:
            return 0.0
        taken = self._width * under_way
        return min(taken, SUM_BUFFER_BYTES) if self._setting.buffers_are_small else taken

    def _backward_bytes(self, needs: OpNeeds, run: Run, made: float) -> float:
        """Bytes that each op takes backward with the gradients that it makes: `made` bytes in parameters'
        width of parameters that the device alone holds.
        """
        trained = sum(self._held[kind].share * use.trained_bytes for kind, use in run.uses)
        new = made / trained if trained else 0.0
        return needs.backward + new * (needs.first_backward - needs.backward)

    def _joined(self, part: Part, run: Run) -> float:
        """Bytes of each op's copies of parameters that the device holds in finer fragments than the slice
        uses.
        """
        if not self._joins:
            return 0.0
        return sum(
            use.num_bytes / use.parts(part.tp)
            for kind, use in run.uses
            if use.block[2] and self._held[kind].num_fragments > use.parts(part.tp)
        )

    def _buffer_of(self, there: Held) -> float:
        """Bytes of the buffer of the sum of a block's gradients that goes once around in a step."""
        is_taken = there.num_replica_groups > 1 or not self._setting.only_replica_groups_take_buffers
        return there.summed_bytes if is_taken else 0.0

    def _lasting_buffers(self) -> float:
        """What was received, what is on its way back, what is kept gathered, and what has been handed on."""
        return self._received + self._retained + self._gathered.num_bytes + self._handed_on.num_bytes

    def _buffers(self) -> float:
        """All buffers: the lasting ones, and what sums under way take."""
        return self._lasting_buffers() + self._sums()

    def _sums(self) -> float:
        return min(self._summing, self._sums_at_most)

    def _see(self, running: float, buffers: float) -> None:
        self._fullest.see(self._gradients + self._whole, self._held_of_ops() + running, buffers)
