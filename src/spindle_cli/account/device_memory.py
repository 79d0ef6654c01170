"""What a plan holds on each device: the one definition that planner, checker, simulator and report call.

A device's iteration is gone through op by op, forward and backward, and the fullest moment counts.
Parameters, optimizer state, and the gradients of parameters that other devices hold too are there all the
time; activations come with each op's forward pass and go with its backward pass. Devices that do the same are
looked at once (`find_needs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from spindle_cli.account.activations import Crossings, PassOrder
from spindle_cli.account.device.account import Account, MemoryByPass, Need, OptimizerNumbers
from spindle_cli.account.device.iteration import Role, Setting
from spindle_cli.account.device.parts import Kinds, Part, UsesCache
from spindle_cli.account.groups import gathered_matrices
from spindle_cli.account.holdings import Holders
from spindle_cli.account.joint import other_plans_slices
from spindle_cli.account.types import DeviceMemory as DeviceMemory
from spindle_cli.account.types import Joint, Pass
from spindle_cli.costs.flops import reached_by_gradients
from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.parameters import Block, level_of
from spindle_cli.costs.shares import cuts_by_share, cuts_like_largest
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.profile.types import MetaOp

# Which account of memory this is, as plans note it. The first added up the most of everything, the second had
# neither the allocator nor the reserve of GPUs, the third no communicators; by the fourth what is gathered
# came and went, by the sixth messages had a communicator for each direction, and their place one pass ahead;
# by the seventh slices kept what they had gathered where no gradients come to them, too; by the eighth what
# replica groups hand on took nothing, and what they sum twice as much where two have the same ranges; by the
# ninth the allocator held more of what comes and goes alone, the reserve of GPUs had no room for NCCL's
# start, communicators took as much between nodes as inside of one, and gradients of inputs stayed to the end.
MEMORY_FORMULA = 10

# Plans that run in turn, and which of them is meant; None: there is one alone.
Turn = tuple[Joint, int] | None
# What a device does, what it only holds, its passes where they have an order of their own, and its weight
# among the devices that share something out.
RolesOf = tuple[tuple[Role, ...], tuple[Role, ...], tuple[Pass, ...] | None, int]


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
    * So does what several replica groups hand on of parameters that they share out, from the update until the
      first forward pass that uses them (`device.iteration.HandedOn`): all that a device sends and gets.
      Between two replica groups with the same ranges it goes without, and of a sum what is sent does.
    * What the update takes comes behind the sums; where parts are updated early, on top of them.
    * Where devices share out gradients, each has its range of them all the time, and where parameters, of
      these too. What is whole besides, while ops run backward (`holdings.py`), is shown as gradients; the
      memory that parameters are gathered into (`holdings.places_of`), which is there all the time, as
      buffers. Under gloo a scatter takes a buffer as large as its gradients.
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
    uses_cache: UsesCache | None = None,
) -> tuple[DeviceMemory, ...] | None:
    """Work out `device_memory` without communicators, for slices that may not fit: None as soon as a device
    has less than it needs, those that run most slices being looked at first. `capacities`: bytes of each
    device. `uses_cache`: what other slices of the same MetaOps use.
    """
    outside = outside_bytes(cluster, None)
    left = [capacity - taken for capacity, taken in zip(capacities, outside, strict=True)]

    def has_room(need: Need, device: int) -> bool:
        return need.peak().total_bytes <= left[device]

    try:
        return _peaks(find_needs(metaops, slices, cluster, optimizer, None, has_room, uses_cache), outside)
    except NoRoomError:
        return None


def _peaks(needs: Sequence[Need], outside: Sequence[int]) -> tuple[DeviceMemory, ...]:
    peaks = {need: need.peak() for need in dict.fromkeys(needs)}
    both = list(zip(needs, outside, strict=True))
    memory = {(need, taken): replace(peaks[need], outside_bytes=taken) for need, taken in dict.fromkeys(both)}
    return tuple(memory[key] for key in both)


def host_memory(devices: Sequence[DeviceMemory], cluster: Cluster) -> tuple[int, ...]:
    """Bytes of activations in the memory of each node, if all of its devices have most there at once."""
    host_bytes = [0] * len(cluster.node_sizes)
    for node, device in zip(cluster.node_of, devices, strict=True):
        host_bytes[node] += device.host_bytes
    return tuple(host_bytes)


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
    """Work out `device_memory` over time: the most that every device holds in each pass, and what it holds
    after.
    """
    needs = find_needs(metaops, slices, cluster, optimizer, turn)
    order = sorted(range(len(slices)), key=lambda index: slices[index].start_s)
    outside = outside_bytes(cluster, communicator_bytes)
    return tuple(need.by_pass(order, taken) for need, taken in zip(needs, outside, strict=True))


def outside_bytes(cluster: Cluster, communicator_bytes: Sequence[int] | None) -> tuple[int, ...]:
    """Bytes of each device that are outside of torch's allocator."""
    communicators = communicator_bytes or (0,) * cluster.num_devices
    return tuple(reserve + taken for reserve, taken in zip(cluster.reserve_bytes, communicators, strict=True))


