"""What a device needs that does so much of a plan, the parameters that it holds for it among that: all the
time and in each pass (`Need`), and at its fullest moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from spindle_cli.account.device.iteration import Fullest, Iteration, PassBytes, Role, Setting
from spindle_cli.account.device.parts import Part
from spindle_cli.account.groups import GatheredMatrix
from spindle_cli.account.holdings import GatherUnit, Held, Span, places_of
from spindle_cli.account.types import DeviceMemory, Pass
from spindle_cli.costs.memory import ALLOCATOR_SHARE, UNCOUNTED_SHARE
from spindle_cli.costs.parameters import Block, BlockUse
from spindle_cli.files.sharding import Sharding, ShardingOf, ShardWeights


@dataclass(frozen=True)
class MemoryByPass:
    """What a device holds over an iteration, in bytes; the most of all is `DeviceMemory.total_bytes`.

    Attributes:
        idle_bytes: what is there between iterations.
        passes: of each (index of a slice, whether backward), the most while it runs, and what stays.
        update_bytes: the most behind the last pass, while gradients are summed and parameters updated.
    """

    idle_bytes: int
    passes: Mapping[tuple[int, bool], tuple[int, int]]
    update_bytes: int


@dataclass(frozen=True, eq=False)
class Need:
    """What a device holds all the time, and pass by pass.

    `gathered`: of the memory that parameters are gathered into.
    """

    parameters: int
    state: int
    summed_gradients: float
    gathered: float
    updated: float
    allocator_share: float
    passes: tuple[PassBytes, ...]
    in_host: float = 0.0

    def peak(self) -> DeviceMemory:
        """What the device holds at the fullest moment of all."""
        return self.at(
            max((pass_bytes.fullest for pass_bytes in self.passes), key=lambda fullest: fullest.total)
        )

    def at(self, moment: Fullest) -> DeviceMemory:
        """What the device holds at a moment."""
        lasting = self.parameters + self.state + round(self.summed_gradients) + round(self.gathered)
        tensors = lasting + moment.total
        uncounted = UNCOUNTED_SHARE * tensors
        return DeviceMemory(
            parameter_bytes=self.parameters,
            gradient_bytes=round(self.summed_gradients + moment.gradients),
            optimizer_bytes=self.state,
            activation_bytes=round(moment.activations),
            buffer_bytes=round(self.gathered + moment.buffers + uncounted),
            updated_bytes=round(self.updated),
            lasting_bytes=lasting,
            allocator_bytes=round(self.allocator_share * (tensors + uncounted)),
            host_bytes=round(self.in_host),
        )

    def by_pass(self, order: Sequence[int], outside: int) -> MemoryByPass:
        """What the device holds pass by pass. `order`: indices of slices, in the order of their numbers here;
        `outside`: bytes outside of the allocator.
        """

        def total(moment: Fullest) -> int:
            return self.at(moment).total_bytes + outside

        return MemoryByPass(
            idle_bytes=total(self.passes[-1].after),
            passes={
                (order[pass_bytes.slice_index], pass_bytes.is_backward): (
                    total(pass_bytes.fullest),
                    total(pass_bytes.after),
                )
                for pass_bytes in self.passes
                if pass_bytes.slice_index is not None
            },
            update_bytes=total(self.passes[-1].fullest),
        )


# Of what a slice uses: the use of a block, whether a device has a part of it, and of how many.
_Used = tuple[BlockUse, bool, int]
# Who uses a kind of blocks: number of a part, which of its shards, whether the device runs it in this plan.
_User = tuple[int, int, bool]


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
    def updates_by_parts(self) -> bool: ...
    @property
    def accumulate(self) -> int: ...
    @property
    def sharding(self) -> ShardingOf: ...
    @property
    def shard_weights(self) -> ShardWeights: ...


@dataclass(frozen=True)
class Account:
    """What devices need under a plan. `due`: kinds of blocks that its steps use; `known_...`: what has been
    worked out for devices before.
    """

    setting: Setting
    on_cpu: bool
    optimizer: OptimizerNumbers
    sharding: ShardingOf
    due: Set[int]
    matrices: Mapping[str, GatheredMatrix]
    known_gathered: dict[object, float] = field(default_factory=dict)
    known_held: dict[object, Mapping[int, Held]] = field(default_factory=dict)
    known_needs: dict[object, Need] = field(default_factory=dict)
    known_of_kind: dict[tuple[int, tuple[_User, ...], int], Held] = field(default_factory=dict)
    known_used: dict[int, Mapping[int, Sequence[_Used]]] = field(default_factory=dict)
    known_levels: dict[int, Sharding] = field(default_factory=dict)

    def need(
        self,
        roles: Sequence[Role],
        held_only: Sequence[Role],
        passes: Sequence[Pass] | None,
        weight: int,
    ) -> Need:
        """What a device holds that has these roles.

        Args:
            roles: in the order in which the device runs them.
            held_only: roles that it has in other plans alone, whose parameters it holds.
            passes: in the device's order, where that is not all forward and then all backward in reverse.
            weight: the device's among those that it shares parameters with.
        """
        last_first = roles
        if passes is not None:
            place = {index: number for number, (index, is_backward) in enumerate(passes) if is_backward}
            last_first = sorted(roles, key=lambda role: -place[self.setting.parts[role[0]].slice_index])
        held = self._held_by(last_first, held_only, weight)
        # Most devices of a tensor-parallel group have as much of other shards.
        without_shards = tuple(
            tuple((number, *moved) for number, _, *moved in some_roles) for some_roles in (roles, held_only)
        )
        key = without_shards, passes, tuple((kind, there.divided) for kind, there in held.items())
        if key not in self.known_needs:
            gathered = self._gathered_by(roles, last_first, held_only, weight, held)
            self.known_needs[key] = self._need_of(roles, passes, held, gathered)
        return self.known_needs[key]

    def _need_of(
        self,
        roles: Sequence[Role],
        passes: Sequence[Pass] | None,
        held: Mapping[int, Held],
        gathered: float,
    ) -> Need:
        """Work out what a device needs. `gathered`: bytes of the memory that parameters are gathered into."""
        sharded = self.optimizer.optimizer_state_sharded
        of_all = held.values()
        updated = sum(there.count * there.updated_bytes(sharded=sharded) for there in of_all)
        usual = self.optimizer.optimizer_state_per_param
        wide = self.optimizer.gradient_bytes_per_param
        unshared = wide * sum(there.count * there.own_bytes for there in of_all)
        keeps_own = self.optimizer.accumulate > 1
        iteration = Iteration(self.setting, roles, passes, held, keeps_own=keeps_own)
        update = updated * self.optimizer.update_bytes_per_param
        by_pass = tuple(iteration.run(unshared, update, by_parts=self.optimizer.updates_by_parts))
        return Need(
            parameters=round(sum(there.count * there.lasting_bytes for there in of_all)),
            state=round(sum(there.count * there.state_bytes(usual, sharded=sharded) for there in of_all)),
            gathered=gathered + self._matrices(roles),
            summed_gradients=wide * sum(there.count * there.lasting_gradient_bytes for there in of_all),
            updated=updated,
            allocator_share=0.0 if self.on_cpu else ALLOCATOR_SHARE,
            passes=by_pass,
            in_host=iteration.most_in_host,
        )

    def _gathered_by(
        self,
        roles: Sequence[Role],
        last_first: Sequence[Role],
        held_only: Sequence[Role],
        weight: int,
        held: Mapping[int, Held],
    ) -> float:
        """`_gathered`, worked out once for all devices that have shards of the same slices."""
        parts = self.setting.parts
        shards = [
            tuple((parts[role[0]].slice_index, role[1]) for role in some_roles)
            for some_roles in (roles, last_first)
        ]
        key = *shards, tuple((role[0], role[1]) for role in held_only), weight
        if key not in self.known_gathered:
            self.known_gathered[key] = self._gathered(roles, held)
        return self.known_gathered[key]

    def _gathered(self, roles: Sequence[Role], held: Mapping[int, Held]) -> float:
        """Bytes of the memory that parameters are gathered into."""
        if Sharding.PARAMETERS not in self.sharding.values():
            return 0.0
        kind_of = self.setting.kinds.kind_of
        spans: dict[Block, list[Span]] = {}
        for index, *_ in roles:
            part = self.setting.parts[index]
            span_of: dict[Block, Span] = {}
            for position, of_op in enumerate(part.uses):
                for use in of_op:
                    there = held[kind_of[use.block]]
                    if there.gathered_units and not there.kept_bytes:
                        span = span_of.get(use.block, Span(part.slice_index, position, position))
                        span_of[use.block] = span._replace(last=position)
            for block, span in span_of.items():
                spans.setdefault(block, []).append(span)
        units = [
            GatherUnit(num_bytes, tuple(sorted(block_spans)))
            for block, block_spans in spans.items()
            for num_bytes in held[kind_of[block]].gathered_units
        ]
        return places_of(units).num_bytes

    def _matrices(self, roles: Sequence[Role]) -> float:
        """Bytes that gradients are gathered into as what they are made of."""
        if not self.matrices:
            return 0.0
        used = {
            use.block[0]
            for index, *_ in roles
            for of_op in self.setting.parts[index].uses
            for use in of_op
            if use.is_gathered
        }
        gathered = [self.matrices[name] for name in used]
        return sum(matrix.buffer_bytes for matrix in gathered if len(matrix.devices) > 1)

    def _held_by(self, roles: Sequence[Role], held_only: Sequence[Role], weight: int) -> Mapping[int, Held]:
        """`_held`, worked out once for all devices that have shards of the same slices."""
        key = *(tuple(role[:2] for role in some_roles) for some_roles in (roles, held_only)), weight
        if key not in self.known_held:
            self.known_held[key] = self._held(roles, held_only, weight)
        return self.known_held[key]

    def _held(self, roles: Sequence[Role], held_only: Sequence[Role], weight: int) -> dict[int, Held]:
        """The blocks of parameters that a device holds, by kind. `roles`: the one that runs backward last
        first.
        """
        users: dict[int, list[_User]] = {}
        for number, (index, shard, *_) in enumerate((*roles, *held_only)):
            user = index, shard, number < len(roles)
            for kind in self._used_by(self.setting.parts[index]):
                users.setdefault(kind, []).append(user)
        held: dict[int, Held] = {}
        for kind, kind_users in users.items():
            key = kind, tuple(kind_users), weight
            there = self.known_of_kind.get(key)
            if there is None:
                there = self.known_of_kind[key] = self._held_by_users(kind, kind_users, weight)
            held[kind] = there
        return held

    def _held_by_users(self, kind: int, users: Sequence[_User], weight: int) -> Held:
        """The blocks of a kind on a device. `users`: the device's roles that use them, the one that runs
        backward last first.
        """
        there: Held | None = None
        parts = self.setting.parts
        for index, shard, is_run in users:
            part = parts[index]
            own_shard = (shard / part.tp, (shard + 1) / part.tp)
            for use, is_split, least_tp in self._used_by(part)[kind]:
                if there is None:
                    there = self._new(kind, use, part, index if is_run else -1)
                there.least_tp = min(there.least_tp, least_tp)
                there.num_bytes = max(there.num_bytes, use.num_bytes)
                there.trained_bytes = max(there.trained_bytes, use.trained_bytes)
                if is_split:
                    there.shards.add(own_shard)
                else:
                    there.is_whole = True
        assert there is not None, "a slice that uses a kind uses a block of it"
        holders, block = self.setting.holders, self.setting.kinds.block[kind]
        num_replica_groups = holders.num_replica_groups(block) if there.sharding.is_fetched else 1
        sharers = (
            holders.in_replica_group(block, parts[users[0][0]].slice_index) if num_replica_groups > 1 else ()
        )
        if sharers and min(of_fragment.number for of_fragment in sharers) > 1:
            there.divide(sharers, weight, num_replica_groups, are_paired=holders.are_paired(block))
            return there
        if sharers:  # each part of it is on one device of a replica group
            there.sharding = Sharding.OPTIMIZER
        there.divide(holders.of(block), weight)
        return there

    def _used_by(self, part: Part) -> Mapping[int, Sequence[_Used]]:
        """What a slice uses, by kind: once for all devices that run it."""
        if part.slice_index not in self.known_used:
            used: dict[int, list[_Used]] = {}
            for run in self.setting.kinds.runs[part.slice_index]:
                for kind, use in run.uses:
                    is_split, least_tp = use.parts(part.tp) > 1, 1 if use.is_whole else part.tp
                    used.setdefault(kind, []).append((use, is_split, least_tp))
            self.known_used[part.slice_index] = used
        return self.known_used[part.slice_index]

    def _new(self, kind: int, use: BlockUse, part: Part, last_part: int) -> Held:
        """A block as the first part that uses it has it."""
        return Held(
            use.num_bytes,
            use.trained_bytes,
            self.setting.kinds.size[kind],
            last_part,
            part.optimizer,
            self._level_of(kind, use),
            least_tp=1 if use.is_whole else part.tp,
            is_due=kind in self.due,
        )

    def _level_of(self, kind: int, use: BlockUse) -> Sharding:
        if kind not in self.known_levels:
            self.known_levels[kind] = self._level(kind, use)
        return self.known_levels[kind]

    def _level(self, kind: int, use: BlockUse) -> Sharding:
        """What its holders share out of a block: of what is tied, as far as each of them runs all that uses
        it (`groups.parameter_groups`).
        """
        level = use.level(self.sharding)
        if (
            level.is_by_pass
            and use.tied_keys
            and not self.setting.holders.num_replica_groups(self.setting.kinds.block[kind])
        ):
            return Sharding.OPTIMIZER
        return level
