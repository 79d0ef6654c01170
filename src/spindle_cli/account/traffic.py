"""Everything that a plan moves between devices: who sends what to whom, and what is summed over whom;
and over which communicators; and what an outer step moves between islands.

In every batch the activations go forward over the edges, and their gradients back. Once in a step, with its
last batch, the losses are summed, and the gradients of each parameter group; where its devices share the
optimizer's state (ZeRO-1), each takes its part of the sum alone, and the parts that it has updated are
gathered before the next batch uses them.

Devices that exchange messages form two halves, so that as few as can be exchange them inside of a half
(`sides_of`). What a device posts on a communicator runs in order, and a receive waits for its sender. Where a
device sends over the communicator of its own half, and those that it receives from are in the other one, no
receive is ahead of what it sends.

Where islands of devices average now and then alone (`train.local_sgd`), every device has peer replicas, those
in the same place of the other islands. It sends each of them what its own optimizer has moved the parameters
by since the last outer step, and gets as much from each; so nothing that an island has once crosses the slow
links twice. Then it makes the outer optimizer's step, and hands the new parameters on inside of its island,
as after any update.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

from spindle_cli.account.activations import (
    Layout,
    backward_order,
    edge_bytes,
    handed_over,
    pass_order,
    slice_edges,
    slice_layouts,
)
from spindle_cli.account.device.account import OptimizerNumbers
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.groups import (
    GatheredMatrix,
    ParameterUses,
    gathered_matrices,
    parameter_groups,
    planned_parameters,
    with_ways,
)
from spindle_cli.account.joint import groups_of_member, joint_groups, plans_in_turn
from spindle_cli.account.step_end import collectives_of_step
from spindle_cli.account.types import (
    Collective,
    CommunicatorRanks,
    Edge,
    ParameterGroup,
    PlacedPlan,
    Purpose,
    Together,
)
from spindle_cli.costs.links import all_gather_s, collectives_bytes, messages_bytes, transfer_s
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import LocalSgd, MetaOp


class Message(NamedTuple):
    """What one device sends to another in one go."""

    source: int
    destination: int
    num_bytes: int


@dataclass(frozen=True)
class Exchange:
    """What an edge moves one way in every batch. `sender`, `taker`: indices of slices. `gather_s`: what the
    taker's pass gathers of it then takes.
    """

    sender: int
    taker: int
    messages: tuple[Message, ...]
    gather_s: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """All that moves in a step.

    Attributes:
        plan: whose it is.
        layouts: who holds which samples, of each slice.
        edges: which slice takes whose output.
        activations, gradients: of each edge, forward and back, in each of the step's batches.
        groups: parameters that are summed together, in the order of their sums; those that one device alone
            holds too.
    """

    plan: PlacedPlan
    layouts: tuple[Layout, ...]
    edges: tuple[Edge, ...]
    activations: tuple[Exchange, ...]
    gradients: tuple[Exchange, ...]
    groups: tuple[ParameterGroup, ...]

    @property
    def sums(self) -> tuple[ParameterGroup, ...]:
        """The groups that several devices hold."""
        return tuple(group for group in self.groups if len(group.devices) > 1)

    @cached_property
    def collectives(self) -> tuple[Together, ...]:
        """What devices do together once in a step."""
        plan = self.plan
        return collectives_of_step(
            plan,
            self.groups,
            sharded=plan.optimizer_state_sharded,
            clips=plan.clips_gradients,
            scales=plan.scales_losses,
        )

    @cached_property
    def communicators(self) -> tuple[CommunicatorRanks, ...]:
        """All communicators, in the order in which all devices make them."""
        return find_communicator_ranks(self.plan.cluster.num_devices, self.pairs, self.groups, self.layouts)

    @property
    def pairs(self) -> Iterator[tuple[int, int]]:
        """(source, destination) of each message of a batch."""
        return ((source, destination) for source, destination, _ in self.messages())

    def messages(self) -> Iterator[Message]:
        """All messages of one batch, forward and back."""
        return (message for exchange in (*self.activations, *self.gradients) for message in exchange.messages)

    def bytes_by_pair(self) -> Counter[tuple[int, int]]:
        """Bytes that each (source, destination) moves in a step, forward and back."""
        total: Counter[tuple[int, int]] = Counter()
        for source, destination, num_bytes in self.messages():
            total[source, destination] += num_bytes * self.plan.accumulate
        return total


def communicator_bytes(plan: PlacedPlan, traffic: Traffic | None = None) -> tuple[int, ...]:
    """What its communicators take of each device's memory, of a plan that passes `check`, and those of the
    plans that it runs in turn with; `traffic`: its account, where it is known and there are no others.
    """
    cluster = plan.cluster
    taken = [0] * cluster.num_devices
    if cluster.talks_by == "gloo":
        return tuple(taken)
    given = [traffic] if traffic is not None and plan.joint is None else []
    accounts = given or [traffic_of(member_plan) for member_plan in plans_in_turn(plan)]
    communicators = accounts[0].communicators if len(accounts) == 1 else _communicators_of_all(accounts)
    pairs = {pair for account in accounts for pair in account.pairs}
    for ranks, purpose, senders in communicators:
        if purpose is Purpose.MESSAGES:
            for device, peers in _peers(pairs, frozenset(senders)).items():
                taken[device] += peers_bytes(device, peers, cluster)
        else:
            num_bytes = collectives_bytes(ranks, cluster)
            for device in ranks:
                taken[device] += num_bytes
    return tuple(taken)


def _communicators_of_all(accounts: Sequence[Traffic]) -> tuple[CommunicatorRanks, ...]:
    """The communicators of plans that run in turn, and share them."""
    return find_communicator_ranks(
        accounts[0].plan.cluster.num_devices,
        (pair for account in accounts for pair in account.pairs),
        (group for account in accounts for group in account.groups),
        (layout for account in accounts for layout in account.layouts),
    )


def _peers(pairs: Iterable[tuple[int, int]], senders: Collection[int]) -> dict[int, set[int]]:
    """With whom each device exchanges messages over the communicator of these senders."""
    peers: dict[int, set[int]] = {}
    for source, destination in pairs:
        if source in senders:
            peers.setdefault(source, set()).add(destination)
            peers.setdefault(destination, set()).add(source)
    return peers


def peers_bytes(device: int, peers: Collection[int], cluster: Cluster) -> int:
    """What a communicator takes of a device's memory over which it exchanges messages with others."""
    inside = sum(cluster.node_of[peer] == cluster.node_of[device] for peer in peers)
    return messages_bytes(inside, outside=inside < len(peers))


