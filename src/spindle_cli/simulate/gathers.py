"""Parameters on their way at the begin of a step: which op of a slice has to wait for them."""

from __future__ import annotations

from spindle_cli.program.types import Program


class AwaitedOps:
    """The gathers of the step before that are not through, by who waits for them where."""

    def __init__(self, program: Program) -> None:
        self._pending: set[int] = set()
        self._groups: dict[tuple[int, int], dict[int, list[int]]] = {}  # (device, slice) -> op -> groups
        if not program.settings.sharded:
            return
        for group in program.groups:
            if not group.is_handed_on:
                continue
            self._pending.add(group.index)
            for piece, op in group.awaited_ops(program.slices):
                for device in set(program.slices[piece].devices).intersection(group.devices):
                    by_op = self._groups.setdefault((device, piece), {})
                    by_op.setdefault(op, []).append(group.index)

    def end(self, group: int) -> None:
        """A group's parameters are there."""
        self._pending.discard(group)

    def next_op(self, device: int, piece: int, first: int) -> int | None:
        """The first of a slice's ops from `first` on that still waits for parameters on a device."""
        if not self._pending:
            return None
        waiting = (
            op
            for op, groups in self._groups.get((device, piece), {}).items()
            if op >= first and not self._pending.isdisjoint(groups)
        )
        return min(waiting, default=None)
