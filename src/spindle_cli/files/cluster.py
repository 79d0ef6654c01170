"""The cluster file: nodes of devices, and the links between two devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate, combinations
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from spindle_cli.files.artifact import A_NUMBER, Artifact, Model, require_none_misspelt
from spindle_cli.files.links import GroupLinks as GroupLinks
from spindle_cli.files.links import Link as Link
from spindle_cli.files.links import Links as Links
from spindle_cli.files.links import slowest_of
from spindle_cli.units import GIB

# More ranks than torchrun has been seen with; planning keeps a few numbers for each.
MAX_DEVICES = 2**16
MAX_MEMORY_GIB = 2**30  # of a device: more than there is, so that bytes stay whole numbers of a usual size
MAX_PRICE = 1e9  # of a device for an hour, in whatever currency: more than any, so that sums stay finite
MAX_WATTS = 1e6  # of a device: more than any
MAX_TFLOPS = 1e6  # of a device: more than any
MAX_CO2_GRAMS_PER_KWH = 1e6  # more than any way to make electricity

Backend: TypeAlias = Literal["gloo", "nccl"]  # of torch.distributed

# Of a GPU's nominal memory, what is gone before the first tensor: about 0.9 GiB of 80 that the driver keeps
# (torch says "79.15 GiB total capacity" of an A100); the CUDA context, 0.3 GiB where kernels are loaded when
# they are needed and over 1 GiB where not (pytorch/pytorch issue 107667); workspaces of cuBLAS and cuDNN.
DEFAULT_RESERVE_GIB = 2.0
CPU = "cpu"  # a CPU's processes; types of different CPUs are 'cpu-...', and any other is a GPU's


class NodeGroup(Model):
    """`count` equal nodes of `devices` devices each, `memory_gib` GiB per device.

    `name`: for `between`, and for messages; by default the type of its devices.
    `links`: between devices of one of its nodes; by default those that the cluster has for all.
    `nics`: network cards of a node, each as fast as the `inter_node` link says; a device sends and receives
    through one of them. By default one per device, and one per node where devices are CPUs. More cards than
    devices are not used.
    `host_memory_gib`: GiB of a node's own memory that activations of its devices may be moved to; by default
    as many as it takes. `host_links`: links of a node between its devices and that memory, each as fast as
    the `host` link says; by default one per device, where there are fewer neighbours share one.
    `reserve_gib`: of each device's memory, what no tensor of a plan gets; by default `DEFAULT_RESERVE_GIB`
    for GPUs, or a tenth of a smaller one's memory, and nothing for CPUs.
    `price_per_device_hour`: of one device, in any currency, one for all groups.
    `watts_per_device`: what a device draws while it works; by default the board power that is published for
    its type (`costs/peaks.py`). `idle_watts_per_device`: what it draws while it waits; by default as much.
    `peak_tflops`: 10^12 operations per second that a device can do at most, in the arithmetic that is trained
    in; by default what is published for its type.
    """

    count: Annotated[int, Field(ge=1), A_NUMBER] = 1
    devices: Annotated[int, Field(ge=1), A_NUMBER]
    device: str
    memory_gib: Annotated[float, Field(gt=0, le=MAX_MEMORY_GIB), A_NUMBER]
    name: Annotated[str, Field(min_length=1)] | None = None
    links: GroupLinks | None = None
    nics: Annotated[int, Field(ge=1), A_NUMBER] | None = None
    reserve_gib: Annotated[float, Field(ge=0), A_NUMBER] | None = None
    host_memory_gib: Annotated[float, Field(gt=0, le=MAX_MEMORY_GIB), A_NUMBER] | None = None
    host_links: Annotated[int, Field(ge=1), A_NUMBER] | None = None
    price_per_device_hour: Annotated[float, Field(ge=0, le=MAX_PRICE), A_NUMBER] | None = None
    watts_per_device: Annotated[float, Field(gt=0, le=MAX_WATTS), A_NUMBER] | None = None
    idle_watts_per_device: Annotated[float, Field(ge=0, le=MAX_WATTS), A_NUMBER] | None = None
    peak_tflops: Annotated[float, Field(gt=0, le=MAX_TFLOPS), A_NUMBER] | None = None

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
    def cards(self) -> int:
        """Network cards that a node uses."""
        return min(self.devices, self.nics or (1 if is_cpu(self.device) else self.devices))

    @property
    def devices_per_host_link(self) -> int:
        """The most devices of a node that share a link to its memory."""
        return -(-self.devices // min(self.devices, self.host_links or self.devices))

    @property
    def label(self) -> str:
        """Its name, or the type of its devices."""
        return self.name or self.device


class Cluster(Artifact):
    """Devices 0..N-1, numbered node by node as torchrun numbers ranks.

    `backend`: of torch.distributed; by default gloo between CPUs and NCCL between GPUs.
    `co2_grams_per_kwh`: of the electricity that the devices draw.
    """

    KIND: ClassVar[str] = "cluster"

    schema_: Annotated[Literal["spindle.cluster/1"], Field(alias="schema")] = "spindle.cluster/1"
    name: str
    nodes: Annotated[tuple[NodeGroup, ...], Field(min_length=1)]
    links: Links
    backend: Backend | None = None
    co2_grams_per_kwh: Annotated[float, Field(ge=0, le=MAX_CO2_GRAMS_PER_KWH), A_NUMBER] | None = None

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
            raise ValueError(f"nodes: two groups are named {twice[0]!r}; expected each name once")
        known = Counter(group.label for group in self.nodes)
        pairs: set[frozenset[str]] = set()
        for place, link in enumerate(self.links.between):
            where = f"links.between[{place}].groups"
            for name in link.groups:
                if not known[name]:
                    raise ValueError(
                        f"{where}: no group is named {name!r}; expected the name of one, or the type of its "
                        f"devices where it has none: {', '.join(known)}"
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
            nodes=tuple(group.model_copy(update={"device": device}) for group in nodes),
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
        """Of each device's memory, what no tensor of a plan gets; length `num_devices`."""
        return tuple(group.reserve_bytes for group in self.nodes for _ in range(group.count * group.devices))

    @cached_property
    def usable_bytes(self) -> tuple[int, ...]:
        """Memory of each device less its reserve; length `num_devices`."""
        return tuple(
            memory - reserve for memory, reserve in zip(self.memory_bytes, self.reserve_bytes, strict=True)
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
        """Of each node, bytes of its own memory for activations of its devices; None: as many as it takes."""
        return tuple(
            None if group.host_memory_gib is None else int(group.host_memory_gib * GIB)
            for group in self.nodes
            for _ in range(group.count)
        )

    @cached_property
    def host_link(self) -> Link | None:
        """A device's link to its node's memory, where those that share it all copy at once: what each then
        has of it; of all nodes the slowest. None: nothing is known of it.
        """
        link = self.links.host
        sharing = max(group.devices_per_host_link for group in self.nodes)
        if link is None or sharing == 1:
            return link
        curve = link.curve and tuple((size, speed / sharing) for size, speed in link.curve)
        own = {"bandwidth_gb_per_s": link.bandwidth_gb_per_s / sharing, "curve": curve}
        return link.model_copy(update=own)

    def without_host_link(self) -> Cluster:
        """The same, knowing of no link to the nodes' memory."""
        return self.with_links(self.links.model_copy(update={"host": None}))

    def with_links(self, links: Links) -> Cluster:
        """The same nodes with other links."""
        return self.changed(links=links)

    def changed(self, **own: Any) -> Cluster:
        """The same but for some keys, checked anew; a copy with an update would keep what old ones led to.

        Raises:
            pydantic.ValidationError: the keys do not go together.
        """
        return Cluster(**{**{name: getattr(self, name) for name in self.model_fields_set}, **own})

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
        return not self.links.between and all(group.links is None for group in self.nodes)

    def link_of_nodes(self, a: int, b: int) -> Link:
        """The link between devices of two nodes, or between two of one."""
        ends = (self._group_of_node[a], self._group_of_node[b])
        if a == b:
            own = self.nodes[ends[0]].links
            return self.links.intra_node if own is None else own.intra_node
        return self._between[min(ends), max(ends)]

    def links_among(self, nodes: Iterable[int]) -> Links:
        """The slowest on the way between devices of these nodes, inside of one and between two."""
        key = tuple(sorted(set(nodes)))
        if key not in self._known_links:
            inside = [self.link_of_nodes(node, node) for node in key]
            between = [self.link_of_nodes(a, b) for a, b in combinations(key, 2)]
            self._known_links[key] = Links(
                intra_node=slowest_of(inside), inter_node=slowest_of(between or [self.links.inter_node])
            )
        return self._known_links[key]

    @cached_property
    def _known_links(self) -> dict[tuple[int, ...], Links]:
        return {}

    @cached_property
    def _group_of_node(self) -> tuple[int, ...]:
        return tuple(number for number, group in enumerate(self.nodes) for _ in range(group.count))

    @cached_property
    def _between(self) -> dict[tuple[int, int], Link]:
        """By the numbers of two groups, ascending."""
        link_of = {frozenset(link.groups): link for link in self.links.between}
        labels = [group.label for group in self.nodes]
        return {
            (a, b): link_of.get(frozenset((labels[a], labels[b])), self.links.inter_node)
            for a in range(len(labels))
            for b in range(a, len(labels))
        }


def is_cpu(device: str) -> bool:
    """Whether a type of device is a CPU's."""
    return device == CPU or device.startswith(f"{CPU}-")