def traffic_of(plan: PlacedPlan, parameters: ParameterUses | None = None) -> Traffic:
    """The account of a plan that passes `check`; of one of several that run in turn, its own alone.

    Args:
        plan: its slices have times at least as far as their order goes.
        parameters: the trained parameters of each op; without them, what the plan says.
    """
    layouts, edges = slice_layouts(plan), slice_edges(plan)
    order = backward_order(pass_order(plan, edges))[::-1]
    return Traffic(
        plan=plan,
        layouts=layouts,
        edges=edges,
        activations=tuple(exchange_of(plan, layouts, edge, is_gradient=False) for edge in edges),
        gradients=tuple(exchange_of(plan, layouts, edge, is_gradient=True) for edge in edges),
        groups=groups_of(plan, order, uses_of(plan) if parameters is None else parameters),
    )


def groups_of(plan: PlacedPlan, order: Sequence[int], uses: ParameterUses) -> tuple[ParameterGroup, ...]:
    """The parameters that a plan's step sums together, over all that hold them in any of the plans that it
    runs in turn with. `order`: of its slices, the last one that runs backward first.
    """
    width = plan.gradient_bytes_per_param
    if plan.joint is None:
        groups = parameter_groups(plan.slices, order, uses, plan.cluster, width)
        groups = with_matrices(groups, gathered_matrices(plan.slices, plan.by_name, plan.accumulate))
    else:
        groups = joint_groups(plan.joint, uses, plan.cluster, width)
    groups = with_ways(
        groups,
        plan.shard_weights,
        plan.cluster,
        sharded=plan.optimizer_state_sharded,
        by_node=plan.sums_by_node,
    )
    return groups if plan.joint is None else groups_of_member(plan.joint, groups, plan.member)


def with_matrices(
    groups: Iterable[ParameterGroup], matrices: Mapping[str, GatheredMatrix]
) -> tuple[ParameterGroup, ...]:
    """Groups of a matrix each, by its name, with what is gathered of it; the others as they are."""
    if not matrices:
        return tuple(groups)
    replaced = []
    for group in groups:
        matrix = matrices.get(group.blocks[0][0])
        if matrix is not None:
            group = replace(
                group,
                summing=matrix.way,
                share_tokens=matrix.share_tokens,
                gathered_bytes=matrix.num_bytes,
                product_s=matrix.product_s,
            )
        replaced.append(group)
    return tuple(replaced)


def products_s(groups: Iterable[ParameterGroup], num_devices: int) -> list[float]:
    """Seconds by which each device takes longer before its update, to multiply all factors of gradients."""
    seconds = [0.0] * num_devices
    for group in groups:
        if group.product_s:
            for device in group.devices:
                seconds[device] += group.product_s
    return seconds


