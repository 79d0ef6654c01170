"""Plans of micro-batches: the plan of one micro-batch of each task, run as often as there are of them, on the
same devices, so that no device holds more parameters for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spindle_cli.account.activations import edges_between, pass_order
from spindle_cli.account.types import Pass
from spindle_cli.plan.best.micro_batches import MicroBatched
from spindle_cli.plan.ordering.orders import as_they_come, in_groups, mirrored
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.schedule import placed_slices
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, fastest
from spindle_cli.plan.types import Slice


def in_rounds(cut: MicroBatched, one: EvaluatedCandidate) -> EvaluatedCandidate | None:
    """All micro-batches by the plan of one of each task: round after round in its order, or in an order of
    all their passes that is faster. None if no order fits the devices' memory.
    """
    slices = _repeated(cut, one.slices)
    orders = [
        tuple(_round_after_round(cut, one.slices, slices)),
        tuple(mirrored(range(len(slices)))),
        *(as_they_come(cut.all, slices, longest_first=longest) for longest in (True, False)),
        *in_groups(cut.all, slices),
    ]
    candidates = (timed(cut.all, slices, order) for order in dict.fromkeys(orders))
    return fastest(cut.all, one.strategy, candidates)


def _repeated(cut: MicroBatched, one: Sequence[Slice]) -> tuple[Slice, ...]:
    """The slices of all rounds, in order of start; the passes have no times of their own."""
    round_s = max(slice_.last_s for slice_ in one)
    repeated = []
    for number in range(max(cut.counts.values(), default=1)):
        for slice_ in one:
            if number < cut.count_of(slice_):
                times = {
                    "start_s": slice_.start_s + number * round_s,
                    "end_s": slice_.end_s + number * round_s,
                    "backward_start_s": None,
                    "backward_end_s": None,
                }
                repeated.append(cut.numbered(slice_, number).model_copy(update=times))
    return tuple(sorted(repeated, key=lambda slice_: slice_.start_s))


def _round_after_round(cut: MicroBatched, one: Sequence[Slice], slices: Sequence[Slice]) -> Iterator[Pass]:
    """All passes: of each round in the order that its plan has them."""
    place = {(slice_.metaop, slice_.ops): index for index, slice_ in enumerate(slices)}
    edges = edges_between(one, cut.one.by_name)
    order = pass_order(placed_slices(cut.first, tuple(one)), edges)
    for number in range(max(cut.counts.values(), default=1)):
        for index, is_backward in order:
            slice_ = one[index]
            if number < cut.count_of(slice_):
                yield Pass(place[cut.numbered(slice_, number).metaop, slice_.ops], is_backward)
