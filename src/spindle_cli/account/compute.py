"""How long each device computes in an iteration, by the times that its plan was made from, with the time that
communication, loading and the runtime take of it where it is a processor that does this work itself.

A slice lasts as long as the slowest of its shares, and a plan has times of slices. A device itself computes
its own shares alone, on its own type (`compute_of_devices`).

gloo moves bytes by threads of the rank's own process, and so are samples loaded. On a machine whose cores all
compute, that time is missing to the slices. It is spread evenly over what a device computes: a slice takes
longer by the device's share of such work over its compute (`slice_stretches`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Protocol

from spindle_cli.account.traffic import Traffic
from spindle_cli.account.types import Together
from spindle_cli.costs.beyond_curve import BeyondCurve, forwards_again, stalls_of_share
from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.shares import cuts_by_share, times_of, times_of_share
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.profile.types import MetaOp

# In a round of n devices, such as a reduce-scatter, each sends to n - 1 others and receives from as many.
_ENDS_PER_PARTNER = 2
# gloo's ring sends a device's part of an all-reduce in two segments at least, so that one is on its way while
# the other is added, and in none of more than 1 MiB (gloo, `gloo/allreduce.cc`, `ring`).
_LEAST_SEGMENTS, _SEGMENT_BYTES = 2, 2**20
# What a byte between nodes takes of a processor, in bytes between processes of one: TCP cuts it into packets,
# and the kernel handles each. Measured from 1.8 to 2.9 (`docs/benchmarks/profiling.md`).
_NETWORK_TIMES = 2.5


class ProcessorSeconds(Protocol):
    """What is needed of a profile's `ProcessorCosts`; seconds of a device."""

    @property
    def message_s(self) -> float: ...
    @property
    def s_per_byte(self) -> float: ...
    @property
    def load_s(self) -> Mapping[str, float]: ...
    @property
    def step_s(self) -> float: ...
    @property
    def pass_s(self) -> float: ...


class ProcessorTime:
    """The time that messages, collectives, loading and the runtime take of each device in an iteration, added
    up one by one.
    """

    def __init__(self, costs: ProcessorSeconds, node_of: Sequence[int]) -> None:
        """`node_of`: the node of each device."""
        self._costs, self._node_of = costs, node_of
        self._seconds = [0.0] * len(node_of)
        self._read: dict[tuple[int, str, int], float] = {}

    def message(self, source: int, destination: int, num_bytes: float) -> None:
        """Add a message from one device to another."""
        is_far = self._node_of[source] != self._node_of[destination]
        message_s = self._costs.message_s + num_bytes * byte_s(self._costs, float(is_far))
        for device in (source, destination):
            self._seconds[device] += message_s

    def together(self, collective: Together, times: float = 1.0) -> None:
        """Add a collective, so many times; one device alone has nothing to do."""
        count = len(collective.devices)
        parts = times * collective.rounds * _ENDS_PER_PARTNER * (count - 1)
        ends = parts * _segments(collective)
        moved = parts * collective.num_bytes / count
        of_node = Counter(self._node_of[device] for device in collective.devices)
        for device in collective.devices:
            far = (count - of_node[self._node_of[device]]) / max(count - 1, 1)
            self._seconds[device] += ends * self._costs.message_s + moved * byte_s(self._costs, far)

    def read(self, device: int, task: str, samples: float, micro_batch: int = 0) -> None:
        """Add that a device reads so many samples of a micro-batch; of several readings of one the largest
        counts.
        """
        seconds = samples * self._costs.load_s.get(task, 0.0)
        key = device, task, micro_batch
        self._read[key] = max(self._read.get(key, 0.0), seconds)

    def runs(self, slice_: SliceShape) -> None:
        """Add what the runtime does on each device of a slice to run it forward and backward."""
        for device in slice_.devices:
            self._seconds[device] += self._costs.pass_s

    def steps(self, devices: Iterable[int], times: float = 1.0) -> None:
        """Add what the runtime does for a step on these devices, so many times."""
        for device in devices:
            self._seconds[device] += times * self._costs.step_s

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds that all of it takes of each device."""
        seconds = list(self._seconds)
        for (device, _, _), read_s in self._read.items():
            seconds[device] += read_s
        return tuple(seconds)

    def stretches(self, slices: Sequence[SliceShape], computes_s: Sequence[float]) -> tuple[float, ...]:
        """How many times as long each slice takes as its curve says: as its slowest device.

        `computes_s`: seconds of each slice, forward and backward, by its curve.
        """
        of_device = [0.0] * len(self._seconds)
        for slice_, compute_s in zip(slices, computes_s, strict=True):
            for device in slice_.devices:
                of_device[device] += compute_s
        stretched = [
            1.0 + taken_s / compute_s if compute_s else 1.0
            for taken_s, compute_s in zip(self.seconds, of_device, strict=True)
        ]
        return tuple(max(stretched[device] for device in slice_.devices) for slice_ in slices)


def byte_s(costs: ProcessorSeconds, far: float) -> float:
    """Seconds that a byte takes of the processor at each of its ends, where that share of them goes to other
    nodes.
    """
    return costs.s_per_byte * (1.0 + far * (_NETWORK_TIMES - 1.0))


def _segments(collective: Together) -> int:
    """In how many messages each device's part goes from one device to the next."""
    if collective.rounds == 1:
        return 1
    segments = ceil(collective.num_bytes / _SEGMENT_BYTES)
    return max(_LEAST_SEGMENTS, ceil(segments / len(collective.devices)))


