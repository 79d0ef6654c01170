"""What stays between passes of what a device makes of parameters: what it gathers, and what it casts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

from spindle_cli.account.device.parts import Kinds, Part, Run
from spindle_cli.account.holdings import Held
from spindle_cli.account.types import Pass
from spindle_cli.costs.parameters.blocks import Block


class KeptGathered:
    """Bytes of it, from pass to pass.

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
        """A slice's forward pass begins."""
        if self.is_any and part.piece in self._unreached:
            self._of_ops = self._beside_ops(part)
            return
        for block, num_bytes in self._blocks(part):
            self._kept += 0.0 if self._open[block] else num_bytes
            self._open[block] += 1

    def come_to(self, run: Run) -> None:
        """Ops of it run: the most that is there beside any of them."""
        if self._of_ops:
            self._passing = max(self._of_ops[run.position : run.position + run.num_ops])

    def end_forward(self) -> None:
        """All its ops have run."""
        self._of_ops, self._passing = (), 0.0

    def end_backward(self, part: Part) -> None:
        """A slice's backward pass ends."""
        if part.piece in self._unreached:
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

    def _beside_ops(self, part: Part) -> Sequence[float]:
        """Of a slice that keeps nothing, what is gathered for each op and the one behind it."""
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
            for piece, is_backward in order:
                if not is_backward:
                    self._to_come.update(kinds.trained[parts[piece].piece])
        self._of_ops: dict[tuple[tuple[int, ...], int], float] = {}  # by kinds, and the first op's place

    def begin_forward(self, part: Part) -> None:
        """A slice takes over the casts of what it uses."""
        if not self.are_kept:
            return
        used = self._kinds.trained[part.piece]
        self._to_come.subtract(used)
        if self._of_ops:
            self._of_ops = {ops: size for ops, size in self._of_ops.items() if used.isdisjoint(ops[0])}
            self.num_bytes = sum(self._of_ops.values())

    def staying(self, part: Part, run: Run) -> float:
        """Of each op of a run, what does not go with its backward pass, as a later forward pass uses it."""
        if not self.are_kept or not any(self._to_come[kind] > 0 for kind in run.trained):
            return 0.0
        return part.needs[run.segment][1].cast

    def end_backward(self, part: Part) -> float:
        """Bytes of the slice's casts that stay, which its ops have no longer."""
        if not self.are_kept:
            return 0.0
        found = {
            (run.kinds, run.position): run.num_ops * size
            for run in self._kinds.runs[part.piece]
            if (size := self.staying(part, run))
        }
        if found:
            self._of_ops |= found
            self.num_bytes = sum(self._of_ops.values())
        return sum(found.values())
