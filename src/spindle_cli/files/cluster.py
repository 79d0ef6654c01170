"""The cluster file: nodes of devices, and the links between two devices."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from math import log
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from spindle_cli.files.artifact import Artifact, Model, require_none_misspelt, shown
from spindle_cli.units import GB, GIB, US

# More, or less, is no link; what programs and simulations make of these stays finite.
MOST_LATENCY_US = 1e9
LEAST_GB_PER_S, MOST_GB_PER_S = 1e-6, 1e9

BandwidthCurve = tuple[tuple[float, float], ...]  # (bytes, gb_per_s)
MAX_MEMORY_GIB = 2**30  # of a device: more than there is, so that bytes stay whole numbers of a usual size
MAX_PRICE = 1e9  # of a device for an hour, in whatever currency: more than any, so that sums stay finite
MAX_WATTS = 1e6  # of a device: more than any
MAX_TFLOPS = 1e6  # of a device: more than any
# In GiB of a GPU's nominal memory, what no tensor gets. It is the sum of
# * 1.0 that the driver keeps: torch sees 79.2 of an H100's 80, and 94.5 of a GH200's 95.6;
# * 1.8 for the CUDA context, loaded kernels and libraries of one process without communicators, as
#   vllm-project/vllm pull request 10511 has them on an H100 (the context alone is 0.3 to 0.6, more on larger
#   cards: pytorch/pytorch issue 107667, ggml-org/llama.cpp pull request 23604);
# * 0.5 that NCCL takes before the first buffer of a channel: its kernels, its queues, and the pool of its
#   proxy threads (NVIDIA/nccl issue 2363 and pull request 2366);
# * 0.06 for workspaces of cuBLAS: 32 MiB on Hopper, 8 before, for each of the two threads that run passes
#   forward and backward (NVIDIA's documentation of cublasSetWorkspace, pytorch/pytorch pull request 120925).
DEFAULT_RESERVE_GIB = 3.35
# Of a GPU's memory, what plans leave free, so that a prediction may fall short by as much: the reserve and
# the allocator's share are what is expected. With less room an allocator gives back all that it keeps, again
# and again, before there is no memory.
SPARE_SHARE = 0.05
CPU = "cpu"  # a CPU's processes; types of different CPUs are 'cpu-...', and any other is a GPU's


class Link(Model):
    """How long a message between two devices takes.

    Attributes:
        latency_us: Microseconds before the first byte.
        bandwidth_gb_per_s: 10^9 bytes per second, one way, of large messages.
        curve: Bandwidth by message size, [[bytes, gb_per_s], ...] with ascending bytes; interpolated over the
            logarithm of the size, and constant outside. Without it the one bandwidth holds for every size.
    """

    latency_us: Annotated[float, Field(ge=0, le=MOST_LATENCY_US)]
    bandwidth_gb_per_s: Annotated[float, Field(ge=LEAST_GB_PER_S, le=MOST_GB_PER_S)]
    curve: BandwidthCurve | None = None

    @field_validator("curve")
    @classmethod
    def _curve_ascends(cls, curve: BandwidthCurve | None) -> BandwidthCurve | None:
        if curve is None:
            return None
        if not curve:
            raise ValueError("expected at least one [bytes, gb_per_s] pair, or no curve at all")
        if any(size <= 0 or not LEAST_GB_PER_S <= speed <= MOST_GB_PER_S for size, speed in curve):
            raise ValueError(
                f"expected positive bytes, and gb_per_s from {LEAST_GB_PER_S:g} to {MOST_GB_PER_S:g}, in "
                "every pair"
            )
        if any(later[0] <= earlier[0] for earlier, later in pairwise(curve)):
            raise ValueError("expected ascending bytes")
        return curve

    @property
    def latency_s(self) -> float:
        """Seconds before the first byte arrives."""
        return self.latency_us * US

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes per second for large messages, one way."""
        return self.bandwidth_gb_per_s * GB