def slice_stretches(
    costs: ProcessorSeconds,
    node_of: Sequence[int],
    slices: Sequence[SliceShape],
    computes_s: Sequence[float],
    by_name: Mapping[str, MetaOp],
    messages: Iterable[tuple[int, int, float]],
    collectives: Iterable[Together],
    batches: int = 1,
) -> tuple[float, ...]:
    """How many times as long each slice takes as its curve says, on average over the batches of a step.

    Args:
        node_of: the node of each device.
        computes_s: seconds of each slice, forward and backward, by its curve.
        messages: (source, destination, bytes) of all that moves in a batch, forward and back.
        collectives: of a step.
        batches: of a step.
    """
    if costs_nothing(costs):
        return (1.0,) * len(slices)
    processor_time = processor_overhead(costs, node_of, slices, by_name, messages, collectives, batches)
    return processor_time.stretches(slices, computes_s)


def processor_overhead(
    costs: ProcessorSeconds,
    node_of: Sequence[int],
    slices: Sequence[SliceShape],
    by_name: Mapping[str, MetaOp],
    messages: Iterable[tuple[int, int, float]],
    collectives: Iterable[Together],
    batches: int = 1,
) -> ProcessorTime:
    """The time that messages, collectives, loading and the runtime take of each device in an iteration, on
    top of its slices; arguments as of `slice_stretches`.
    """
    processor_time = ProcessorTime(costs, node_of)
    for source, destination, num_bytes in messages:
        processor_time.message(source, destination, num_bytes)
    for collective in collectives:
        processor_time.together(collective, 1 / batches)
    processor_time.steps({device for slice_ in slices for device in slice_.devices}, 1 / batches)
    for slice_ in slices:
        processor_time.runs(slice_)
        metaop = by_name[slice_.metaop]
        if any(slice_.ops[0] <= op < slice_.ops[1] for op in metaop.field_bytes):
            cuts = cuts_by_share(slice_)
            for position, device in enumerate(slice_.devices):
                samples = metaop.batch_size / cuts[position // slice_.tp]
                processor_time.read(device, metaop.task, samples, slice_.micro_batch)
    return processor_time


def costs_nothing(costs: ProcessorSeconds) -> bool:
    """Whether other processors do all this work."""
    numbers = (costs.message_s, costs.s_per_byte, costs.step_s, costs.pass_s, *costs.load_s.values())
    return not any(numbers)


def compute_of_devices(plan: Plan, traffic: Traffic) -> tuple[float, ...]:
    """Seconds that each device computes for one batch of every task, forward and backward, on average over
    the batches of a step.

    Args:
        plan: one that passes `check`.
        traffic: what it moves.
    """
    seconds = [0.0] * plan.cluster.num_devices
    beyond = BeyondCurve(plan.by_name, plan.cluster, plan)
    for slice_ in plan.slices:
        for share, share_s in enumerate(_shares_s(plan, slice_, beyond)):
            for device in slice_.devices[share * slice_.tp : (share + 1) * slice_.tp]:
                seconds[device] += share_s
    if costs_nothing(plan.processor):
        return tuple(seconds)
    processor_time = processor_overhead(
        plan.processor,
        plan.cluster.node_of,
        plan.slices,
        plan.by_name,
        traffic.messages(),
        traffic.collectives,
        plan.accumulate,
    )
    return tuple(
        slices_s + processor_s for slices_s, processor_s in zip(seconds, processor_time.seconds, strict=True)
    )


def _shares_s(plan: Plan, slice_: Slice, beyond: BeyondCurve) -> list[float]:
    """Seconds of all ops of a slice for each of its shares: both passes, what is computed again, and what
    comes on top.

    Of unequal shares on devices of one type a plan need know the largest alone; one that it does not know
    counts as that.
    """
    metaop, seconds = plan.by_name[slice_.metaop], []
    for share in range(slice_.dp):
        op = times_of_share(metaop, slice_, share, plan.cluster) or times_of(metaop, slice_, plan.cluster)
        assert op is not None, "`check` has seen to it"
        again_s = op.forward_s * forwards_again(slice_, metaop) / slice_.num_ops
        more_s = beyond.op_s(slice_, metaop, op.forward_s, op.backward_s + again_s)
        waits = stalls_of_share(slice_, metaop, plan.cluster, share, op)
        ops_s = slice_.num_ops * (op.forward_s + op.backward_s + again_s + sum(more_s))
        seconds.append(ops_s + waits.forward_s + waits.backward_s)
    return seconds
