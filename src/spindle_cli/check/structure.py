"""Rules without time: known MetaOps and devices, every op once and in order, allocations that are valid.

The other rules can only be judged on a plan whose parts exist; see `spindle_cli.check.run`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from spindle_cli.check.types import Violation, located, place_of
from spindle_cli.plan.types import Plan, PlanMetaOp, Slice, Wave


def names_and_ranges(plan: Plan, waves: Sequence[Wave] | None = None) -> Iterator[Violation]:
    """Slices name MetaOps, ops and devices that exist; waves are numbered 0, 1, 2, ...

    Args:
        plan: what they are of.
        waves: of one of its sets of tasks; by default those of all tasks.
    """
    waves = plan.waves if waves is None else waves
    for position, wave in enumerate(waves):
        if wave.index != position:
            yield Violation(
                rule="wave-index",
                where=f"waves[{position}]",
                value=f"index is {wave.index}",
                expected=f"{position}, its position",
            )
    for wave in waves:
        for slice_ in wave.slices:
            yield from _names_of(wave.index, slice_, plan)
    for metaop in plan.metaops:
        yield from _table_sizes(metaop)


def _names_of(wave: int, slice_: Slice, plan: Plan) -> Iterator[Violation]:
    where = place_of(wave, slice_)
    metaop = plan.by_name.get(slice_.metaop)
    if metaop is None:
        yield Violation(
            rule="unknown-metaop",
            where=where,
            value=f"{slice_.metaop!r} is not among the plan's metaops",
            expected="one of " + ", ".join(list(plan.by_name)[:8]),
        )
    elif not 0 <= slice_.ops[0] < slice_.ops[1] <= metaop.num_ops:
        yield Violation(
            rule="ops-range",
            where=where,
            value=f"ops {list(slice_.ops)}",
            expected=f"[first, last] with 0 <= first < last <= {metaop.num_ops}, its number of ops",
        )
    outside = tuple(device for device in slice_.devices if device >= plan.cluster.num_devices)
    if outside:
        yield Violation(
            rule="unknown-device",
            where=where,
            devices=outside,
            value="not in the cluster",
            expected=f"devices 0 to {plan.cluster.num_devices - 1} of {plan.cluster.name!r}",
        )


def _table_sizes(metaop: PlanMetaOp) -> Iterator[Violation]:
    if metaop.parameter_blocks is not None and len(metaop.parameter_blocks) != metaop.num_ops:
        yield Violation(
            rule="parameter-blocks",
            where=f"metaops, {metaop.name}",
            value=f"{len(metaop.parameter_blocks)} parameter_blocks",
            expected=f"one for each of its {metaop.num_ops} ops",
        )


def rows_of_shares(plan: Plan, *, is_complete: bool) -> Iterator[Violation]:
    """Where a slice says its shares' `rows`, they are offsets that ascend from 0 to the end of its batch, or
    micro-batch, a share for each `tp` devices.

    Args:
        plan: its slices are of MetaOps that there are.
        is_complete: its `metaops` say how large batches are.
    """
    for wave, slice_ in located(plan):
        if slice_.rows is None:
            continue
        rows, last = list(slice_.rows), None
        if is_complete:
            last = plan.by_name[slice_.metaop].batch_size // slice_.micro_batches
        ascends = rows[0] == 0 and all(low < high for low, high in pairwise(rows))
        if not ascends or len(rows) != slice_.dp + 1 or (last is not None and rows[-1] != last):
            whole = "batch" if slice_.micro_batches == 1 else "micro-batch"
            end = f"the size of its {whole}" if last is None else f"{last}, the size of its {whole}"
            yield Violation(
                rule="rows",
                where=place_of(wave, slice_),
                value=f"rows {_few(rows)}",
                expected=f"{slice_.dp + 1} ascending offsets from 0 to {end}, for {slice_.dp} shares (dp)",
            )
        elif len(slice_.devices) != slice_.dp * slice_.tp:
            yield _wrong_number(wave, slice_)


def _few(numbers: Sequence[int]) -> str:
    return str(list(numbers)) if len(numbers) <= 12 else f"[{', '.join(map(str, numbers[:10]))}, ...]"


def every_op_once(plan: Plan) -> Iterator[Violation]:
    """Find MetaOps whose slices, in the order of their ops, do not cover [0, num_ops) in each micro-batch
    without gap or overlap.
    """
    located_slices: dict[tuple[str, int], list[tuple[int, Slice]]] = {}
    for wave, slice_ in located(plan):
        located_slices.setdefault((slice_.metaop, slice_.micro_batch), []).append((wave, slice_))
    for metaop in plan.metaops:
        count = plan.micro_batches.get(metaop.task, 1)
        for number in range(count):
            name = metaop.name if count == 1 else f"{metaop.name}, micro-batch {number} of {count}"
            yield from _covered(name, metaop.num_ops, located_slices.get((metaop.name, number), []))


def _covered(name: str, num_ops: int, located_slices: list[tuple[int, Slice]]) -> Iterator[Violation]:
    covered = 0
    for wave, slice_ in sorted(located_slices, key=lambda entry: entry[1].ops):
        first, last = slice_.ops
        if first > covered:
            yield _lost(name, covered, first)
        elif first < covered:
            yield Violation(
                rule="coverage",
                where=place_of(wave, slice_),
                value=f"runs ops [{first}, {min(covered, last)}) a second time",
                expected=f"a slice that starts at op {covered}",
            )
        covered = max(covered, last)
    if covered < num_ops:
        yield _lost(name, covered, num_ops)


def _lost(name: str, first: int, last: int) -> Violation:
    return Violation(
        rule="coverage",
        where=f"metaops, {name}",
        value=f"no slice runs ops [{first}, {last})",
        expected="every op in exactly one slice",
    )


def device_lists(plan: Plan) -> Iterator[Violation]:
    """Each slice has dp x tp different devices."""
    for wave, slice_ in located(plan):
        where = place_of(wave, slice_)
        repeated = tuple(sorted(device for device, times in Counter(slice_.devices).items() if times > 1))
        if repeated:
            yield Violation(
                rule="device-twice",
                where=where,
                devices=repeated,
                value="listed twice in one slice",
                expected="each device once",
            )
        if len(slice_.devices) != slice_.dp * slice_.tp:
            yield _wrong_number(wave, slice_)


def _wrong_number(wave: int, slice_: Slice) -> Violation:
    return Violation(
        rule="allocation",
        where=place_of(wave, slice_),
        value=f"{len(slice_.devices)} devices",
        expected=f"dp {slice_.dp} x tp {slice_.tp} = {slice_.dp * slice_.tp} devices",
    )


def tensor_parallel_groups(plan: Plan) -> Iterator[Violation]:
    """The `tp` devices that hold one share of a slice are of one node, and so of one type."""
    node_of, type_of = plan.cluster.node_of, plan.cluster.type_of
    for wave, slice_ in located(plan):
        if slice_.tp == 1:
            continue
        for share in range(len(slice_.devices) // slice_.tp):
            members = slice_.devices[share * slice_.tp : (share + 1) * slice_.tp]
            nodes = sorted({node_of[device] for device in members})
            if len(nodes) > 1:
                kinds = list(dict.fromkeys(type_of[device] for device in members))
                of_types = f", of {' and '.join(kinds)}" if len(kinds) > 1 else ""
                yield Violation(
                    rule="tensor-parallel",
                    where=place_of(wave, slice_),
                    devices=members,
                    value=f"hold share {share} together, on nodes {', '.join(map(str, nodes))}{of_types}",
                    expected=f"the {slice_.tp} devices of a tensor-parallel share on one node"
                    + (", of one type" if of_types else ""),
                )


def whole_micro_batches(plan: Plan) -> Iterator[Violation]:
    """MetaOps that hand values to each other have as many micro-batches, and one where an op sums something
    over the samples of its batch or changes buffers with it.
    """
    for metaop in plan.metaops:
        count = plan.micro_batches.get(metaop.task, 1)
        for name in metaop.inputs:
            others = plan.micro_batches.get(plan.by_name[name].task, 1)
            if count != others:
                yield Violation(
                    rule="micro-batches",
                    where=f"metaops, {metaop.name}",
                    value=f"{count} micro-batches, and {others} of {name}, which it takes from",
                    expected="as many of both",
                )
        if count > 1 and (metaop.batch_sums or metaop.changes_buffers):
            yield Violation(
                rule="micro-batches",
                where=f"metaops, {metaop.name}",
                value=f"{count} micro-batches",
                expected="one: it sums something over the samples of its batch, or changes buffers with it",
            )


def shared_out(plan: Plan) -> Iterator[Violation]:
    """All slices of parameters that are shared out beyond their optimizer state run on the same devices,
    which gather and sum together in each of their passes; or where the parameters themselves are shared out,
    on those of one of several replica groups, of two devices at least, that have no device in common.
    """
    replica_groups_by_key: dict[str, list[Slice]] = {}  # the first slice of each replica group
    for wave, slice_ in located(plan):
        metaop = plan.by_name[slice_.metaop]
        key = metaop.parameters or metaop.name
        sharding = plan.sharding.get(key)
        if sharding is None or not sharding.is_by_pass:
            continue
        replica_groups = replica_groups_by_key.setdefault(key, [])
        devices = set(slice_.devices)
        if any(set(peer.devices) == devices for peer in replica_groups):
            continue
        conflicting = [
            peer
            for peer in replica_groups
            if not sharding.is_fetched
            or not devices.isdisjoint(peer.devices)
            or min(len(devices), len(peer.devices)) < 2
        ]
        if conflicting:
            also = ", or in replica groups that have none in common" if sharding.is_fetched else ""
            yield Violation(
                rule="sharding",
                where=place_of(wave, slice_),
                devices=tuple(sorted(set(conflicting[0].devices) ^ devices)),
                value=f"its parameters {key!r} are shared out ({sharding}), and {conflicting[0].label} "
                "runs on other devices",
                expected=f"all slices of parameters that are shared out on the same devices{also}",
            )
        else:
            replica_groups.append(slice_)