class GroupLinks(Model):
    """Links of one group of nodes, in the place of those that the cluster has for all.

    Attributes:
        intra_node: Between devices of one of its nodes.
        host: From a device to its node's memory and back, each way at the full speed at once.
    """

    intra_node: Link | None = None
    host: Link | None = None

    @model_validator(mode="after")
    def _says_something(self) -> GroupLinks:
        if self.intra_node is None and self.host is None:
            raise ValueError("expected intra_node, or host, or both")
        return self

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_empty(serialize(self))


class BetweenLink(Link):
    """The link between nodes of two groups, or between those of one that is named twice.

    Attributes:
        groups: Names of the two groups.
    """

    groups: tuple[str, str]


class Links(Model):
    """The kinds of link.

    Attributes:
        intra_node: Between devices of one node.
        inter_node: Between nodes.
        host: From a device to its node's memory and back, each way at the full speed at once; absent: plans
            move no activations there.
        between: Between nodes of these groups, in the place of `inter_node`.
    """

    intra_node: Link
    inter_node: Link
    host: Link | None = None
    between: tuple[BetweenLink, ...] = ()

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_empty(serialize(self))


def _without_empty(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value not in (None, (), [])}


def shared_by(link: Link, count: int) -> Link:
    """What each of so many devices has of a link that all use at once: equal parts of its bandwidth."""
    if count == 1:
        return link
    curve = link.curve and tuple((size, speed / count) for size, speed in link.curve)
    changes = {"bandwidth_gb_per_s": link.bandwidth_gb_per_s / count, "curve": curve}
    return link.model_copy(update=changes)


def gb_per_s(link: Link, num_bytes: float) -> float:
    """One-way bandwidth for a message of this size: the link's curve over log(bytes), constant outside it."""
    curve = link.curve
    if curve is None:
        return link.bandwidth_gb_per_s
    if num_bytes <= curve[0][0]:
        return curve[0][1]
    if num_bytes >= curve[-1][0]:
        return curve[-1][1]
    above = bisect_right(curve, num_bytes, key=lambda pair: pair[0])
    (low_bytes, low), (high_bytes, high) = curve[above - 1], curve[above]
    share = log(num_bytes / low_bytes) / log(high_bytes / low_bytes)
    return low + share * (high - low)


def slowest_of(links: Iterable[Link]) -> Link:
    """The bandwidth of the slowest for each size of message, the latency of the longest: what a ring over all
    of them has.
    """
    distinct = list(dict.fromkeys(links))
    sizes = sorted({size for link in distinct for size, _ in link.curve or ()})
    # As it is: what several share may be less than a file may say.
    return Link.model_construct(
        latency_us=max(link.latency_us for link in distinct),
        bandwidth_gb_per_s=min(link.bandwidth_gb_per_s for link in distinct),
        curve=tuple((size, min(gb_per_s(link, size) for link in distinct)) for size in sizes) or None,
    )


