"""Whether a plan leaves batches whole where ops need all of their samples: it may be written by hand."""

from __future__ import annotations

from collections.abc import Iterable

from spindle_cli.errors import InputError
from spindle_cli.runtime.communication.wiring import WiredSlice
from spindle_cli.workload.graph import Op, TaskGraph
from spindle_cli.workload.splitting.shared_statistics import changes_buffers


def require_whole_batches(slices: Iterable[WiredSlice], where: str) -> None:
    """Refuse slices that are given a part of a batch of which one of their ops needs all.

    Args:
        slices: of all ranks.
        where: the plan's file.

    Raises:
        InputError: naming the slice, and why it needs its batch.
    """
    for wired in slices:
        cuts = wired.layout.micro_batch[1]
        for op in wired.ops if wired.layout.is_shared else ():
            why = _why_whole(wired.task, op, is_in_micro_batches=cuts > 1)
            if why is not None:
                part = f"1/{cuts} of its batch" if cuts > 1 else f"a batch in {wired.layout.dp} shares"
                name = op.target or "its loss"
                raise InputError(
                    f"{where}: slice {wired.piece.label} is given {part}, and {name} {why}",
                    hint="Plan again from a profile of this workload, which says what may be cut.",
                )


def _why_whole(task: TaskGraph, op: Op, *, is_in_micro_batches: bool) -> str | None:
    """Why an op needs all samples at once; None if it does not."""
    if op.coupled:
        return "computes what depends on all of its samples"
    if is_in_micro_batches and op.talks:
        return "sums or gathers something over all of its samples"
    if is_in_micro_batches and changes_buffers(task, op):
        return "changes buffers with every batch"
    return None
