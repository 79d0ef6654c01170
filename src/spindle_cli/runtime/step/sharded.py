"""Go through the ops of a pass with what devices share out: fetched ahead of the ops that use it, given up
behind them, gradients summed op by op.

All devices of a slice go through the same ops, so that each gathers and sums at the same place of its pass.
What comes next is fetched while an op runs; one sum at a time is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spindle_cli.operators.tensor_group import Shared
from spindle_cli.program.types import Program
from spindle_cli.runtime.communication.flat_bucket import FrozenBucket
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.communication.pass_bucket import PassBucket

if TYPE_CHECKING:
    from torch import Tensor


AnyBucket = PassBucket | FrozenBucket


@dataclass(frozen=True)
class Use:
    """A bucket that a slice uses from its op `first` to its op `last`; `is_reached`: in its backward pass
    too, as gradients come to the slice.
    """

    bucket: AnyBucket
    first: int
    last: int
    is_reached: bool = True


class Uses:
    """All that a slice, of ops [first, last), uses of what is shared out; the same order on all devices.

    `is_reached`: its backward pass uses it too.
    """

    def __init__(self, uses: Iterable[Use], ops: tuple[int, int]) -> None:
        self.first_op, self.behind = ops
        self._by_first: dict[int, list[AnyBucket]] = {}
        self._by_last: dict[int, list[AnyBucket]] = {}
        self.is_reached = False
        for use in uses:
            self._by_first.setdefault(use.first, []).append(use.bucket)
            self._by_last.setdefault(use.last, []).append(use.bucket)
            self.is_reached |= use.is_reached

    def __bool__(self) -> bool:
        return bool(self._by_first)

    def from_op(self, op: int) -> Sequence[AnyBucket]:
        """The buckets that an op is the first to use."""
        return self._by_first.get(op, ())

    def until_op(self, op: int) -> Sequence[AnyBucket]:
        """The buckets that an op is the last to use."""
        return self._by_last.get(op, ())


def uses_in(program: Program, rank: int, pool: GradientPool, part: int) -> dict[int, Uses]:
    """By slice of a program what its passes use of what is shared out, on one rank; of all that it runs.
    `part`: of the pool, the program's groups.
    """
    uses_by_slice: dict[int, list[Use]] = {
        index: [] for index, slice_ in enumerate(program.slices) if rank in slice_.devices
    }
    groups = [group for group in program.groups if group.sharding.is_by_pass and rank in group.devices]
    # What few devices share comes first on all of them, so that none waits for another in a circle.
    for group in sorted(groups, key=lambda group: (len(group.in_replica_group(rank).devices), group.index)):
        for bucket in pool.in_passes(part, group.index):
            for slice_index, first, last in zip(group.slices, group.first_ops, group.last_ops, strict=True):
                if slice_index in uses_by_slice:  # else another replica group's
                    uses_by_slice[slice_index].append(Use(bucket, first, last, program.reached[slice_index]))
    return {index: Uses(uses, program.slices[index].ops) for index, uses in uses_by_slice.items()}


class ForwardWalk:
    """A slice's ops from the first to the last."""

    def __init__(self, uses: Uses, *, keeps: bool = False) -> None:
        """`keeps`: a backward pass will follow, for which what is to be kept stays there, if it uses it."""
        self._uses = uses
        self._keeps = keeps and uses.is_reached

    def enter(self, op: int) -> None:
        """Have what an op uses there, and what the next one does on its way."""
        if op == self._uses.first_op:
            self._start_all(op)
        for bucket in _fetched(self._uses.from_op(op)):
            bucket.finish_fetch()
        self._start_all(op + 1)

    def leave(self, op: int) -> None:
        """Give up what no later op uses; but not what another slice keeps for its own backward pass."""
        for bucket in _fetched(self._uses.until_op(op)):
            if not bucket.is_kept:
                bucket.give_up()
            elif not self._keeps:
                bucket.end_keeping()

    def _start_all(self, op: int) -> None:
        for bucket in _fetched(self._uses.from_op(op)):
            if bucket.is_kept:
                bucket.start_keeping()
            else:
                bucket.start_fetch()

    def through(self) -> None:
        """Take part in a pass of the others, with no samples."""
        for op in range(self._uses.first_op, self._uses.behind):
            self.enter(op)
            self.leave(op)


class BackwardWalk:
    """A slice's ops from the last to the first, once its backward pass runs."""

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        self._at: int | None = None  # the op that runs
        self._summed: PassBucket | None = None  # whose sum is under way

    def watch(self, op: int, outputs: Iterable[Tensor | Shared]) -> None:
        """Come to an op as soon as its backward pass begins: when the gradient of any of its outputs is
        complete. Autograd runs what was made later first, so all later ops are through then.
        """
        if not self._uses.is_reached:
            return
        for value in outputs:
            tensor = value.tensor if isinstance(value, Shared) else value
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self.reach(op))  # type: ignore[no-untyped-call]  # torch: untyped

    def begin(self) -> None:
        """The pass begins, with its last op; without gradients there is nothing to go through."""
        if not self._uses.is_reached:
            return
        _start_all(self._uses.until_op(self._uses.behind - 1))
        self._enter(self._uses.behind - 1)

    def reach(self, op: int) -> None:
        """All ops behind this one are through. Those without gradients are gone through as well, as the other
        devices may come to them.
        """
        while self._at is not None and self._at > op:
            self._leave(self._at)
            self._enter(self._at - 1)

    def end(self) -> None:
        """The pass is through, and so are its sums."""
        if not self._uses.is_reached:
            return
        self.reach(self._uses.first_op)
        self._leave(self._uses.first_op)
        self._at = None
        self._finish_sum()

    def _enter(self, op: int) -> None:
        self._at = op
        for bucket in self._uses.until_op(op):
            if bucket.is_fetched and not bucket.is_kept:
                bucket.finish_fetch()
            if isinstance(bucket, PassBucket):
                bucket.open_gradients()
        _start_all(self._uses.until_op(op - 1))

    def _leave(self, op: int) -> None:
        for bucket in self._uses.from_op(op):
            if bucket.is_kept:
                bucket.end_keeping()
            elif bucket.is_fetched:
                bucket.give_up()
            if isinstance(bucket, PassBucket):
                self._finish_sum()
                bucket.start_scatter()
                self._summed = bucket

    def _finish_sum(self) -> None:
        if self._summed is not None:
            self._summed.finish_scatter()
            self._summed = None


def _fetched(buckets: Iterable[AnyBucket]) -> Iterator[AnyBucket]:
    return (bucket for bucket in buckets if bucket.is_fetched)


def _start_all(buckets: Iterable[AnyBucket]) -> None:
    for bucket in _fetched(buckets):
        if not bucket.is_kept:
            bucket.start_fetch()
