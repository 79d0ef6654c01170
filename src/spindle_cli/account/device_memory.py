"""What a plan holds on each device: the one definition that planner, checker, simulator and report call.

A device's iteration is gone through op by op, forward and backward, and the fullest moment counts.
Parameters, optimizer state, and the gradients of parameters that other devices hold too are there all the
time; activations come with each op's forward pass and go with its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from spindle_cli.account.device.account import OptimizerNumbers
from spindle_cli.account.device.need import MemoryByPass, Need
from spindle_cli.account.device.needs import NoRoomError, Turn, find_needs
from spindle_cli.account.device.parts import KnownUses
from spindle_cli.account.types import DeviceMemory as DeviceMemory
from spindle_cli.costs.memory import SliceShape
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import MetaOp

# Which account of memory this is, as plans note it. The first added up the most of everything, the second had
# neither the allocator nor the reserve of GPUs, the third no communicators; by the fourth what is gathered
# came and went, by the sixth messages had a communicator for each direction, and their place one pass ahead;
# by the seventh slices kept what they had gathered where no gradients come to them, too; by the eighth what
# teams hand on took nothing, and what they sum twice as much where two have the same ranges; by the ninth the
# allocator held more of what comes and goes alone, the reserve of GPUs had no room for NCCL's start,
# communicators took as much between nodes as inside of one, and gradients of inputs stayed to the end.
MEMORY_FORMULA = 10


def device_memory(
    metaops: Iterable[MetaOp],
    slices: Sequence[SliceShape],
    cluster: Cluster,
    optimizer: OptimizerNumbers,
    communicator_bytes: Sequence[int] | None = None,
    turn: Turn = None,
) -> tuple[DeviceMemory, ...]:
    """Peak memory of every device of the cluster under a plan, as the driver would show it.

    `communicator_bytes`: of each device, what its communicators take; nothing if None. `turn`: the plans that
    it runs in turn with, and which of them it is: devices hold what they use in any of them.

    * Optimizer state takes `optimizer_state_per_param` times the trained parameters, or as their MetaOp says,
      where it is sharded divided by the number of devices that hold the same ones; some is kept whole.
    * Gradients take `gradient_bytes_per_param` times the trained parameters. Those of parameters that the
      device alone holds are made in the backward pass and given up after the update, or, with several batches
      in a step, kept between them.
    * What a slice receives, activations and gradients, has its place as soon as it may be sent: before the
      first slice runs in that direction; where the passes have an order of their own, while the pass before
      runs. It stays until the slice has run backward. The gradients of its
      inputs stay until the slice that has made them has run backward, by the order of all passes, and the
      device's next pass begins, or where they are sent `PASSES_AHEAD` passes more; where it has none behind
      that, to the iteration's end.
    * What autocast has cast of parameters stays until the last forward pass of a batch that uses them.
    * The fields of a task's batch that a device reads are there all the time, of the largest share that it
      has of the task; on GPUs twice, as those of the next batch are copied while this one's passes run.
    * Gradient sums take buffers (`SUM_BUFFER_BYTES`) from when the backward pass is through with the first op
      that uses the parameters.
    * So does what several teams hand on of parameters that they share out, from the update until the first
      forward pass that uses them (`handed_on.py`): all that a device sends and gets. Between two teams with
      the same ranges it goes without, and of a sum what is sent does.
    * What the update takes comes behind the sums; where parts are updated early, on top of them.
    * Where devices share out gradients, each has its range of them all the time, and where parameters, of
      these too. What is whole besides, while ops run backward (`holdings.py`), is shown as gradients; the
      memory that parameters are gathered into (`gather_buffers.py`), which is there all the time, as buffers.
      Under gloo a scatter takes a buffer as large as its gradients.
    * Of an op whose activations are moved to host memory, the device has what it hands on to an op that does
      not do so, no more; and while a forward pass runs the activations of one op on their way out, while a
      backward pass does those of the op that runs, or of the next one that needs any, and of its neighbour
      beside them. On CPUs they stay in the same memory, in another place.
    * On GPUs the allocator holds `ALLOCATOR_SHARE` more than the tensors. The cluster's reserve is there
      before the first tensor.
    """
    return _peaks(
        find_needs(metaops, slices, cluster, optimizer, turn), outside_bytes(cluster, communicator_bytes)
    )


def memory_within(
    metaops: Iterable[MetaOp],
    slices: Sequence[SliceShape],
    cluster: Cluster,
    optimizer: OptimizerNumbers,
    capacities: Sequence[int],
    known: KnownUses | None = None,
) -> tuple[DeviceMemory, ...] | None:
    """The same without communicators, for slices that may not fit: None as soon as a device, by those that
    run most slices, has less than it needs. `capacities`: bytes of each device. `known`: what was found for
    other slices of the same MetaOps.
    """
    outside = outside_bytes(cluster, None)
    left = [capacity - own for capacity, own in zip(capacities, outside, strict=True)]

    def has_room(need: Need, device: int) -> bool:
        return need.peak().total_bytes <= left[device]

    try:
        return _peaks(find_needs(metaops, slices, cluster, optimizer, None, has_room, known), outside)
    except NoRoomError:
        return None


def _peaks(needs: Sequence[Need], outside: Sequence[int]) -> tuple[DeviceMemory, ...]:
    peaks = {need: need.peak() for need in dict.fromkeys(needs)}
    both = list(zip(needs, outside, strict=True))
    found = {(need, own): replace(peaks[need], outside_bytes=own) for need, own in dict.fromkeys(both)}
    return tuple(found[each] for each in both)


def host_memory(devices: Sequence[DeviceMemory], cluster: Cluster) -> tuple[int, ...]:
    """Bytes of activations in the memory of each node, if all of its devices have most there at once."""
    found = [0] * len(cluster.node_sizes)
    for node, device in zip(cluster.node_of, devices, strict=True):
        found[node] += device.host_bytes
    return tuple(found)


def optimizer_steps_s(devices: Iterable[DeviceMemory], s_per_byte: float) -> tuple[float, ...]:
    """Seconds of the step on each device.

    Args:
        devices: what each holds.
        s_per_byte: of updated parameters, as the profile says.
    """
    return tuple(device.updated_bytes * s_per_byte for device in devices)


def memory_by_pass(
    metaops: Iterable[MetaOp],
    slices: Sequence[SliceShape],
    cluster: Cluster,
    optimizer: OptimizerNumbers,
    communicator_bytes: Sequence[int] | None = None,
    turn: Turn = None,
) -> tuple[MemoryByPass, ...]:
    """The same account over time: of every device, the most it holds in each pass and what it holds after."""
    needs = find_needs(metaops, slices, cluster, optimizer, turn)
    order = sorted(range(len(slices)), key=lambda index: slices[index].start_s)
    outside = outside_bytes(cluster, communicator_bytes)
    return tuple(need.by_pass(order, own) for need, own in zip(needs, outside, strict=True))


def outside_bytes(cluster: Cluster, communicator_bytes: Sequence[int] | None) -> tuple[int, ...]:
    """Of each device, what is outside of torch's allocator."""
    communicators = communicator_bytes or (0,) * cluster.num_devices
    return tuple(reserve + own for reserve, own in zip(cluster.reserve_bytes, communicators, strict=True))