class NoRoomError(Exception):
    """A device has less memory than it needs."""


def find_needs(
    metaops: Iterable[MetaOp],
    slices: Sequence[SliceShape],
    cluster: Cluster,
    optimizer: OptimizerNumbers,
    turn: Turn,
    has_room: Callable[[Need, int], bool] | None = None,
    uses_cache: UsesCache | None = None,
) -> list[Need]:
    """Find what each device needs; devices that need the same share one object.

    Raises:
        NoRoomError: `has_room` says so of a device, those that run most slices first.
    """
    by_name = {metaop.name: metaop for metaop in metaops}
    uses_cache = uses_cache or UsesCache()
    others: Sequence[SliceShape] = ()
    if turn is not None:
        by_name, others = {**turn[0].by_name}, other_plans_slices(*turn)
    in_order = sorted(slices, key=lambda slice_: slice_.start_s)
    crossings = Crossings(in_order, by_name)
    parts = _parts(in_order, others, by_name, crossings, uses_cache)
    order = PassOrder.of(in_order, crossings.edges)
    passes = order.by_device(in_order, cluster.num_devices)
    held = _held_only(others, len(in_order), cluster.num_devices)
    weights = optimizer.shard_weights
    takes, only_replica_groups = _who_takes_buffers(slices, by_name, cluster, optimizer)
    shares_out = bool(optimizer.sharding)
    kinds = uses_cache.kinds(parts, [*in_order, *others], op_by_op=takes, ends_apart=shares_out)
    roles = _roles(in_order, cluster.num_devices, crossings, parts, by_name, uses_cache)
    due = {kind for runs in kinds.runs[: len(in_order)] for run in runs for kind in run.kinds}
    # Most devices do the same as others; each of these sets of roles is added up once.
    of_device = [
        (
            tuple(device_roles),
            tuple(only),
            None if passes is None else tuple(passes[device]),
            weights[device] if weights else 1,
        )
        for device, (device_roles, only) in enumerate(zip(roles, held, strict=True))
    ]
    matrices = gathered_matrices(slices, by_name, optimizer.accumulate)
    setting = Setting(
        parts=parts,
        kinds=kinds,
        holders=Holders([*in_order, *others], _uses(kinds), weights),
        sums_take_buffers=takes,
        only_replica_groups_take_buffers=only_replica_groups,
        buffers_are_small=cluster.talks_by != "gloo",
        gradient_width=optimizer.gradient_bytes_per_param,
        shares_out=shares_out,
        on_cpu=cluster.is_cpu,
        order=order,
        unreached=_unreached([*in_order, *others], by_name, optimizer.sharding),
    )
    account = Account(setting, cluster.is_cpu, optimizer, optimizer.sharding, due, matrices)
    return _needs_by_device(account, of_device, has_room)


def _who_takes_buffers(
    slices: Sequence[SliceShape],
    by_name: Mapping[str, MetaOp],
    cluster: Cluster,
    optimizer: OptimizerNumbers,
) -> tuple[bool, bool]:
    """Whether any sums of gradients take buffers, and whether those of replica groups alone may.

    Under gloo all sums of ranges take buffers, else those of unequal ranges, where they are padded, and what
    replica groups exchange.
    """
    ranges_take = cluster.talks_by == "gloo" or bool(optimizer.shard_weights)
    may_take = ranges_take or _has_replica_groups(slices, by_name, optimizer.sharding)
    return optimizer.optimizer_state_sharded and may_take, not ranges_take


def _has_replica_groups(
    slices: Iterable[SliceShape], by_name: Mapping[str, MetaOp], sharding: ShardingOf
) -> bool:
    """Whether parameters are shared out by several sets of devices."""
    run_on: dict[str, set[frozenset[int]]] = {}
    for slice_ in slices:
        if level_of(by_name[slice_.metaop], sharding).is_fetched:
            key = by_name[slice_.metaop].parameters or slice_.metaop
            run_on.setdefault(key, set()).add(frozenset(slice_.devices))
    return any(len(device_sets) > 1 for device_sets in run_on.values())


