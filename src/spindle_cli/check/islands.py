"""Rules of islands that average now and then alone: where they are, and what their outer steps take."""

from __future__ import annotations

from collections.abc import Iterator

from spindle_cli.account.traffic import outer_step_bytes, outer_step_s
from spindle_cli.check.types import RELATIVE_SLACK, Violation, exact_s
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.types import Plan


def cover_the_cluster(plan: Plan) -> Iterator[Violation]:
    """The nodes of the cluster file are those of the plan's cluster, over and over, once for each island: so
    islands are disjoint, and have all devices. Every task is on each, as each runs all slices.
    """
    if plan.islands is None or plan.local_sgd is None:
        return
    nodes, all_nodes = _nodes(plan.cluster), _nodes(plan.islands.cluster)
    count = plan.local_sgd.islands
    if all_nodes != nodes * count:
        yield Violation(
            rule="islands",
            where="islands.cluster",
            value=f"{len(all_nodes)} nodes of {_sizes(all_nodes)}",
            expected=f"{count} times the nodes of `cluster`, alike: {len(nodes)} nodes of {_sizes(nodes)}",
        )
    stated, expected = len(plan.islands.outer_step_bytes), plan.cluster.num_devices
    if stated != expected:
        yield Violation(
            rule="islands",
            where="islands.outer_step_bytes",
            value=f"{stated} entries",
            expected=f"one for each of the {expected} devices of an island",
        )


def _nodes(cluster: Cluster) -> list[tuple[str, int, float]]:
    return [
        (group.device, group.devices, group.memory_gib) for group in cluster.nodes for _ in range(group.count)
    ]


def _sizes(nodes: list[tuple[str, int, float]]) -> str:
    return ", ".join(dict.fromkeys(f"{count} x {device} of {gib:g} GiB" for device, count, gib in nodes))


def outer_steps_as_predicted(plan: Plan) -> Iterator[Violation]:
    """`outer_step_bytes` is what every device sends, and `outer_step_s` how long that takes; of a plan with
    which nothing else is wrong.
    """
    if plan.islands is None or plan.local_sgd is None:
        return
    stated, sent = plan.islands.outer_step_bytes, outer_step_bytes(plan, plan.local_sgd)
    wrong = tuple(d for d, (said, expected) in enumerate(zip(stated, sent, strict=True)) if said != expected)
    if wrong:
        yield Violation(
            rule="islands",
            where="islands.outer_step_bytes",
            devices=wrong,
            value=f"{stated[wrong[0]]} bytes on device {wrong[0]}",
            expected=f"{sent[wrong[0]]} bytes, what it updates, in {plan.local_sgd.bits} bits",
        )
    took_s, expected_s = plan.islands.outer_step_s, outer_step_s(plan, plan.local_sgd, plan.islands.cluster)
    if abs(took_s - expected_s) > RELATIVE_SLACK * expected_s:
        yield Violation(
            rule="islands",
            where="islands.outer_step_s",
            value=exact_s(took_s),
            expected=f"{exact_s(expected_s)}, over the slowest link between islands",
        )
