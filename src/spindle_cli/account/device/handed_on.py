"""What teams hand each other of what they have stepped: in buffers from the update of the last step on."""

from __future__ import annotations

from collections.abc import Mapping

from spindle_cli.account.device.parts import Kinds, Part, Run
from spindle_cli.account.holdings import Held
from spindle_cli.costs.parameters.blocks import Block


class HandedOn:
    """Bytes of it, from pass to pass.

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
        """Whether anything of it is left."""
        return bool(self._waiting)

    def come_to(self, part: Part, run: Run) -> None:
        """Ops of a slice run forward."""
        for of_op in part.uses[run.position : run.position + run.num_ops + 1]:
            for use in of_op:
                self.num_bytes -= self._waiting.pop(use.block, 0.0)
