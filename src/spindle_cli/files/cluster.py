"""The cluster file: nodes of devices, and the links between two devices."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from spindle_cli.files.artifact import A_NUMBER, Artifact, Model
from spindle_cli.units import GB, GIB, US

# More ranks than torchrun has been seen with; planning keeps a few numbers for each.
MAX_DEVICES = 2**16
MAX_MEMORY_GIB = 2**30  # of a device: more than there is, so that bytes stay whole numbers of a usual size

Backend: TypeAlias = Literal["gloo", "nccl"]  # of torch.distributed
BandwidthCurve = tuple[
    tuple[Annotated[float, A_NUMBER], Annotated[float, A_NUMBER]], ...
]  # (bytes, gb_per_s)


# Of a GPU's nominal memory, what is gone before the first tensor: about 0.9 GiB of 80 that the driver keeps
# (torch says "79.15 GiB total capacity" of an A100); the CUDA context, 0.3 GiB where kernels are loaded when
# they are needed and over 1 GiB where not (pytorch/pytorch issue 107667); workspaces of cuBLAS and cuDNN.
DEFAULT_RESERVE_GIB = 2.0
CPU = "cpu"  # the device type of a CPU's processes; any other is a GPU's


class Link(Model):
    """How long a message between two devices takes.

    `latency_us`: microseconds before the first byte. `bandwidth_gb_per_s`: 10**9 bytes per second, one way,
    large messages. `curve`: bandwidth by message size, [[bytes, gb_per_s], ...] with ascending bytes;
    interpolated over log(bytes), and constant outside. Without it the one bandwidth holds for every size.
    """

    latency_us: Annotated[float, Field(ge=0), A_NUMBER]
    bandwidth_gb_per_s: Annotated[float, Field(gt=0), A_NUMBER]
    curve: BandwidthCurve | None = None

    @field_validator("curve")
    @classmethod
    def _curve_ascends(cls, curve: BandwidthCurve | None) -> BandwidthCurve | None:
        if curve is None:
            return None
        if not curve:
            raise ValueError("expected at least one [bytes, gb_per_s] pair, or no curve at all")
        if any(size <= 0 or speed <= 0 for size, speed in curve):
            raise ValueError("expected positive bytes and gb_per_s in every pair")
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


class NodeGroup(Model):
    """`count` equal nodes of `devices` devices each, `memory_gib` GiB per device.

    `nics`: network cards of a node, each as fast as the `inter_node` link says; a device sends and receives
    through one of them. By default one per device, and one per node where devices are CPUs. More cards than
    devices are not used.
    `host_memory_gib`: GiB of a node's own memory that activations of its devices may be moved to; by default
    as many as it takes. `host_links`: links of a node between its devices and that memory, each as fast as
    the `host` link says; by default one per device, where there are fewer neighbours share one.
    `reserve_gib`: of each device's memory, what no tensor of a plan gets; by default `DEFAULT_RESERVE_GIB`
    for GPUs, or a tenth of a smaller one's memory, and nothing for CPUs.
    """

    count: Annotated[int, Field(ge=1), A_NUMBER] = 1
    devices: Annotated[int, Field(ge=1), A_NUMBER]
    device: str
    memory_gib: Annotated[float, Field(gt=0, le=MAX_MEMORY_GIB), A_NUMBER]
    nics: Annotated[int, Field(ge=1), A_NUMBER] | None = None
    reserve_gib: Annotated[float, Field(ge=0), A_NUMBER] | None = None
    host_memory_gib: Annotated[float, Field(gt=0, le=MAX_MEMORY_GIB), A_NUMBER] | None = None
    host_links: Annotated[int, Field(ge=1), A_NUMBER] | None = None

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
        if self.device == CPU:
            return 0
        return int(min(DEFAULT_RESERVE_GIB, self.memory_gib / 10) * GIB)

    @property
    def cards(self) -> int:
        """Network cards that a node uses."""
        return min(self.devices, self.nics or (1 if self.device == CPU else self.devices))

    @property
    def devices_per_host_link(self) -> int:
        """The most devices of a node that share a link to its memory."""
        return -(-self.devices // min(self.devices, self.host_links or self.devices))


class Links(Model):
    """The kinds of link: between devices of one node, of two nodes, and from a device to its node's memory
    and back, each way as fast at once; None: nothing is known of that.
    """

    intra_node: Link
    inter_node: Link
    host: Link | None = None


class Cluster(Artifact):
    """Devices 0..N-1, numbered node by node as torchrun numbers ranks.

    `backend`: of torch.distributed; by default gloo between CPUs and NCCL between GPUs.
    """

    KIND: ClassVar[str] = "cluster"

    schema_: Annotated[Literal["spindle.cluster/1"], Field(alias="schema")] = "spindle.cluster/1"
    name: str
    nodes: Annotated[tuple[NodeGroup, ...], Field(min_length=1)]
    links: Links
    backend: Backend | None = None

    @model_validator(mode="after")
    def _one_device_type(self) -> Cluster:
        types = sorted({group.device for group in self.nodes})
        if len(types) > 1:
            raise ValueError(
                f"nodes: devices of several types ({', '.join(types)}); all devices must be of one type"
            )
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
        """The type of every device, e.g. 'a800-80gb' or 'cpu'."""
        return self.nodes[0].device

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are processes of CPUs."""
        return self.device_type == CPU

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
        return self.model_copy(update={"links": self.links.model_copy(update={"host": None})})

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
        return self.links.intra_node if self.node_of[a] == self.node_of[b] else self.links.inter_node
