"""The cluster file: nodes of devices, and the links between two devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate, combinations
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from spindle_cli.files.artifact import Artifact, require_none_misspelt
from spindle_cli.files.nodes import CPU as CPU
from spindle_cli.files.nodes import MAX_MEMORY_GIB as MAX_MEMORY_GIB
from spindle_cli.files.nodes import GroupLinks as GroupLinks
from spindle_cli.files.nodes import Link as Link
from spindle_cli.files.nodes import Links as Links
from spindle_cli.files.nodes import NodeGroup as NodeGroup
from spindle_cli.files.nodes import is_cpu as is_cpu
from spindle_cli.files.nodes import shared_by, slowest_of
from spindle_cli.files.parsing import shown
from spindle_cli.units import GIB

# More ranks than torchrun has been seen with; planning keeps a few numbers for each.
MAX_DEVICES = 2**16
MAX_CO2_GRAMS_PER_KWH = 1e6  # more than any way to make electricity

Backend: TypeAlias = Literal["gloo", "nccl"]  # of torch.distributed


class Cluster(Artifact):
    """Devices 0 to N-1, numbered node by node as torchrun numbers ranks; at most 65,536.

    Attributes:
        name: For messages.
        nodes: Groups of equal nodes.
        links: Links between two devices.
        backend: Backend of torch.distributed; by default gloo between CPUs and NCCL between GPUs.
        co2_grams_per_kwh: Grams of CO2 for a kWh of the electricity that the devices draw.
    """

    KIND: ClassVar[str] = "cluster"

    schema_: Annotated[Literal["spindle.cluster/1"], Field(alias="schema")] = "spindle.cluster/1"
    name: str
    nodes: Annotated[tuple[NodeGroup, ...], Field(min_length=1)]
    links: Links
    backend: Backend | None = None
    co2_grams_per_kwh: Annotated[float, Field(ge=0, le=MAX_CO2_GRAMS_PER_KWH)] | None = None

    @classmethod
    def from_data(cls, data: Any, *, where: str) -> Cluster:
        """As of every file; a misspelt key is refused, too, as people write these files.

        Raises:
            InputError: of another kind or version, with a wrong value, or with a misspelt key.
        """
        cluster = super().from_data(data, where=where)
        require_none_misspelt(cls, data, where=where)
        return cluster

    @model_validator(mode="after")
    def _cpus_or_gpus(self) -> Cluster:
        if len({is_cpu(device) for device in self.types}) > 1:
            raise ValueError(
                f"nodes: CPUs and GPUs ({', '.join(self.types)}); expected devices that one backend of "
                "torch.distributed serves: all of them CPUs, or all of them GPUs"
            )
        return self

    @model_validator(mode="after")
    def _groups_have_names(self) -> Cluster:
        named = Counter(group.name for group in self.nodes if group.name is not None)
        twice = [name for name, count in named.items() if count > 1]
        if twice:
            first, second = [place for place, group in enumerate(self.nodes) if group.name == twice[0]][:2]
            raise ValueError(
                f"nodes[{second}].name: {shown(twice[0])}, as nodes[{first}] is named; expected each name "
                "once: rename one of them"
            )
        labels = Counter(group.label for group in self.nodes)
        as_types = [name for name in named if labels[name] > 1]
        if as_types:
            place = next(place for place, group in enumerate(self.nodes) if group.name == as_types[0])
            raise ValueError(
                f"nodes[{place}].name: {shown(as_types[0])}, as a group without a name is called by its "
                "devices; expected each name once: name that one, too"
            )
        return self

    @model_validator(mode="after")
    def _links_name_groups(self) -> Cluster:
        labels = dict.fromkeys(group.label for group in self.nodes)
        pairs: set[frozenset[str]] = set()
        for place, link in enumerate(self.links.between):
            where = f"links.between[{place}].groups"
            for name in link.groups:
                if name not in labels:
                    raise ValueError(
                        f"{where}: no group is named {name!r}; expected the name of one, or the type of its "
                        f"devices where it has none: {', '.join(labels)}"
                    )
            if frozenset(link.groups) in pairs:
                raise ValueError(f"{where}: {' and '.join(link.groups)} for the second time; expected once")
            pairs.add(frozenset(link.groups))
        return self

    @model_validator(mode="after")
    def _not_too_large(self) -> Cluster:
        count = sum(group.count * group.devices for group in self.nodes)
        if count > MAX_DEVICES:
            raise ValueError(f"nodes: {count} devices together; at most {MAX_DEVICES} can be planned for")
        return self

    @model_validator(mode="after")
    def _backend_serves_the_devices(self) -> Cluster:
        if self.backend == "nccl" and self.is_cpu:
            raise ValueError(
                "backend: nccl moves data between GPUs only, and the devices are CPUs; expected gloo"
            )
        return self

    @property
    def device_type(self) -> str:
        """The type of every device, e.g. 'a800-80gb' or 'cpu'; of several types, the first."""
        return self.nodes[0].device

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The types of devices, each once, in the order of the groups."""
        return tuple(dict.fromkeys(group.device for group in self.nodes))

    @property
    def is_mixed(self) -> bool:
        """Whether there are devices of several types."""
        return len(self.types) > 1

    @cached_property
    def type_of(self) -> tuple[str, ...]:
        """The type of each device; length `num_devices`."""
        return tuple(group.device for group in self.nodes for _ in range(group.count * group.devices))

    def as_if_all(self, device: str) -> Cluster:
        """As many nodes, all with devices of one type, those that have them first."""
        nodes = sorted(self.nodes, key=lambda group: group.device != device)
        return self.changed(
            name=f"{self.name}, {device}",
            nodes=tuple(group.model_copy(update={"device": device, "name": None}) for group in nodes),
            links=self.links.model_copy(update={"between": ()}),
        )

    @cached_property
    def num_of_type(self) -> dict[str, int]:
        """How many devices there are of each type, in the order of `types`."""
        return {device: self.type_of.count(device) for device in self.types}

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are processes of CPUs."""
        return is_cpu(self.device_type)

    @property
    def talks_by(self) -> Backend:
        """The backend of torch.distributed between the devices."""
        return self.backend or ("gloo" if self.is_cpu else "nccl")

    @cached_property
    def node_sizes(self) -> tuple[int, ...]:
        """Number of devices of each node, in order."""
        return tuple(group.devices for group in self.nodes for _ in range(group.count))

    @cached_property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return sum(self.node_sizes)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Index of the node of each device; length `num_devices`."""
        return tuple(node for node, size in enumerate(self.node_sizes) for _ in range(size))

    @cached_property
    def reserve_bytes(self) -> tuple[int, ...]:
        """The bytes of each device's memory that no tensor of a plan gets; length `num_devices`."""
        return tuple(group.reserve_bytes for group in self.nodes for _ in range(group.count * group.devices))

    @cached_property
    def fill_bytes(self) -> tuple[int, ...]:
        """Bytes that a plan may take of each device, its reserve among them; length `num_devices`."""
        return tuple(
            int(group.memory_gib * GIB) - group.spare_bytes
            for group in self.nodes
            for _ in range(group.count * group.devices)
        )

    @cached_property
    def usable_bytes(self) -> tuple[int, ...]:
        """What a plan may take of each device less its reserve; length `num_devices`."""
        return tuple(
            most - reserve for most, reserve in zip(self.fill_bytes, self.reserve_bytes, strict=True)
        )

    @cached_property
    def first_device_of(self) -> tuple[int, ...]:
        """The first device of each node, in order."""
        return tuple(accumulate(self.node_sizes[:-1], initial=0))

    @cached_property
    def memory_bytes(self) -> tuple[int, ...]:
        """Memory of each device in bytes; length `num_devices`."""
        return tuple(
            int(group.memory_gib * GIB) for group in self.nodes for _ in range(group.count * group.devices)
        )

    @cached_property
    def host_memory_bytes(self) -> tuple[int | None, ...]:
        """The bytes of each node's own memory that activations of its devices may take; None: as many as it
        takes.
        """
        return tuple(
            None if group.host_memory_gib is None else int(group.host_memory_gib * GIB)
            for group in self.nodes
            for _ in range(group.count)
        )

    @cached_property
    def host_link_of_node(self) -> tuple[Link | None, ...]:
        """For each node, what a device has of the link to the node's memory while all devices that share it
        copy at once; None: nothing is known of it.
        """
        links = [(group.host or self.links.host, group) for group in self.nodes]
        return tuple(
            link and shared_by(link, group.devices_per_host_link)
            for link, group in links
            for _ in range(group.count)
        )

    def host_link_among(self, nodes: Iterable[int]) -> Link | None:
        """The slowest of some nodes; None: of one of them nothing is known."""
        links = dict.fromkeys(map(self.host_link_of_node.__getitem__, nodes))
        given = [link for link in links if link is not None]
        if not given or len(given) < len(links):
            return None
        return given[0] if len(given) == 1 else slowest_of(given)

    @cached_property
    def host_link(self) -> Link | None:
        """The slowest of all nodes; None: of one of them nothing is known."""
        return self.host_link_among(range(len(self.node_sizes)))

    @cached_property
    def host_link_of_type(self) -> dict[str, Link | None]:
        """For each type of device, the slowest link to host memory of the nodes that have it."""
        type_of_node = [self.type_of[device] for device in self.first_device_of]
        return {
            kind: self.host_link_among(
                node for node, node_type in enumerate(type_of_node) if node_type == kind
            )
            for kind in self.types
        }

    @property
    def knows_host_links(self) -> bool:
        """Whether it says how fast any of its devices reach their nodes' memory."""
        return any(link is not None for link in self.host_link_of_node)

    def without_host_link(self) -> Cluster:
        """This cluster, knowing of no link to the nodes' memory."""
        nodes = tuple(group.with_host_link(None) for group in self.nodes)
        return self.changed(nodes=nodes, links=self.links.model_copy(update={"host": None}))

    def with_links(self, links: Links) -> Cluster:
        """This cluster's nodes with other links between them."""
        return self.changed(links=links)

    def with_ample_memory(self) -> Cluster:
        """This cluster with devices that have as much memory as there can be."""
        nodes = [group.model_copy(update={"memory_gib": MAX_MEMORY_GIB}) for group in self.nodes]
        return self.changed(nodes=tuple(nodes))

    def changed(self, **changes: Any) -> Cluster:
        """This cluster with some keys changed, and checked anew: a copy with an update would keep what the
        old ones led to.

        Raises:
            pydantic.ValidationError: the keys do not go together.
        """
        return Cluster(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})

    def num_groups(self, size: int) -> int:
        """How many groups of `size` devices of one node there are side by side."""
        return sum(devices // size for devices in self.node_sizes)

    def is_inside_node(self, devices: Iterable[int]) -> bool:
        """Whether all of some devices are of one node."""
        return len({self.node_of[device] for device in devices}) <= 1

    @cached_property
    def cards_of_node(self) -> tuple[int, ...]:
        """Number of network cards of each node, in order."""
        return tuple(group.cards for group in self.nodes for _ in range(group.count))

    @cached_property
    def card_of(self) -> tuple[tuple[int, int], ...]:
        """(node, card of that node) that each device sends and receives through; length `num_devices`.

        Neighbours share a card, as devices behind one PCIe switch do.
        """
        return tuple(
            (node, place * cards // size)
            for node, (size, cards) in enumerate(zip(self.node_sizes, self.cards_of_node, strict=True))
            for place in range(size)
        )

    def link(self, a: int, b: int) -> Link:
        """The link between two different devices."""
        if self.has_one_kind_of_links:
            return self.links.intra_node if self.node_of[a] == self.node_of[b] else self.links.inter_node
        return self.link_of_nodes(self.node_of[a], self.node_of[b])

    @cached_property
    def has_one_kind_of_links(self) -> bool:
        """Whether all nodes have equal links, and so have all pairs of them."""
        return not self.links.between and all(group.intra_node is None for group in self.nodes)

    @cached_property
    def has_one_kind_of_nodes(self) -> bool:
        """Whether it makes no difference over which nodes devices that sum something lie."""
        return self.has_one_kind_of_links and len(set(self.cards_of_node)) == 1

    def link_of_nodes(self, a: int, b: int) -> Link:
        """The link between devices of two nodes, or between two of one."""
        ends = (self._group_of_node[a], self._group_of_node[b])
        if a == b:
            return self.nodes[ends[0]].intra_node or self.links.intra_node
        return self._between[min(ends), max(ends)]

    def links_among(self, nodes: Iterable[int]) -> Links:
        """The slowest on the way between devices of these nodes, inside of one and between two."""
        numbers = Counter(map(self._group_of_node.__getitem__, set(nodes)))
        # Nodes of a group are alike: two of it say what any number says.
        key = tuple(sorted((group, number > 1) for group, number in numbers.items()))
        if key not in self._known_links:
            inside = [self.nodes[group].intra_node or self.links.intra_node for group, _ in key]
            ends = [group for group, has_several in key for _ in range(1 + has_several)]
            between = [self._between[pair] for pair in dict.fromkeys(combinations(ends, 2))]
            self._known_links[key] = Links(
                intra_node=slowest_of(inside), inter_node=slowest_of(between or [self.links.inter_node])
            )
        return self._known_links[key]

    @cached_property
    def _known_links(self) -> dict[tuple[tuple[int, bool], ...], Links]:
        return {}

    @cached_property
    def _group_of_node(self) -> tuple[int, ...]:
        return tuple(number for number, group in enumerate(self.nodes) for _ in range(group.count))

    @cached_property
    def _between(self) -> dict[tuple[int, int], Link]:
        """The link between the nodes of two groups, by the groups' numbers, ascending."""
        link_of = {frozenset(link.groups): link for link in self.links.between}
        labels = [group.label for group in self.nodes]
        return {
            (a, b): link_of.get(frozenset((labels[a], labels[b])), self.links.inter_node)
            for a in range(len(labels))
            for b in range(a, len(labels))
        }
