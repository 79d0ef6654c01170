"""The predicted iteration: the schedule, and what transfers and collectives add to it.

A plain account of a step, slice by slice: forward in the order of the schedule, backward in reverse, messages
between them in every batch (`passes.py`); behind the last batch's backward pass the gradient sums, each when
it is complete, then the optimizer's step; where the devices of a sum share the optimizer's state, the gathers
of what they have updated, before the first batch's forward pass uses it. A device takes part in one sum or
gather at a time, and so does a network card that several devices share. What moves is said by
`account/traffic.py`. (`spindle simulate` is a finer and independent account of when.)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heapreplace
from typing import NamedTuple

from spindle_cli.account.step_end import own_bytes, together_s, update_parts, updates_early
from spindle_cli.account.traffic import Traffic, products_s
from spindle_cli.account.types import Collective, ParameterGroup, Together
from spindle_cli.costs.links import Spread, per_node
from spindle_cli.plan.placing.card_loads import CardLoads
from spindle_cli.plan.placing.passes import BothPasses, Passes, Times
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.types import Slice


@dataclass(frozen=True)
class Prediction:
    """Seconds of an iteration: of one batch, on average over those of a step.

    Attributes:
        iteration_s: all of it: `compute_s` plus the other five.
        compute_s: the schedule alone.
        transfer_s: added by transfers, and by forward and backward passes that do not fit each other as their
            sums do.
        processor_s: added by what communication, reading samples and the runtime take of the processor that
            computes too.
        gradient_sum_s: added by gradient sums with what belongs to them, and by gathers of what they have
            updated.
        optimizer_s: added by the optimizer's step.
        held_up_s: added by what nothing else accounts for, where runs have shown how much that is.
    """

    iteration_s: float
    compute_s: float
    transfer_s: float
    processor_s: float
    gradient_sum_s: float
    optimizer_s: float
    held_up_s: float = 0.0

    @property
    def beyond_compute(self) -> float:
        """The share of the iteration that messages and sums add, with what they take of the processor."""
        return (self.transfer_s + self.processor_s + self.gradient_sum_s) / self.iteration_s


def predict(
    problem: Problem, slices: Sequence[Slice], traffic: Traffic, compute_s: float, steps_s: Sequence[float]
) -> Prediction:
    """Predict the iteration of a placed schedule that takes `compute_s` by itself.

    Args:
        slices: in order of start.
        traffic: what they move.
        steps_s: the optimizer's step on each device, to which the products of gathered factors are added;
            where parts may be updated early, each takes its share.
    """
    batches = problem.profile.accumulate
    passes, together = Passes(problem, slices, traffic), _Collectives(problem, slices, traffic)
    plain = passes.run({})
    plain_s = max(compute_s, *plain.backward.free_s)
    gathered, gathers_s = plain, together.no_gathers_s
    if together.has_gathers:
        not_before_s, gathers_s = together.gathered_s(plain, passes.forward_s)
        gathered = passes.run(not_before_s)
    first_s = max(plain_s, *gathered.backward.free_s)
    last, last_s = (gathered, first_s) if batches == 1 else (plain, plain_s)
    before_s = gathers_s if batches == 1 else together.no_gathers_s
    told_s = together.told_s(last)
    sums_s, ready_s = together.ready_to_step_s(last, told_s, before_s)
    with_sums_s = max(last_s, *ready_s)
    if updates_early(traffic.plan):
        passed_s = [max(told_s, free_s) for free_s in last.backward.free_s]
        with_step_s = max(with_sums_s, *updated_s(traffic.groups, passed_s, sums_s, steps_s, together.kinds))
    else:
        products = products_s(traffic.groups, problem.num_devices)
        device_steps = zip(ready_s, steps_s, products, strict=True)
        with_step_s = max(with_sums_s, *(ready + (step + product) for ready, step, product in device_steps))
    added_s = first_s - plain_s + with_sums_s - last_s
    moved_s = max(compute_s, min(plain_s, passes.without_processor_s())) if passes.is_stretched else plain_s
    accounted_s = plain_s + (added_s + with_step_s - with_sums_s) / batches
    calibration = problem.profile.calibration
    held_up_s = accounted_s * calibration.held_up if calibration is not None else 0.0
    return Prediction(
        iteration_s=accounted_s + held_up_s,
        compute_s=compute_s,
        transfer_s=moved_s - compute_s,
        processor_s=plain_s - moved_s,
        gradient_sum_s=added_s / batches,
        optimizer_s=(with_step_s - with_sums_s) / batches,
        held_up_s=held_up_s,
    )


# What some devices do together; in the other collectives all take part.
_OF_SOME = (Collective.SUM, Collective.FLAGS, Collective.GATHER)


class _Free(NamedTuple):
    """`since_s`: when each kind (`_Collectives`) is free. `loads`: what messages leave of cards."""

    since_s: list[float]
    loads: CardLoads


class _Collectives:
    """The collectives of a step. `kinds`: of devices, by those in which they take part.

    Devices that take part in the same of them are of one kind, and free at the same time. A network card that
    several devices of a node share is a kind, too: what crosses nodes through it goes one after another.
    """

    def __init__(self, problem: Problem, slices: Sequence[Slice], traffic: Traffic) -> None:
        self._cluster = problem.cluster
        self._slices = slices
        self._groups = traffic.groups
        self._summed_in = _summed_in_passes(traffic.groups)
        by_pass = {index for indices in self._summed_in.values() for index in indices}
        self._has_room = [
            layout.tp == 1 and not layout.sums_shares and index not in by_pass
            for index, layout in enumerate(traffic.layouts)
        ]
        self._run_by: list[list[int]] = [[] for _ in range(problem.num_devices)]
        for index, slice_ in enumerate(slices):
            for device in slice_.devices:
                self._run_by[device].append(index)
        self._of_kind: Mapping[Collective, Sequence[Together]] = {
            kind: [collective for collective in traffic.collectives if collective.kind is kind]
            for kind in Collective
        }
        self.has_gathers = bool(self._of_kind[Collective.GATHER])
        self._number_kinds(
            dict.fromkeys(
                collective.devices for collective in traffic.collectives if collective.kind in _OF_SOME
            )
        )
        self._known_s: dict[tuple[int, Spread, int, tuple[int, ...], bool], float] = {}
        self._spread: dict[tuple[int, ...], Spread] = {}

    def _number_kinds(self, sets_of_devices: Iterable[tuple[int, ...]]) -> None:
        """Number the kinds of devices, by the sets in which they take part in collectives."""
        taking_part: list[list[int]] = [[] for _ in range(self._cluster.num_devices)]
        of_devices = {devices: number for number, devices in enumerate(sets_of_devices)}
        for devices, number in of_devices.items():
            for device in devices:
                taking_part[device].append(number)
        kinds = {part: kind for kind, part in enumerate(dict.fromkeys(map(tuple, taking_part)))}
        kind_of = [kinds[tuple(part)] for part in taking_part]
        of_card = {card: len(kinds) + place for place, card in enumerate(self._shared_cards())}
        self._num_kinds = len(kinds) + len(of_card)
        kinds_in = {
            devices: [
                *(kind for part, kind in kinds.items() if number in part),
                *sorted({of_card[card] for card in self._cards_of(devices) if card in of_card}),
            ]
            for devices, number in of_devices.items()
        }
        self.kinds = Kinds(kind_of, kinds_in)

    def _shared_cards(self) -> list[tuple[int, int]]:
        """Network cards that several devices have."""
        return [card for card, count in Counter(self._cluster.card_of).items() if count > 1]

    def _cards_of(self, devices: Sequence[int]) -> Iterable[tuple[int, int]]:
        """Through which some devices reach each other; inside a node none."""
        if self._cluster.is_inside_node(devices):
            return ()
        return (self._cluster.card_of[device] for device in devices)

    def told_s(self, last: BothPasses) -> float:
        """When all know the losses, whose sum starts when all have run forward; `last`: the last batch's
        passes.
        """
        (losses,) = self._of_kind[Collective.LOSSES]
        return last.forward_ended_s + self._seconds(losses)

    @property
    def no_gathers_s(self) -> list[float]:
        """When the gathers of each kind end if there are none."""
        return [0.0] * self._num_kinds

    def ready_to_step_s(
        self, last: BothPasses, told_s: float, gathers_s: Sequence[float]
    ) -> tuple[list[SumEnd], list[float]]:
        """When each sum ends, in their order, and when each device may update all of its parameters, after
        the last batch's passes.

        All wait for the sum of the losses, until `told_s`; each for its sums, and for the flags that follow
        them; where gradients are clipped or losses scaled, all for the sum that tells their norm, and whether
        one has overflowed.

        Args:
            gathers_s: when each kind's gathers for the same batch end; no sum of the kind starts earlier.
        """
        sums_s, summed_s = self._summed_s(last, gathers_s)
        ready_s = [max(told_s, *both) for both in zip(summed_s, last.backward.free_s, strict=True)]
        for norm in self._of_kind[Collective.NORM]:
            ready_s = [max(ready_s) + self._seconds(norm)] * len(ready_s)
        return sums_s, ready_s

    def _summed_s(self, last: BothPasses, gathers_s: Sequence[float]) -> tuple[list[SumEnd], list[float]]:
        """When each sum ends, in the order of the program, and the last one of each device; 0 where it takes
        part in none.
        """
        free = _Free(list(gathers_s), CardLoads(last.on_cards, self._cluster))
        in_order = self._in_order(last.backward, self._of_kind[Collective.SUM])
        end_of = {collective.group: end_s for collective, end_s in self._side_by_side(in_order, free)}
        sums_s: list[SumEnd] = []
        for _, collective in in_order:
            assert collective.group is not None, "a sum is of a group"
            sums_s.append(SumEnd(self._groups[collective.group], end_of[collective.group]))
        for flags in self._of_kind[Collective.FLAGS]:
            summed_in = self._summed_in.get(flags.devices, ())
            self._take(flags, max((last.backward.end_s[index] for index in summed_in), default=0.0), free)
        return sums_s, [free.since_s[kind] for kind in self.kinds.of_device]

    def _side_by_side(
        self, in_order: Iterable[tuple[float, Together]], free: _Free
    ) -> Iterator[tuple[Together, float]]:
        """Collectives of groups with when they end. Those of the same devices follow each other; those of
        others do not wait for these but where a device or card is busy: of those that can start at the same
        time, the devices' that have taken least time so far go first, as if they shared it.

        Args:
            in_order: in the order of the program, each with when it is ready.
            free: set anew.
        """
        queues: dict[tuple[int, ...], deque[tuple[float, Together]]] = {}
        for ready_s, collective in in_order:
            queues.setdefault(collective.devices, deque()).append((ready_s, collective))
        # A heap. Of each: when its first could start as far as known, no later than it can; the time taken.
        first = [(0.0, 0.0, number, queue) for number, queue in enumerate(queues.values())]
        while first:
            start_s, taken_s, number, queue = first[0]
            ready_s, collective = queue[0]
            earliest_s = self._start_s(collective, ready_s, free)
            if earliest_s > start_s:
                heapreplace(first, (earliest_s, taken_s, number, queue))
                continue
            end_s = self._take(collective, ready_s, free)
            queue.popleft()
            yield collective, end_s
            if queue:
                heapreplace(first, (end_s, taken_s + end_s - start_s, number, queue))
            else:
                heappop(first)

    def gathered_s(
        self, plain: BothPasses, forward_s: Sequence[float]
    ) -> tuple[dict[int, float], list[float]]:
        """When each slice may start forward so that what it uses has been gathered when it comes to it; and
        when the gathers of each kind end.

        Args:
            plain: a batch's passes.
            forward_s: of each slice, its forward pass.
        """
        free = _Free([0.0] * self._num_kinds, CardLoads(plain.on_cards, self._cluster))
        not_before_s: dict[int, float] = {}
        for collective, end_s in self._gathers(self._by_need(plain, forward_s), free):
            for index, before_s in self._uses(collective, forward_s):
                not_before_s[index] = max(not_before_s.get(index, 0.0), end_s - before_s)
        return not_before_s, free.since_s

    def _gathers(self, by_need: Sequence[Together], free: _Free) -> Iterator[tuple[Together, float]]:
        """Gathers with when they end: over NCCL one after another on a device, in their order; over gloo
        those of the same devices, the others side by side.
        """
        if self._cluster.talks_by == "nccl":
            return ((collective, self._take(collective, 0.0, free)) for collective in by_need)
        return self._side_by_side(((0.0, collective) for collective in by_need), free)

    def _by_need(self, plain: BothPasses, forward_s: Sequence[float]) -> list[Together]:
        """The gathers in the order in which any device comes to need them; of what is needed at once, first
        that whose sum was the last.
        """
        gathers = self._in_order(plain.backward, self._of_kind[Collective.GATHER][::-1])

        def needed_s(collective: Together) -> float:
            starts_s = plain.forward_starts_s
            return min(starts_s[index] + before_s for index, before_s in self._uses(collective, forward_s))

        return sorted((collective for _, collective in reversed(gathers)), key=needed_s)

    def _uses(self, collective: Together, forward_s: Sequence[float]) -> Iterator[tuple[int, float]]:
        """For each slice that uses a group, how long after its start it comes to it forward."""
        assert collective.group is not None, "a gather is of a group"
        for index, op in self._groups[collective.group].awaited_ops(self._slices):
            slice_ = self._slices[index]
            yield index, forward_s[index] * (op - slice_.ops[0]) / slice_.num_ops

    def _in_order(self, backward: Times, of_groups: Sequence[Together]) -> list[tuple[float, Together]]:
        """Collectives of groups by when these are complete, with that, in the order of the program
        (`program/sum_times.py`): as their last ops run back. Where a pass that adds to one waits for other
        devices inside, it is behind that pass; and where that is the last to add to it, in its order.
        """
        joined_s: dict[tuple[tuple[int, ...], int], float] = {}
        timed: list[tuple[float, float, Together]] = []
        for collective in of_groups:
            assert collective.group is not None, "a sum is of a group"
            group = self._groups[collective.group]
            adding = group.slices
            last_s = max(backward.end_s[index] for index in adding)
            # what replica groups have summed is there when their whole passes are through
            complete_s = last_s if group.replica_groups else self._complete_s(collective, backward)
            time_s = max([complete_s, *self._through_s(adding, complete_s, backward)])
            ready_s = time_s
            if time_s >= last_s:
                # behind which pass it is complete: of such as end together, that which completes it earlier
                by_end = zip(adding, group.first_ops, strict=True)
                _, _, last = max((backward.end_s[index], -op, index) for index, op in by_end)
                if (collective.devices, last) not in joined_s:
                    joined_s[collective.devices, last] = self._joined_s(collective.devices, last, backward)
                ready_s = max(complete_s, joined_s[collective.devices, last])
            timed.append((time_s, ready_s, collective))
        return [(ready_s, collective) for _, ready_s, collective in sorted(timed, key=lambda item: item[:2])]

    def _through_s(self, slices: Iterable[int], time_s: float, backward: Times) -> Iterator[float]:
        """When slices are through that have no room for sums inside and begin backward before a time."""
        for index in slices:
            if not self._has_room[index] and backward.start_s[index] < time_s:
                yield backward.end_s[index]

    def _joined_s(self, devices: Iterable[int], last: int, backward: Times) -> float:
        """When all of some devices have come to a sum that a slice is the last to add to: a program has it
        behind the last pass of its device that ends no later, and it starts no earlier than with the first op
        that this runs backward; where that pass waits for other devices inside, and is not the slice's, when
        it is through.
        """
        latest_s, last_s = 0.0, backward.end_s[last]
        for device in devices:
            run_before = [index for index in self._run_by[device] if backward.end_s[index] <= last_s]
            if run_before:
                index = max(run_before, key=backward.end_s.__getitem__)
                start_s, end_s = backward.start_s[index], backward.end_s[index]
                if self._has_room[index] or index == last:
                    end_s = start_s + (end_s - start_s) / self._slices[index].num_ops
                latest_s = max(latest_s, end_s)
        return latest_s

    def _complete_s(self, collective: Together, backward: Times) -> float:
        """When each of the slices has run its op backward; a slice runs its last op first."""
        assert collective.group is not None, "a sum is of a group"
        group = self._groups[collective.group]
        latest_s = 0.0
        for index, op in zip(group.slices, group.first_ops, strict=True):
            slice_ = self._slices[index]
            start_s, end_s = backward.start_s[index], backward.end_s[index]
            latest_s = max(latest_s, start_s + (end_s - start_s) * (slice_.ops[1] - op) / slice_.num_ops)
        return latest_s

    def _seconds(self, collective: Together) -> float:
        if collective.devices not in self._spread:
            self._spread[collective.devices] = per_node(collective.devices, self._cluster)
        key = (
            collective.num_bytes,
            self._spread[collective.devices],
            collective.rounds,
            collective.weights,
            collective.by_node,
        )
        if key not in self._known_s:
            self._known_s[key] = together_s(collective, key[1], self._cluster)
        return self._known_s[key]

    def _take(self, collective: Together, ready_s: float, free: _Free) -> float:
        """Let devices sum or gather as soon as all are free; when that ends."""
        start_s = self._start_s(collective, ready_s, free)
        end_s = free.loads.end_s(collective.devices, start_s, self._seconds(collective))
        for kind in self.kinds.taking_part[collective.devices]:
            free.since_s[kind] = end_s
        return end_s

    def _start_s(self, collective: Together, ready_s: float, free: _Free) -> float:
        """When all of some devices are free for a sum or gather."""
        return max(ready_s, max(free.since_s[kind] for kind in self.kinds.taking_part[collective.devices]))


def _summed_in_passes(groups: Iterable[ParameterGroup]) -> dict[tuple[int, ...], set[int]]:
    """The slices in whose passes gradients are summed, by the devices that sum them."""
    summed_in: dict[tuple[int, ...], set[int]] = {}
    for group in groups:
        if group.sharding.is_by_pass:
            summed_in.setdefault(group.devices, set()).update(group.slices)
    return summed_in


class SumEnd(NamedTuple):
    """When the sum of a group is predicted to end."""

    group: ParameterGroup
    end_s: float


class Kinds(NamedTuple):
    """Devices that take part in the same collectives are of one kind.

    `of_device`: of each. `taking_part`: of the devices of a collective, their kinds, and numbers of what else
    it occupies.
    """

    of_device: Sequence[int]
    taking_part: Mapping[tuple[int, ...], Sequence[int]]


def updated_s(
    groups: Iterable[ParameterGroup],
    passed_s: Sequence[float],
    sums_s: Sequence[SumEnd],
    steps_s: Sequence[float],
    kinds: Kinds,
) -> list[float]:
    """When each device has updated all its parameters.

    A part is updated when the one before it is, and when the last of its sums has ended.

    Args:
        groups: all, also those of which no sum is taken.
        passed_s: of each device, when its passes are through, and it knows the losses.
        sums_s: of all sums, in their order.
        steps_s: of each device, what the optimizer's step takes without the products of gathered factors.
        kinds: of devices that take part in the same sums.
    """
    unshared = own_bytes(groups)
    sums_of: dict[int, list[SumEnd]] = {}
    for sum_end in sums_s:
        for kind in kinds.taking_part[sum_end.group.devices] if sum_end.group.is_trained else ():
            sums_of.setdefault(kind, []).append(sum_end)
    seen: dict[tuple[int, int, float, float], float] = {}  # of devices that do the same
    seconds: list[float] = []
    for device, (at_s, step_s) in enumerate(zip(passed_s, steps_s, strict=True)):
        key = (kinds.of_device[device], unshared.get(device, 0), at_s, step_s)
        if key not in seen:
            seen[key] = _updated_s(key[1], sums_of.get(key[0], ()), at_s, step_s)
        seconds.append(seen[key])
    return seconds


def _updated_s(num_bytes: int, sums_s: Sequence[SumEnd], at_s: float, step_s: float) -> float:
    end_of = {group.index: end_s for group, end_s in sums_s}
    for part in update_parts(num_bytes, [group for group, _ in sums_s]):
        at_s = max([at_s, *(end_of[index] for index in part.groups)]) + part.seconds(step_s)
    return at_s