def _parts(
    in_order: Sequence[SliceShape],
    others: Sequence[SliceShape],
    by_name: Mapping[str, MetaOp],
    crossings: Crossings,
    uses_cache: UsesCache,
) -> list[Part]:
    """The parts of all slices; `others`: the slices that other plans alone run, which hand nothing on
    here.
    """
    return [
        Part(
            index,
            slice_,
            by_name,
            cuts_like_largest(slice_),
            crossings.taken_by(index) if index < len(in_order) else (),
            is_handed_on=index < len(in_order) and crossings.is_handed_on(index),
            uses_cache=uses_cache,
        )
        for index, slice_ in enumerate((*in_order, *others))
    ]


def _uses(kinds: Kinds) -> Iterator[tuple[int, Block, bool]]:
    """Say for each part which blocks it uses, one of each kind, and whether it uses all of a block although
    others split it; a part that does both says both.
    """
    for index, runs in enumerate(kinds.runs):
        for kind, is_whole in dict.fromkeys((kind, use.is_whole) for run in runs for kind, use in run.uses):
            yield index, kinds.block[kind], is_whole


def _unreached(
    slices: Sequence[SliceShape], by_name: Mapping[str, MetaOp], sharding: ShardingOf
) -> frozenset[int]:
    """Slices to which no gradients come; none where nothing is kept, as nothing asks for it then."""
    if Sharding.KEPT not in sharding.values():
        return frozenset()
    reached = reached_by_gradients(by_name.values())
    return frozenset(index for index, slice_ in enumerate(slices) if not reached[slice_.metaop])


def _held_only(others: Sequence[SliceShape], first: int, num_devices: int) -> list[list[Role]]:
    """What each device has to do of slices that other plans alone run: nothing, but it holds their
    parameters. `first`: the number of the first of their parts.
    """
    held: list[list[Role]] = [[] for _ in range(num_devices)]
    for index, slice_ in enumerate(others, first):
        for position, device in enumerate(slice_.devices):
            held[device].append((index, position % slice_.tp, 0.0, 0.0))
    return held


def _needs_by_device(
    account: Account, of_device: Sequence[RolesOf], has_room: Callable[[Need, int], bool] | None
) -> list[Need]:
    """The needs of all devices. They are worked out once for all devices that do the same, and for those
    first that run most slices.
    """
    needs: dict[RolesOf, Need] = {}
    need_of: dict[int, Need] = {}
    for device in sorted(range(len(of_device)), key=lambda device: -len(of_device[device][0])):
        role = of_device[device]
        need = needs.get(role)  # one look, as its hash goes through all that a device does
        if need is None:
            need = needs[role] = account.need(*role)
        if has_room is not None and not has_room(need, device):
            raise NoRoomError
        need_of[device] = need
    return [need_of[device] for device in range(len(of_device))]


def _roles(
    in_order: Sequence[SliceShape],
    num_devices: int,
    crossings: Crossings,
    parts: list[Part],
    by_name: Mapping[str, MetaOp],
    uses_cache: UsesCache,
) -> list[list[Role]]:
    """What each device does of the slices. Shares that are not equal have parts of their own, which are added
    to `parts`.
    """
    roles: list[list[Role]] = [[] for _ in range(num_devices)]
    for index, slice_ in enumerate(in_order):
        received, returned = crossings.received_by(index), crossings.returned_to(index)
        number_of = None
        if slice_.rows is not None:
            number_of = _parts_by_share(index, slice_, crossings, parts, by_name, uses_cache)
        for position, device in enumerate(slice_.devices):
            crossing = (received[position] if received else 0.0, returned[position] if returned else 0.0)
            number = index if number_of is None else number_of[position // slice_.tp]
            roles[device].append((number, position % slice_.tp, *crossing))
    return roles


def _parts_by_share(
    index: int,
    slice_: SliceShape,
    crossings: Crossings,
    parts: list[Part],
    by_name: Mapping[str, MetaOp],
    uses_cache: UsesCache,
) -> list[int]:
    """The number of the part of each share of a slice whose shares are not equal; new ones are added to
    `parts`, where the slice's own is of its largest.
    """
    largest = parts[index]
    number_of = {largest.shares: index}
    numbers = []
    for shares in cuts_by_share(slice_):
        if shares not in number_of:
            number_of[shares] = len(parts)
            taken = crossings.taken_by(index)
            part = Part(
                index,
                slice_,
                by_name,
                shares,
                taken,
                is_handed_on=largest.is_handed_on,
                uses_cache=uses_cache,
            )
            parts.append(part)
        numbers.append(number_of[shares])
    return numbers
