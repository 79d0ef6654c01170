"""Rules of the plan's predictions: the end of the schedule, the lower bound, memory, and activations in host
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from spindle_cli.account.device_memory import MEMORY_FORMULA, DeviceMemory, device_memory, host_memory
from spindle_cli.check.types import RELATIVE_SLACK, Violation, exact_s, located, place_of
from spindle_cli.plan.types import Plan, Wave, bounds_of_any_cut
from spindle_cli.units import format_bytes

# Bytes of micro-batches are rounded up, each one's by themselves: a plan in several is off by some.
ROUNDED_BYTES = 64


def times(plan: Plan) -> Iterator[Violation]:
    """compute_s is the end of the schedule, iteration_s not less, and no bound more."""
    predicted = plan.predicted
    end_s = max(slice_.last_s for slice_ in plan.slices)
    slack = RELATIVE_SLACK * end_s
    if abs(predicted.compute_s - end_s) > slack:
        yield Violation(
            rule="compute",
            where="predicted.compute_s",
            value=exact_s(predicted.compute_s),
            expected=f"{exact_s(end_s)}, the end of the last slice",
        )
    is_bound = plan.schema_ == "spindle.plan/1"  # of all schedules that version 1 can say
    if is_bound and predicted.lower_bound_s > predicted.compute_s + slack:
        yield Violation(
            rule="lower-bound",
            where="predicted.lower_bound_s",
            value=exact_s(predicted.lower_bound_s),
            expected=f"at most compute_s, {exact_s(predicted.compute_s)}",
        )
    for name, bound_s in bounds_of_any_cut(predicted).items():
        bounded = "iteration_s" if name == "lower_bound_with_links_s" else "compute_s"
        seconds = getattr(predicted, bounded)
        if bound_s is not None and bound_s > seconds + slack:
            yield Violation(
                rule="lower-bound",
                where=f"predicted.{name}",
                value=exact_s(bound_s),
                expected=f"at most {bounded}, {exact_s(seconds)}",
            )
    if predicted.iteration_s < predicted.compute_s - slack:
        yield Violation(
            rule="iteration",
            where="predicted.iteration_s",
            value=exact_s(predicted.iteration_s),
            expected=f"at least compute_s, {exact_s(predicted.compute_s)}",
        )


def memory(plan: Plan, communicators: Sequence[int] | None) -> Iterator[Violation]:
    """Every device holds what it needs; `communicators`: of it, what these take, where that is known."""
    needs = device_memory(plan.metaops, plan.slices, plan.cluster, plan, communicators, plan.turn)
    capacity = plan.cluster.memory_bytes
    # Devices that need the same and have the same are one violation.
    overflowing: dict[tuple[DeviceMemory, int], list[int]] = {}
    for device, need in enumerate(needs):
        if need.total_bytes > capacity[device]:
            overflowing.setdefault((need, capacity[device]), []).append(device)
    for (need, limit), devices in overflowing.items():
        yield Violation(
            rule="memory",
            where="memory",
            devices=tuple(devices),
            value=f"needs {_breakdown(need)}",
            expected=f"at most {format_bytes(limit)}",
        )


def _breakdown(need: DeviceMemory) -> str:
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in need.parts.items() if size)
    return f"{format_bytes(need.total_bytes)} ({listed})"


def one_peak_a_device(plan: Plan) -> Iterator[Violation]:
    """peak_memory_bytes has an entry for each device."""
    stated, expected = len(plan.predicted.peak_memory_bytes), plan.cluster.num_devices
    if stated != expected:
        yield Violation(
            rule="peak-memory",
            where="predicted.peak_memory_bytes",
            value="1 entry" if stated == 1 else f"{stated} entries",
            expected=f"one for each of the {expected} devices",
        )


def stated_memory(plan: Plan, communicators: Sequence[int] | None) -> Iterator[Violation]:
    """peak_memory_bytes says what each device needs; what an earlier version found by another formula is not
    compared, nor what takes communicators that are not known.
    """
    if plan.predicted.memory_formula != MEMORY_FORMULA:
        return
    if communicators is None and plan.cluster.talks_by != "gloo":
        return
    stated = plan.predicted.peak_memory_bytes
    needs = device_memory(plan.metaops, plan.slices, plan.cluster, plan, communicators, plan.turn)
    if len(stated) != len(needs):
        return  # reported by one_peak_a_device
    needs_bytes = tuple(need.total_bytes for need in needs)
    wrong = tuple(
        device
        for device, (said, need) in enumerate(zip(stated, needs_bytes, strict=True))
        if abs(said - need) > RELATIVE_SLACK * need + ROUNDED_BYTES
    )
    if wrong:
        yield Violation(
            rule="peak-memory",
            where="predicted.peak_memory_bytes",
            devices=wrong,
            value=f"{stated[wrong[0]]} bytes on device {wrong[0]}",
            expected=f"{needs_bytes[wrong[0]]} bytes, what its slices need",
        )


def ranges(waves: Sequence[Wave]) -> Iterator[Violation]:
    """Ranges of a slice's `offload` are of its ops, ascend, and have no op twice."""
    for wave in waves:
        for slice_ in wave.slices:
            first, last = slice_.ops
            inside = all(first <= low < high <= last for low, high in slice_.offload)
            ascends = all(before[1] <= after[0] for before, after in pairwise(slice_.offload))
            if not inside or not ascends:
                yield Violation(
                    rule="offload",
                    where=place_of(wave.index, slice_),
                    value=f"offload {[list(op_range) for op_range in slice_.offload]}",
                    expected=f"ascending ranges [first, last) of its ops [{first}, {last}), none twice",
                )


def has_link(plan: Plan) -> Iterator[Violation]:
    """Activations of GPUs get to host memory over a link that the cluster has; the first slice that has none
    for its devices is named.
    """
    cluster = plan.cluster
    if cluster.is_cpu:
        return
    for wave, slice_ in located(plan):
        if not slice_.offload:
            continue
        without = tuple(
            device for device in slice_.devices if cluster.host_link_of_node[cluster.node_of[device]] is None
        )
        if without:
            of_which = "" if not cluster.knows_host_links else f" for {cluster.type_of[without[0]]}"
            yield Violation(
                rule="offload",
                where=place_of(wave, slice_),
                devices=without,
                value=f"offload, and {cluster.name!r} has no links.host{of_which}",
                expected="a cluster that says how fast its devices reach host memory",
            )
            return


def fits(plan: Plan) -> Iterator[Violation]:
    """The memory of every node holds what its devices have there."""
    limits = plan.cluster.host_memory_bytes
    if all(limit is None for limit in limits):
        return
    needs = device_memory(plan.metaops, plan.slices, plan.cluster, plan, None, plan.turn)
    for node, (need, limit) in enumerate(zip(host_memory(needs, plan.cluster), limits, strict=True)):
        if limit is not None and need > limit:
            yield Violation(
                rule="host-memory",
                where=f"host memory of node {node}",
                value=f"needs {format_bytes(need)} for activations of its devices",
                expected=f"at most {format_bytes(limit)}, its host_memory_gib",
            )
