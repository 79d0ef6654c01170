"""Rules of activations in host memory: which ops' they are, that they get there, and that they fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from spindle_cli.account.device_memory import device_memory, host_memory
from spindle_cli.check.types import Violation, located, place_of
from spindle_cli.plan.types import Plan, Wave
from spindle_cli.units import format_bytes


def ranges(waves: Sequence[Wave]) -> Iterator[Violation]:
    """Ranges of a slice's `offload` are of its ops, ascend, and have no op twice."""
    for wave in waves:
        for piece in wave.slices:
            first, last = piece.ops
            inside = all(first <= low < high <= last for low, high in piece.offload)
            ascends = all(before[1] <= after[0] for before, after in pairwise(piece.offload))
            if not inside or not ascends:
                yield Violation(
                    rule="offload",
                    where=place_of(wave.index, piece),
                    value=f"offload {[list(each) for each in piece.offload]}",
                    expected=f"ascending ranges [first, last) of its ops [{first}, {last}), none twice",
                )


def has_link(plan: Plan) -> Iterator[Violation]:
    """Activations of GPUs get to host memory over a link that the cluster has; the first slice that has none
    for its devices is named.
    """
    cluster = plan.cluster
    if cluster.is_cpu:
        return
    for wave, piece in located(plan):
        if not piece.offload:
            continue
        without = tuple(
            device for device in piece.devices if cluster.host_link_of_node[cluster.node_of[device]] is None
        )
        if without:
            of_which = "" if not cluster.knows_host_links else f" for {cluster.type_of[without[0]]}"
            yield Violation(
                rule="offload",
                where=place_of(wave, piece),
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