def uses_of(plan: PlacedPlan) -> ParameterUses:
    """The trained parameters of each op, as far as the plan knows; of all plans that it runs in turn with."""
    by_name = plan.by_name if plan.joint is None else plan.joint.by_name
    return planned_parameters(by_name.values(), plan.sharding)


def exchange_of(plan: PlacedPlan, layouts: Sequence[Layout], edge: Edge, *, is_gradient: bool) -> Exchange:
    """Return the messages of an edge: activations to its consumer, or gradients back to its producer."""
    sender, taker = (edge.consumer, edge.producer) if is_gradient else (edge.producer, edge.consumer)
    whole = edge_bytes(plan.slices[edge.producer], edge, plan.by_name)
    over = handed_over(layouts[sender], layouts[taker], whole, plan.cluster)
    messages = tuple(Message(send.source, send.destination, send.num_bytes) for send in over.sends)
    return Exchange(sender, taker, messages, over.gather_s)


def find_communicator_ranks(
    num_devices: int,
    pairs: Iterable[tuple[int, int]],
    groups: Iterable[ParameterGroup],
    layouts: Iterable[Layout],
) -> tuple[CommunicatorRanks, ...]:
    """Find all communicators, in the order in which all devices make them.

    Args:
        num_devices: of the cluster.
        pairs: (source, destination) of each message.
        groups: parameters that are summed together.
        layouts: of all slices.
    """
    everyone = tuple(range(num_devices))
    groups, layouts = tuple(groups), tuple(layouts)
    summing = {group.devices for group in groups if len(group.devices) > 1 and group.is_trained} - {everyone}
    summing |= {part for group in groups for part in (*group.nodes, *group.across)}
    sharing = {
        replica_group
        for group in groups
        if group.sharding.is_by_pass
        for replica_group in group.replica_groups or (group.devices,)
    }
    return (
        CommunicatorRanks(everyone, Purpose.EVERYONE),
        *_exchanging(list(pairs)),
        *(CommunicatorRanks(ranks, Purpose.SUMS) for ranks in sorted(summing)),
        *(CommunicatorRanks(ranks, Purpose.SHARDS) for ranks in sorted(sharing)),
        *_inside_passes((layout for layout in layouts if not layout.sums_shares), Purpose.TENSOR),
        *_inside_passes((layout for layout in layouts if layout.sums_shares), Purpose.STATISTICS),
    )


def _inside_passes(layouts: Iterable[Layout], purpose: Purpose) -> Iterator[CommunicatorRanks]:
    """Yield the communicators of what the devices of a share, or of all shares, sum inside of each pass."""
    partners = {tuple(sorted(layout.partners(share))) for layout in layouts for share in range(layout.dp)}
    for ranks in sorted(partners - {()}):
        yield CommunicatorRanks(ranks, purpose)


def _exchanging(pairs: Sequence[tuple[int, int]]) -> list[CommunicatorRanks]:
    """The communicators of messages: one for what each half of the devices sends, where it sends anything."""
    sides = sides_of(pairs)
    communicators = []
    for side in (0, 1):
        side_pairs = [pair for pair in pairs if sides[pair[0]] == side]
        if side_pairs:
            senders = tuple(sorted({source for source, _ in side_pairs}))
            ranks = tuple(sorted({device for pair in side_pairs for device in pair}))
            communicators.append(CommunicatorRanks(ranks, Purpose.MESSAGES, senders))
    return communicators


def sides_of(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The half, 0 or 1, of each device that exchanges messages. Takes time in proportion to the pairs.

    Devices are gone through from the least of each connected part outwards, and each goes to the half with
    which it exchanges fewer messages, as far as that is told, of equals to the first. So no two of one half
    exchange any wherever that can be: those that are told of its peers are then all as far from the first.

    Args:
        pairs: (source, destination) of each message, in any order.
    """
    peers: dict[int, dict[int, int]] = {}  # of each device, messages by its peers
    for (source, destination), count in Counter(pairs).items():
        for end, far_end in ((source, destination), (destination, source)):
            counts = peers.setdefault(end, {})
            counts[far_end] = counts.get(far_end, 0) + count
    sides: dict[int, int] = {}
    seen: set[int] = set()
    for first in sorted(peers):
        waiting = deque(() if first in seen else (first,))
        while waiting:
            device = waiting.popleft()
            if device in seen:
                continue
            seen.add(device)
            there = [0, 0]
            for peer in peers[device].keys() & sides.keys():
                there[sides[peer]] += peers[device][peer]
            sides[device] = int(there[1] < there[0])
            waiting.extend(sorted(peers[device].keys() - seen))
    return sides


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