class NodeGroup(Model):
    """A group of equal nodes.

    Attributes:
        count: How many nodes.
        devices: Devices of each node.
        device: Their type: `cpu`, `cpu-...`, or a GPU's, such as `a800-80gb`.
        memory_gib: GiB of each device.
        name: For `between`, and for messages; by default the type of its devices.
        links: Links of its own between devices of one of its nodes, and to its memory; by default the
            cluster's.
        nics: Network cards of a node, each as fast as `inter_node` says; neighbouring devices send and
            receive through the same card, and sums use as many cards as they have devices in the node. By
            default one for each GPU; CPU devices of a node share one. More cards than devices are not used.
        reserve_gib: GiB of each device that no tensor of a plan gets. By default 3.35 for GPUs, or a tenth of
            a smaller one's memory, and plans leave 5 % more free; 0 for CPUs.
        host_memory_gib: With a `host` link, GiB that a node has for activations of all of its devices; by
            default as much as it takes.
        host_links: With a `host` link, how many such links a node has; neighbours share them equally. By
            default one for each device.
        price_per_device_hour: Price of a device for an hour, in any currency, the same one for all groups.
        watts_per_device: Watts that a device draws while it works; by default the board power that is
            published for its type.
        idle_watts_per_device: Watts that it draws while it waits; by default as many.
        peak_tflops: 10^12 operations per second that a device can do at most, by which `dp-flops` shares
            batches out; by default what is published for its type.
    """

    count: Annotated[int, Field(ge=1)] = 1
    devices: Annotated[int, Field(ge=1)]
    device: Annotated[str, Field(min_length=1)]
    memory_gib: Annotated[float, Field(gt=0, le=MAX_MEMORY_GIB)]
    name: Annotated[str, Field(min_length=1)] | None = None
    links: GroupLinks | None = None
    nics: Annotated[int, Field(ge=1)] | None = None
    reserve_gib: Annotated[float, Field(ge=0)] | None = None
    host_memory_gib: Annotated[float, Field(gt=0, le=MAX_MEMORY_GIB)] | None = None
    host_links: Annotated[int, Field(ge=1)] | None = None
    price_per_device_hour: Annotated[float, Field(ge=0, le=MAX_PRICE)] | None = None
    watts_per_device: Annotated[float, Field(gt=0, le=MAX_WATTS)] | None = None
    idle_watts_per_device: Annotated[float, Field(ge=0, le=MAX_WATTS)] | None = None
    peak_tflops: Annotated[float, Field(gt=0, le=MAX_TFLOPS)] | None = None

    @model_validator(mode="after")
    def _idles_below_its_watts(self) -> NodeGroup:
        if self.idle_watts_per_device is None:
            return self
        if self.watts_per_device is None:
            raise ValueError(
                f"idle_watts_per_device: {self.idle_watts_per_device:g} without watts_per_device; "
                "expected both, measured in the same way"
            )
        if self.idle_watts_per_device > self.watts_per_device:
            raise ValueError(
                f"idle_watts_per_device: {self.idle_watts_per_device:g}; expected at most "
                f"watts_per_device, {self.watts_per_device:g}"
            )
        return self

    @model_validator(mode="after")
    def _leaves_memory(self) -> NodeGroup:
        if self.reserve_gib is not None and self.reserve_gib >= self.memory_gib:
            raise ValueError(
                f"reserve_gib: {self.reserve_gib:g} of {self.memory_gib:g} GiB; expected less than memory_gib"
            )
        return self

    @property
    def reserve_bytes(self) -> int:
        """Bytes of each device that no tensor of a plan gets."""
        if self.reserve_gib is not None:
            return int(self.reserve_gib * GIB)
        if is_cpu(self.device):
            return 0
        return int(min(DEFAULT_RESERVE_GIB, self.memory_gib / 10) * GIB)

    @property
    def spare_bytes(self) -> int:
        """Bytes of each device that plans leave free, beside its reserve."""
        if self.reserve_gib is not None or is_cpu(self.device):
            return 0
        return int(SPARE_SHARE * self.memory_gib * GIB)

    @property
    def cards(self) -> int:
        """Network cards that a node uses."""
        return min(self.devices, self.nics or (1 if is_cpu(self.device) else self.devices))

    @property
    def devices_per_host_link(self) -> int:
        """The most devices of a node that share a link to its memory."""
        return -(-self.devices // min(self.devices, self.host_links or self.devices))

    @property
    def intra_node(self) -> Link | None:
        """Its own link between devices of one node."""
        return None if self.links is None else self.links.intra_node

    @property
    def host(self) -> Link | None:
        """The link of the group's devices to their node's memory, where the group says one."""
        return None if self.links is None else self.links.host

    def with_host_link(self, link: Link | None) -> NodeGroup:
        """This group with a link of its own to a node's memory."""
        if link == self.host:
            return self
        inside = self.intra_node
        links = GroupLinks(intra_node=inside, host=link) if inside is not None or link is not None else None
        return self.model_copy(update={"links": links})

    @property
    def label(self) -> str:
        """What people call the group: its name, or the type of its devices."""
        return self.name or self.device


def is_cpu(device: str) -> bool:
    """Whether a type of device is a CPU's."""
    return device == CPU or device.startswith(f"{CPU}-")


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
