"""What a plan holds on each device: the one definition that planner, checker, simulator and report call.

A device's iteration is gone through op by op, forward and backward, and the fullest moment counts.
Parameters, optimizer state, and the gradients of parameters that other devices hold too are there all the
time; activations come with each op's forward pass and go with its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Protocol

from spindle_cli.account.crossing import Crossings
from spindle_cli.account.device.iteration import Fullest, Iteration, PassBytes, Role, Setting
from spindle_cli.account.device.own_order import passes_by_device
from spindle_cli.account.device.parts import KnownUses, Part
from spindle_cli.account.holdings import BlockUse, Held, Holders
from spindle_cli.account.joint import beside
from spindle_cli.account.types import DeviceMemory as DeviceMemory
from spindle_cli.account.types import Joint, Pass
from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.share_sizes import cuts_by_share, cuts_like_largest
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.profile.types import MetaOp

# Which account of memory this is, as plans note it. The first added up the most of everything, the second had
# neither the allocator nor the reserve of GPUs, the third no communicators.
MEMORY_FORMULA = 4
# On top of all: what is not counted one by one, such as counters of the optimizer, flags, and the padding of
# buckets. By scripts/bench_memory.py it was 0.2 % at most.
UNCOUNTED_SHARE = 0.01
# On GPUs, what torch's allocator holds beyond the tensors that come and go: it rounds sizes up to 512 bytes,
# takes 2, 20 or more MiB at once from the driver (c10/cuda/CUDACachingAllocator.cpp), and holes stay between
# blocks of different ages. What is there all the time leaves none. Assumed, not measured here.
ALLOCATOR_SHARE = 0.1

# Plans that run in turn, and which of them is meant; None: there is one alone.
Turn = tuple[Joint, int] | None


class OptimizerNumbers(Protocol):
    """What is needed of an optimizer; `Profile` and `Plan` have it."""

    @property
    def optimizer_state_per_param(self) -> float: ...
    @property
    def optimizer_state_sharded(self) -> bool: ...
    @property
    def update_bytes_per_param(self) -> float: ...
    @property
    def gradient_bytes_per_param(self) -> float: ...
    @property
    def accumulate(self) -> int: ...
    @property
    def sharding(self) -> ShardingOf: ...


@dataclass(frozen=True)
class MemoryByPass:
    """What a device holds over an iteration, in bytes; the most of all is `DeviceMemory.total_bytes`.

    Attributes:
        idle_bytes: what is there at every moment.
        passes: of each (index of a slice, whether backward), the most while it runs, and what stays.
        update_bytes: the most behind the last pass, while gradients are summed and parameters updated.
    """

    idle_bytes: int
    passes: Mapping[tuple[int, bool], tuple[int, int]]
    update_bytes: int


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
      runs. It stays until the slice has run backward; the gradients of its
      inputs to the iteration's end.
    * The fields of a task's batch that a device reads are there all the time, of the largest share that it
      has of the task.
    * Gradient sums take buffers (`SUM_BUFFER_BYTES`) from when the backward pass is through with the first op
      that uses the parameters.
    * Where devices share out gradients, each has its range of them all the time, and where parameters, of
      these too. What is whole besides, while ops run (`holdings.py`), is shown as gradients, and what is
      gathered of parameters as buffers. Under gloo a scatter takes a buffer as large as its gradients.
    * On GPUs the allocator holds `ALLOCATOR_SHARE` more than what comes and goes. The cluster's reserve is
      there before the first tensor.
    """
    return _peaks(
        _needs(metaops, slices, cluster, optimizer, turn), outside_bytes(cluster, communicator_bytes)
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

    def has_room(need: _Need, device: int) -> bool:
        return need.peak().total_bytes <= left[device]

    try:
        return _peaks(_needs(metaops, slices, cluster, optimizer, None, has_room, known), outside)
    except _NoRoomError:
        return None


def _peaks(needs: Sequence[_Need], outside: Sequence[int]) -> tuple[DeviceMemory, ...]:
    peaks = {need: need.peak() for need in dict.fromkeys(needs)}
    both = list(zip(needs, outside, strict=True))
    found = {(need, own): replace(peaks[need], outside_bytes=own) for need, own in dict.fromkeys(both)}
    return tuple(found[each] for each in both)


class _NoRoomError(Exception):
    """A device has less memory than it needs."""


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
    needs = _needs(metaops, slices, cluster, optimizer, turn)
    order = sorted(range(len(slices)), key=lambda index: slices[index].start_s)
    outside = outside_bytes(cluster, communicator_bytes)
    return tuple(need.by_pass(order, own) for need, own in zip(needs, outside, strict=True))


def outside_bytes(cluster: Cluster, communicator_bytes: Sequence[int] | None) -> tuple[int, ...]:
    """Of each device, what is outside of torch's allocator."""
    communicators = communicator_bytes or (0,) * cluster.num_devices
    return tuple(reserve + own for reserve, own in zip(cluster.reserve_bytes, communicators, strict=True))


def _needs(
    metaops: Iterable[MetaOp],
    slices: Sequence[SliceShape],
    cluster: Cluster,
    optimizer: OptimizerNumbers,
    turn: Turn,
    has_room: Callable[[_Need, int], bool] | None = None,
    known: KnownUses | None = None,
) -> list[_Need]:
    """Of each device; devices that need the same share one object.

    Raises:
        _NoRoomError: `has_room` says so of a device, those that run most slices first.
    """
    by_name = {metaop.name: metaop for metaop in metaops}
    known = known or KnownUses()
    others: Sequence[SliceShape] = ()
    if turn is not None:
        by_name, others = {**turn[0].by_name}, beside(*turn)
    in_order = sorted(slices, key=lambda piece: piece.start_s)
    crossings = Crossings(in_order, by_name)
    parts = [
        Part(
            index,
            piece,
            by_name,
            cuts_like_largest(piece),
            is_handed_on=crossings.is_handed_on(index),
            known=known,
        )
        for index, piece in enumerate(in_order)
    ]
    passes = passes_by_device(in_order, cluster.num_devices)
    held: list[list[Role]] = [[] for _ in range(cluster.num_devices)]
    for index, piece in enumerate(others, len(in_order)):
        parts.append(Part(index, piece, by_name, cuts_like_largest(piece), is_handed_on=False, known=known))
        for position, device in enumerate(piece.devices):
            held[device].append((index, position % piece.tp, 0.0, 0.0))
    takes_buffers = cluster.talks_by == "gloo" and optimizer.optimizer_state_sharded
    shares_out = bool(optimizer.sharding)
    kinds = known.kinds(parts, [*in_order, *others], op_by_op=takes_buffers, ends_apart=shares_out)
    uses = [
        (index, kinds.block[kind])
        for index in range(len(parts))
        for kind in dict.fromkeys(kind for run in kinds.runs[index] for kind in run.kinds)
    ]
    roles: list[list[Role]] = [[] for _ in range(cluster.num_devices)]
    for index, piece in enumerate(in_order):
        received, returned = crossings.received_by(index), crossings.returned_to(index)
        number_of = _parts_by_share(index, piece, parts, by_name, known) if piece.rows is not None else None
        for position, device in enumerate(piece.devices):
            crossing = (received[position] if received else 0.0, returned[position] if returned else 0.0)
            number = index if number_of is None else number_of[position // piece.tp]
            roles[device].append((number, position % piece.tp, *crossing))
    due = {kind for runs in kinds.runs[: len(in_order)] for run in runs for kind in run.kinds}
    # Most devices do the same as others; each of these sets of roles is added up once.
    of_device = [
        (tuple(own), tuple(only), None if passes is None else tuple(passes[device]))
        for device, (own, only) in enumerate(zip(roles, held, strict=True))
    ]
    setting = Setting(
        parts=parts,
        kinds=kinds,
        holders=Holders([*in_order, *others], uses),
        sums_take_buffers=takes_buffers,
        gradient_width=optimizer.gradient_bytes_per_param,
        shares_out=shares_out,
    )
    account = _Account(setting, cluster.is_cpu, optimizer, optimizer.sharding, due)
    needs: dict[object, _Need] = {}
    for device in sorted(range(len(of_device)), key=lambda device: -len(of_device[device][0])):
        role = of_device[device]
        if role not in needs:
            needs[role] = account.need(*role)
        if has_room is not None and not has_room(needs[role], device):
            raise _NoRoomError
    return [needs[role] for role in of_device]


def _parts_by_share(
    index: int, piece: SliceShape, parts: list[Part], by_name: Mapping[str, MetaOp], known: KnownUses
) -> list[int]:
    """The number of the part of each share of a slice whose shares are not equal; new ones are added to
    `parts`, where the slice's own is of its largest.
    """
    own = parts[index]
    number_of = {own.shares: index}
    found = []
    for shares in cuts_by_share(piece):
        if shares not in number_of:
            number_of[shares] = len(parts)
            parts.append(Part(index, piece, by_name, shares, is_handed_on=own.is_handed_on, known=known))
        found.append(number_of[shares])
    return found


@dataclass(frozen=True, eq=False)
class _Need:
    """What a device holds all the time, and pass by pass."""

    parameters: int
    state: int
    summed_gradients: float
    updated: float
    allocator_share: float
    passes: tuple[PassBytes, ...]

    def peak(self) -> DeviceMemory:
        """At the fullest moment of all."""
        return self.at(max((each.fullest for each in self.passes), key=lambda fullest: fullest.total))

    def at(self, moment: Fullest) -> DeviceMemory:
        """At a moment."""
        lasting = self.parameters + self.state + round(self.summed_gradients)
        uncounted = UNCOUNTED_SHARE * (lasting + moment.total)
        return DeviceMemory(
            parameter_bytes=self.parameters,
            gradient_bytes=round(self.summed_gradients + moment.gradients),
            optimizer_bytes=self.state,
            activation_bytes=round(moment.activations),
            buffer_bytes=round(moment.buffers + uncounted),
            updated_bytes=round(self.updated),
            lasting_bytes=lasting,
            allocator_bytes=round(self.allocator_share * moment.total),
        )

    def by_pass(self, order: Sequence[int], outside: int) -> MemoryByPass:
        """`order`: indices of slices, in the order of their numbers here; `outside`: of the allocator."""

        def total(moment: Fullest) -> int:
            return self.at(moment).total_bytes + outside

        return MemoryByPass(
            idle_bytes=total(self.passes[-1].after),
            passes={
                (order[each.piece], each.is_backward): (total(each.fullest), total(each.after))
                for each in self.passes
                if each.piece is not None
            },
            update_bytes=total(self.passes[-1].fullest),
        )


@dataclass(frozen=True)
class _Account:
    """What devices need under a plan."""

    setting: Setting
    on_cpu: bool
    optimizer: OptimizerNumbers
    sharding: ShardingOf
    due: Set[int]

    def need(self, roles: Sequence[Role], held_only: Sequence[Role], passes: Sequence[Pass] | None) -> _Need:
        """What a device with these roles holds, which are in the order in which it runs them; `held_only`:
        those that it has in other plans, and holds parameters for. `passes`: in its own order, where that is
        not all forward and then all backward in reverse.
        """
        last_first = roles
        if passes is not None:
            place = {piece: number for number, (piece, is_backward) in enumerate(passes) if is_backward}
            last_first = sorted(roles, key=lambda role: -place[self.setting.parts[role[0]].piece])
        held = self._held(last_first, held_only)
        sharded = self.optimizer.optimizer_state_sharded
        of_all = held.values()
        updated = sum(there.count * there.updated_bytes(sharded=sharded) for there in of_all)
        usual = self.optimizer.optimizer_state_per_param
        wide = self.optimizer.gradient_bytes_per_param
        own = wide * sum(there.count * there.own_bytes for there in of_all)
        keeps_own = self.optimizer.accumulate > 1
        iteration = Iteration(self.setting, roles, passes, held, keeps_own=keeps_own)
        return _Need(
            parameters=round(sum(there.count * there.lasting_bytes for there in of_all)),
            state=round(sum(there.count * there.state_bytes(usual, sharded=sharded) for there in of_all)),
            summed_gradients=wide * sum(there.count * there.lasting_gradient_bytes for there in of_all),
            updated=updated,
            allocator_share=0.0 if self.on_cpu else ALLOCATOR_SHARE,
            passes=tuple(iteration.run(own, updated * self.optimizer.update_bytes_per_param)),
        )

    def _held(self, roles: Sequence[Role], held_only: Sequence[Role]) -> dict[int, Held]:
        """By kind. `roles`: the last one that runs backward first."""
        held: dict[int, Held] = {}
        for number, (index, shard, *_) in enumerate((*roles, *held_only)):
            part = self.setting.parts[index]
            for run in self.setting.kinds.runs[part.piece]:
                for kind, use in run.uses:
                    there = held.get(kind)
                    if there is None:
                        there = held[kind] = self._new(kind, use, part, index if number < len(roles) else -1)
                    there.least_tp = min(there.least_tp, part.tp)
                    there.num_bytes = max(there.num_bytes, use.num_bytes)
                    there.trained_bytes = max(there.trained_bytes, use.trained_bytes)
                    if part.tp > 1 and use.block[2]:
                        there.shards.add((shard / part.tp, (shard + 1) / part.tp))
                    else:
                        there.is_whole = True
        for kind, there in held.items():
            there.divide(self.setting.holders.of(self.setting.kinds.block[kind]))
        return held

    def _new(self, kind: int, use: BlockUse, part: Part, last_part: int) -> Held:
        """A block as the first part that uses it has it."""
        return Held(
            use.num_bytes,
            use.trained_bytes,
            self.setting.kinds.size[kind],
            last_part,
            part.optimizer,
            self.sharding.get(use.block[0], Sharding.OPTIMIZER),
            least_tp=part.tp,
            is_due=kind in self.due,
        )
