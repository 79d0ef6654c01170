"""What a device gathers of parameters that stay from a slice's forward pass to its backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

from spindle_cli.account.device.parts import Kinds, Part, Run
from spindle_cli.account.holdings import Held
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
        self._is_any = any(there.kept_bytes for there in held.values())
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
        if self._is_any and part.piece in self._unreached:
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
        if self._is_any:
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
