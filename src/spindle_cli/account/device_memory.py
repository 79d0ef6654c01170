"""What a plan holds on each device: the one definition that planner, checker, simulator and report call.

A device's iteration is gone through op by op, forward and backward, and the fullest moment counts.
Parameters, optimizer state, and the gradients of parameters that other devices hold too are there all the
time; activations come with each op's forward pass and go with its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from spindle_cli.account.crossing import Crossings, slice_inputs
from spindle_cli.account.holdings import Block, BlockUse, Held, Holders, blocks_of
from spindle_cli.costs.memory import (
    MetaOpSizes,
    OpNeeds,
    SliceShape,
    op_needs,
    slice_output_bytes,
)
from spindle_cli.files.cluster import Cluster
from spindle_cli.units import MIB

# Which account of memory this is, as plans note it. The first added up the most of everything, the second had
# neither the allocator nor the reserve of GPUs.
MEMORY_FORMULA = 3
# Under gloo, what gradient sums under way may take in receive buffers where optimizer state is
# sharded; the runtime lets further sums wait. A single sum may be larger.
SUM_BUFFER_BYTES = 32 * MIB
# On top of all: what is not counted one by one, such as counters of the optimizer, flags, and the padding of
# buckets. By scripts/bench_memory.py it was 0.2 % at most.
UNCOUNTED_SHARE = 0.01
# On GPUs, what torch's allocator holds beyond the tensors that come and go: it rounds sizes up to 512 bytes,
# takes 2, 20 or more MiB at once from the driver (c10/cuda/CUDACachingAllocator.cpp), and holes stay between
# blocks of different ages. What is there all the time leaves none. Assumed, not measured here.
ALLOCATOR_SHARE = 0.1
# An op that is recomputed keeps the state of the random numbers (torch's, on the CPU).
_RANDOM_STATE_BYTES = 5056


class OptimizerNumbers(Protocol):
    """What is needed of an optimizer; `Profile` and `Plan` have it."""

    @property
    def optimizer_state_per_param(self) -> float: ...
    @property
    def optimizer_state_sharded(self) -> bool: ...
    @property
    def update_bytes_per_param(self) -> float: ...
    @property
    def accumulate(self) -> int: ...


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device at its fullest moment, by what takes them.

    `allocator_bytes`: what torch's allocator holds beyond the tensors. `outside_bytes`: what is outside of
    it, the cluster's reserve for context and libraries, and communicators.
    `updated_bytes`: of the parameters, those that the device's own optimizer updates. `lasting_bytes`: of
    all, what is there at every moment.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    buffer_bytes: int
    updated_bytes: int
    lasting_bytes: int
    allocator_bytes: int = 0
    outside_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of them together, as the driver shows it."""
        return self.tensor_bytes + self.allocator_bytes + self.outside_bytes

    @property
    def tensor_bytes(self) -> int:
        """Of all, what tensors take."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.buffer_bytes
        )

    @property
    def parts(self) -> dict[str, int]:
        """All of them by what people call them."""
        return {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer state": self.optimizer_bytes,
            "activations": self.activation_bytes,
            "buffers": self.buffer_bytes,
            "allocator": self.allocator_bytes,
            "reserve and communicators": self.outside_bytes,
        }


def device_memory(
    metaops: Iterable[MetaOpSizes],
    slices: Sequence[SliceShape],
    cluster: Cluster,
    optimizer: OptimizerNumbers,
    communicator_bytes: Sequence[int] | None = None,
) -> tuple[DeviceMemory, ...]:
    """Peak memory of every device of the cluster under a plan, as the driver would show it.

    `communicator_bytes`: of each device, what its communicators take; nothing if None.

    * Optimizer state takes `optimizer_state_per_param` times the trained parameters, where it is sharded
      divided by the number of devices that hold the same ones.
    * Gradients take the bytes of the trained parameters. Those of parameters that the device alone holds are
      made in the backward pass and given up after the update, or, with several batches in a step, kept
      between them.
    * What a slice receives, activations and gradients, has its place as soon as it may be sent: before the
      first slice runs in that direction. It stays until the slice has run backward; the gradients of its
      inputs to the iteration's end.
    * The fields of a task's batch that a device reads are there all the time, of the largest share that it
      has of the task.
    * Gradient sums take buffers (`SUM_BUFFER_BYTES`) from when the backward pass is through with the first op
      that uses the parameters.
    * On GPUs the allocator holds `ALLOCATOR_SHARE` more than what comes and goes. The cluster's reserve is
      there before the first tensor.
    """
    by_name = {metaop.name: metaop for metaop in metaops}
    in_order = sorted(slices, key=lambda piece: piece.start_s)
    crossings = Crossings(in_order, by_name)
    parts = [
        _Part(piece, by_name, is_handed_on=crossings.is_handed_on(index))
        for index, piece in enumerate(in_order)
    ]
    roles: list[list[_Role]] = [[] for _ in range(cluster.num_devices)]
    for index, piece in enumerate(in_order):
        received, returned = crossings.received_by(index), crossings.returned_to(index)
        for position, device in enumerate(piece.devices):
            crossing = (received[position] if received else 0.0, returned[position] if returned else 0.0)
            roles[device].append((index, position % piece.tp, *crossing))
    # Most devices do the same as others; each of these sets of roles is added up once.
    of_device = [tuple(role) for role in roles]
    uses = ((index, use.block) for index, part in enumerate(parts) for op in part.uses for use in op)
    account = _Account(parts, Holders(in_order, uses), cluster.talks_by == "gloo", cluster.is_cpu, optimizer)
    needs = {role: account.need(role) for role in set(of_device)}
    communicators = communicator_bytes or (0,) * cluster.num_devices
    return tuple(
        replace(needs[role], outside_bytes=reserve + own)
        for role, reserve, own in zip(of_device, cluster.reserve_bytes, communicators, strict=True)
    )


# Index of a slice, which of its `tp` shards, and bytes received for it: inputs, gradients of outputs.
_Role = tuple[int, int, float, float]


class _Part:
    """What a slice takes of each of its devices."""

    __slots__ = (
        "dp",
        "fields",
        "handed",
        "kept_inputs",
        "needs",
        "recompute",
        "taken_at_once",
        "taken_by_every_op",
        "task",
        "tp",
        "uses",
    )

    def __init__(self, piece: SliceShape, by_name: Mapping[str, MetaOpSizes], *, is_handed_on: bool) -> None:
        metaop = by_name[piece.metaop]
        first, last = piece.ops
        self.tp = piece.tp
        self.recompute = piece.recompute
        self.needs: list[tuple[int, OpNeeds]] = op_needs(metaop, piece.ops, piece.dp, piece.tp)
        self.task, self.dp = metaop.task, piece.dp
        self.fields = sum(size for op, size in metaop.field_bytes.items() if first <= op < last)
        handed = slice_output_bytes(metaop, last, metaop.num_ops) / piece.dp
        self.handed = handed if is_handed_on else 0.0
        self.kept_inputs = 0.0
        if piece.recompute:
            inner = slice_output_bytes(metaop, first + 1, metaop.num_ops) / piece.dp
            self.kept_inputs = max(inner, handed) + _RANDOM_STATE_BYTES
        taken = {name: size / piece.dp for size, name in slice_inputs(piece, by_name)}
        self.taken_by_every_op = sum(taken.pop(name, 0.0) for name in metaop.inputs_of_every_op)
        self.taken_at_once = sum(taken.values())
        self.uses: list[tuple[BlockUse, ...]] = [blocks_of(metaop, op) for op in range(first, last)]

    def ops_from_last(self) -> Iterable[tuple[int, OpNeeds]]:
        """(position in the slice, what it needs) of each op, the last one first."""
        position = len(self.uses)
        for count, needs in reversed(self.needs):
            for _ in range(count):
                position -= 1
                yield position, needs


class _Fullest:
    """The fullest moment so far of what does not last."""

    def __init__(self) -> None:
        self.gradients = self.activations = self.buffers = 0.0

    @property
    def total(self) -> float:
        """Bytes of all three."""
        return self.gradients + self.activations + self.buffers

    def see(self, gradients: float, activations: float, buffers: float) -> None:
        """A moment."""
        if gradients + activations + buffers > self.total:
            self.gradients, self.activations, self.buffers = gradients, activations, buffers


@dataclass(frozen=True)
class _Account:
    """What devices need under a plan."""

    parts: Sequence[_Part]
    holders: Holders
    by_gloo: bool
    on_cpu: bool
    optimizer: OptimizerNumbers

    @cached_property
    def splits(self) -> bool:
        """Whether any slice is split by tensor parallelism."""
        return any(part.tp > 1 for part in self.parts)

    def need(self, roles: Sequence[_Role]) -> DeviceMemory:
        """Memory of a device with these roles, which are in the order in which it runs them."""
        held = self._held(roles)
        sharded = self.optimizer.optimizer_state_sharded
        trained = sum(there.share * there.trained_bytes for there in held.values())
        updated = sum(there.owned * there.trained_bytes for there in held.values()) if sharded else trained
        own = sum(there.own_bytes for there in held.values())
        iteration = _Iteration(self, roles, held, keeps_own=self.optimizer.accumulate > 1)
        fullest = iteration.run(own, updated * self.optimizer.update_bytes_per_param)
        parameters = round(sum(there.share * there.num_bytes for there in held.values()))
        state = round(updated * self.optimizer.optimizer_state_per_param)
        lasting = parameters + state + round(trained - own)
        uncounted = UNCOUNTED_SHARE * (lasting + fullest.total)
        return DeviceMemory(
            parameter_bytes=parameters,
            gradient_bytes=round(trained - own + fullest.gradients),
            optimizer_bytes=state,
            activation_bytes=round(fullest.activations),
            buffer_bytes=round(fullest.buffers + uncounted),
            updated_bytes=round(updated),
            lasting_bytes=lasting,
            allocator_bytes=0 if self.on_cpu else round(ALLOCATOR_SHARE * fullest.total),
        )

    def _held(self, roles: Sequence[_Role]) -> dict[Block, Held]:
        held: dict[Block, Held] = {}
        num_ops = 0
        for index, shard, *_ in roles:
            part = self.parts[index]
            for position, uses in enumerate(part.uses):
                for use in uses:
                    there = held.get(use.block)
                    if there is None:
                        there = held[use.block] = Held(0.0, 0.0, num_ops + position)
                    there.num_bytes = max(there.num_bytes, use.num_bytes)
                    there.trained_bytes = max(there.trained_bytes, use.trained_bytes)
                    parts = part.tp if use.block[2] else 1
                    there.shards.add((shard % parts / parts, (shard % parts + 1) / parts))
            num_ops += len(part.uses)
        for block, there in held.items():
            there.divide(self.holders.of(block))
        return held


class _Iteration:
    """One device's iteration, op by op."""

    def __init__(
        self, account: _Account, roles: Sequence[_Role], held: Mapping[Block, Held], *, keeps_own: bool
    ) -> None:
        """`keeps_own`: gradients that are not shared are there from the batch before."""
        self._account = account
        self._roles = roles
        self._held = held
        self._made: set[Block] = set(held) if keeps_own else set()
        self._fullest = _Fullest()
        self._gradients = sum(there.own_bytes for there in held.values()) if keeps_own else 0.0
        self._fields = self._loaded()
        self._received = sum(received for *_, received, _ in roles)
        self._kept = self._retained = 0.0
        self._summing = 0.0
        self._sums_at_most = 0.0
        if account.by_gloo and account.optimizer.optimizer_state_sharded:
            largest = max((there.summed * there.trained_bytes for there in held.values()), default=0.0)
            self._sums_at_most = max(SUM_BUFFER_BYTES, largest)

    def run(self, own: float, update: float) -> _Fullest:
        """Its fullest moment; `own`: gradients that are not shared, `update`: what the update takes."""
        for role in self._roles:
            self._forward(role)
        self._received += sum(returned for *_, returned in self._roles)
        first_op = sum(len(self._account.parts[index].uses) for index, *_ in self._roles)
        for role in reversed(self._roles):
            first_op -= len(self._account.parts[role[0]].uses)
            self._backward(role, first_op)
        self._fullest.see(own, self._fields, self._retained + self._sums())
        self._fullest.see(own, self._fields, update)
        return self._fullest

    def _loaded(self) -> float:
        """Bytes of the batches' fields."""
        fields: dict[str, int] = {}
        share: dict[str, float] = {}
        for index, *_ in self._roles:
            part = self._account.parts[index]
            if part.fields:
                fields[part.task] = fields.get(part.task, 0) + part.fields
                share[part.task] = max(share.get(part.task, 0.0), 1 / part.dp)
        return sum(size * share[task] for task, size in fields.items())

    def _forward(self, role: _Role) -> None:
        part = self._account.parts[role[0]]
        casts = 0.0
        for count, needs in part.needs:
            kept = part.kept_inputs if part.recompute else needs.kept
            casts += count * needs.cast if part.recompute else 0.0
            self._kept += (count - 1) * kept
            self._see(needs.forward + casts, self._received)
            self._kept += kept
        if not part.recompute:
            self._kept += sum(self._joined(part, uses) for uses in part.uses)

    def _backward(self, role: _Role, first_op: int) -> None:
        """`first_op`: of the slice, among all that the device runs."""
        index, _, received, returned = role
        part = self._account.parts[index]
        self._retained += part.taken_by_every_op
        for position, needs in part.ops_from_last():
            joined = self._joined(part, part.uses[position])
            running = self._backward_bytes(needs, part.uses[position])
            if part.recompute:
                running = joined + max(needs.forward, needs.kept + running)
            buffers = self._received + self._retained + part.handed
            self._see(running, buffers + self._sums())
            self._kept -= part.kept_inputs if part.recompute else needs.kept + joined
            self._end_op(part.uses[position], first_op + position)
        self._retained += part.taken_at_once
        self._received -= received + returned

    def _backward_bytes(self, needs: OpNeeds, uses: Sequence[BlockUse]) -> float:
        """Of an op, with the gradients that it makes: those of parameters that the device alone holds."""
        trained = sum(self._held[use.block].share * use.trained_bytes for use in uses)
        made = sum(self._held[use.block].own_bytes for use in uses if use.block not in self._made)
        new = made / trained if trained else 0.0
        return needs.backward + new * (needs.first_backward - needs.backward)

    def _end_op(self, uses: Sequence[BlockUse], op: int) -> None:
        for use in uses:
            there = self._held[use.block]
            if use.block not in self._made:
                self._made.add(use.block)
                self._gradients += there.own_bytes
            if there.first_use == op:
                self._summing += there.summed * there.trained_bytes

    def _joined(self, part: _Part, uses: Sequence[BlockUse]) -> float:
        """Copies of parameters that the device holds in finer fragments than the slice uses."""
        if not self._account.splits:
            return 0.0
        return sum(
            use.num_bytes / part.tp
            for use in uses
            if use.block[2] and len(self._account.holders.of(use.block)) > part.tp
        )

    def _sums(self) -> float:
        return min(self._summing, self._sums_at_most)

    def _see(self, running: float, buffers: float) -> None:
        self._fullest.see(self._gradients, self._kept + self._fields + running, buffers)
