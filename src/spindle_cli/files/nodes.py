"""What a cluster is made of: groups of equal nodes, with what each has of devices, memory and cards, and
links.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from math import log
from typing import Annotated, Any

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from spindle_cli.files.artifact import Model
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
