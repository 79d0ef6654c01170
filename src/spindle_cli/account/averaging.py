"""What an outer step takes, where islands of devices average now and then alone (`train.local_sgd`).

Every device has peer replicas, those in the same place of the other islands. It sends each of them what its
own optimizer has moved the parameters by since the last one, and gets as much from each; so nothing that
an island has once crosses the slow links twice. Then it makes the outer optimizer's step, and hands the new
parameters on inside of its island, as after any update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from spindle_cli.account.device.account import OptimizerNumbers
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.traffic import traffic_of
from spindle_cli.account.types import Collective, PlacedPlan
from spindle_cli.costs.links import all_gather_s, transfer_s
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import LocalSgd, MetaOp


class _Planned(PlacedPlan, OptimizerNumbers, Protocol):
    @property
    def metaops(self) -> Sequence[MetaOp]: ...
    @property
    def optimizer_s_per_byte(self) -> float: ...


def outer_step_bytes(plan: _Planned, local_sgd: LocalSgd) -> tuple[int, ...]:
    """By device of an island, bytes that it sends in an outer step, to all its peer replicas together.

    The one scale that goes with each parameter where numbers are rounded is not counted.
    """
    held = device_memory(plan.metaops, plan.slices, plan.cluster, plan)
    return tuple(
        round((local_sgd.islands - 1) * device.updated_bytes * local_sgd.sent_share) for device in held
    )


def outer_step_s(plan: _Planned, local_sgd: LocalSgd, whole: Cluster) -> float:
    """Seconds that an outer step takes, after the last update of an island.

    Args:
        plan: of an island.
        whole: the cluster of all islands.
    """
    held = device_memory(plan.metaops, plan.slices, plan.cluster, plan)
    outer_s = max(device.updated_bytes for device in held) * plan.optimizer_s_per_byte
    return (
        _exchange_s(outer_step_bytes(plan, local_sgd), local_sgd, plan.cluster, whole)
        + outer_s
        + _gathers_s(plan)
    )


def _exchange_s(sent: Sequence[int], local_sgd: LocalSgd, island: Cluster, whole: Cluster) -> float:
    """Seconds until every device has what its peer replicas have sent: rings of one device of each island,
    one hop after the other. Devices behind one network card share it.
    """
    by_card: dict[tuple[int, int], int] = {}
    for device, num_bytes in enumerate(sent):
        card = island.card_of[device]
        by_card[card] = by_card.get(card, 0) + num_bytes
    nodes = len(island.node_sizes)
    hops = local_sgd.islands - 1
    return max(
        hops
        * transfer_s(
            num_bytes / hops,
            whole.links_among(node + nodes * number for number in range(local_sgd.islands)).inter_node,
        )
        for (node, _), num_bytes in by_card.items()
    )


def _gathers_s(plan: _Planned) -> float:
    """Seconds of the gathers of new parameters inside of an island, on the device that spends most on
    them.
    """
    taken = [0.0] * plan.cluster.num_devices
    for collective in traffic_of(plan).collectives:
        if collective.kind is Collective.GATHER:
            gather_s = all_gather_s(collective.num_bytes, collective.devices, plan.cluster)
            for device in collective.devices:
                taken[device] += gather_s
    return max(taken)
