"""What every device needs by what it does, each kind of device once: the account behind
`account/device_memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from spindle_cli.account.crossing import Crossings
from spindle_cli.account.device.iteration import Iteration, Role, Setting
from spindle_cli.account.device.need import ALLOCATOR_SHARE, Need
from spindle_cli.account.device.own_order import passes_by_device
from spindle_cli.account.device.parts import Kinds, KnownUses, Part
from spindle_cli.account.gather_buffers import Lot, Span, places_of
from spindle_cli.account.holdings import Held, Holders
from spindle_cli.account.joint import beside
from spindle_cli.account.sums.gathered import GatheredMatrix, gathered_matrices
from spindle_cli.account.types import Joint, Pass
from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.parameters.blocks import Block, BlockUse
from spindle_cli.costs.parameters.sharded import level_of
from spindle_cli.costs.share_sizes import cuts_by_share, cuts_like_largest
from spindle_cli.costs.work import reached_by_gradients
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf, ShardWeights
from spindle_cli.profile.types import MetaOp

# Plans that run in turn, and which of them is meant; None: there is one alone.
Turn = tuple[Joint, int] | None
# What a device does, what it only holds, its passes where they have an order of their own, and its weight
# among the devices that share something out.
RolesOf = tuple[tuple[Role, ...], tuple[Role, ...], tuple[Pass, ...] | None, int]


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


class NoRoomError(Exception):
    """A device has less memory than it needs."""


def find_needs(
    metaops: Iterable[MetaOp],
    slices: Sequence[SliceShape],
    cluster: Cluster,
    optimizer: OptimizerNumbers,
    turn: Turn,
    has_room: Callable[[Need, int], bool] | None = None,
    known: KnownUses | None = None,
) -> list[Need]:
    """Of each device; devices that need the same share one object.

    Raises:
        NoRoomError: `has_room` says so of a device, those that run most slices first.
    """
    by_name = {metaop.name: metaop for metaop in metaops}
    known = known or KnownUses()
    others: Sequence[SliceShape] = ()
    if turn is not None:
        by_name, others = {**turn[0].by_name}, beside(*turn)
    in_order = sorted(slices, key=lambda piece: piece.start_s)
    crossings = Crossings(in_order, by_name)
    parts = _parts(in_order, others, by_name, crossings, known)
    passes = passes_by_device(in_order, cluster.num_devices)
    held = _held_only(others, len(in_order), cluster.num_devices)
    weights = optimizer.shard_weights
    # Under gloo all sums of ranges take buffers, else those of unequal ranges, where they are padded, and
    # what teams exchange.
    ranges_take = cluster.talks_by == "gloo" or bool(weights)
    may_take = ranges_take or _has_teams(slices, by_name, optimizer.sharding)
    takes_buffers = optimizer.optimizer_state_sharded and may_take
    shares_out = bool(optimizer.sharding)
    kinds = known.kinds(parts, [*in_order, *others], op_by_op=takes_buffers, ends_apart=shares_out)
    roles = _roles(in_order, cluster.num_devices, crossings, parts, by_name, known)
    due = {kind for runs in kinds.runs[: len(in_order)] for run in runs for kind in run.kinds}
    # Most devices do the same as others; each of these sets of roles is added up once.
    of_device = [
        (
            tuple(own),
            tuple(only),
            None if passes is None else tuple(passes[device]),
            weights[device] if weights else 1,
        )
        for device, (own, only) in enumerate(zip(roles, held, strict=True))
    ]
    matrices = gathered_matrices(slices, by_name, optimizer.accumulate)
    setting = Setting(
        parts=parts,
        kinds=kinds,
        holders=Holders([*in_order, *others], _uses(kinds), weights),
        sums_take_buffers=takes_buffers,
        only_teams_take_buffers=not ranges_take,
        buffers_are_small=cluster.talks_by != "gloo",
        gradient_width=optimizer.gradient_bytes_per_param,
        shares_out=shares_out,
        on_cpu=cluster.is_cpu,
        unreached=_unreached([*in_order, *others], by_name, optimizer.sharding),
    )
    return _each_once(
        Account(setting, cluster.is_cpu, optimizer, optimizer.sharding, due, matrices), of_device, has_room
    )


def _has_teams(slices: Iterable[SliceShape], by_name: Mapping[str, MetaOp], sharding: ShardingOf) -> bool:
    """Whether parameters are shared out by several sets of devices."""
    run_on: dict[str, set[frozenset[int]]] = {}
    for piece in slices:
        if level_of(by_name[piece.metaop], sharding).is_fetched:
            key = by_name[piece.metaop].parameters or piece.metaop
            run_on.setdefault(key, set()).add(frozenset(piece.devices))
    return any(len(found) > 1 for found in run_on.values())


def _parts(
    in_order: Sequence[SliceShape],
    others: Sequence[SliceShape],
    by_name: Mapping[str, MetaOp],
    crossings: Crossings,
    known: KnownUses,
) -> list[Part]:
    """Of all slices; `others`: those that other plans alone run, and hand nothing on here."""
    return [
        Part(
            index,
            piece,
            by_name,
            cuts_like_largest(piece),
            is_handed_on=index < len(in_order) and crossings.is_handed_on(index),
            known=known,
        )
        for index, piece in enumerate((*in_order, *others))
    ]


def _uses(kinds: Kinds) -> Iterator[tuple[int, Block, bool]]:
    """Of each part, the blocks that it uses, one of each kind, and whether all of it although others split
    it; a part that does both says both.
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
    return frozenset(index for index, piece in enumerate(slices) if not reached[piece.metaop])


def _held_only(others: Sequence[SliceShape], first: int, num_devices: int) -> list[list[Role]]:
    """What each device has to do of slices that other plans alone run: nothing, but it holds their
    parameters. `first`: the number of the first of their parts.
    """
    held: list[list[Role]] = [[] for _ in range(num_devices)]
    for index, piece in enumerate(others, first):
        for position, device in enumerate(piece.devices):
            held[device].append((index, position % piece.tp, 0.0, 0.0))
    return held


def _each_once(
    account: Account, of_device: Sequence[RolesOf], has_room: Callable[[Need, int], bool] | None
) -> list[Need]:
    """What each device needs, by what it has to do; those that run most slices first."""
    needs: dict[RolesOf, Need] = {}
    for device in sorted(range(len(of_device)), key=lambda device: -len(of_device[device][0])):
        role = of_device[device]
        if role not in needs:
            needs[role] = account.need(*role)
        if has_room is not None and not has_room(needs[role], device):
            raise NoRoomError
    return [needs[role] for role in of_device]


def _roles(
    in_order: Sequence[SliceShape],
    num_devices: int,
    crossings: Crossings,
    parts: list[Part],
    by_name: Mapping[str, MetaOp],
    known: KnownUses,
) -> list[list[Role]]:
    """What each device does of the slices. Shares that are not equal have parts of their own, which are added
    to `parts`.
    """
    roles: list[list[Role]] = [[] for _ in range(num_devices)]
    for index, piece in enumerate(in_order):
        received, returned = crossings.received_by(index), crossings.returned_to(index)
        number_of = _parts_by_share(index, piece, parts, by_name, known) if piece.rows is not None else None
        for position, device in enumerate(piece.devices):
            crossing = (received[position] if received else 0.0, returned[position] if returned else 0.0)
            number = index if number_of is None else number_of[position // piece.tp]
            roles[device].append((number, position % piece.tp, *crossing))
    return roles


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


@dataclass(frozen=True)
class Account:
    """What devices need under a plan."""

    setting: Setting
    on_cpu: bool
    optimizer: OptimizerNumbers
    sharding: ShardingOf
    due: Set[int]
    matrices: Mapping[str, GatheredMatrix]
    known_gathered: dict[object, float] = field(default_factory=dict)

    def need(
        self,
        roles: Sequence[Role],
        held_only: Sequence[Role],
        passes: Sequence[Pass] | None,
        weight: int,
    ) -> Need:
        """What a device with these roles holds, which are in the order in which it runs them; `held_only`:
        those that it has in other plans, and holds parameters for. `passes`: in its own order, where that is
        not all forward and then all backward in reverse. `weight`: among those that it shares with.
        """
        last_first = roles
        if passes is not None:
            place = {piece: number for number, (piece, is_backward) in enumerate(passes) if is_backward}
            last_first = sorted(roles, key=lambda role: -place[self.setting.parts[role[0]].piece])
        held = self._held(last_first, held_only, weight)
        sharded = self.optimizer.optimizer_state_sharded
        of_all = held.values()
        updated = sum(there.count * there.updated_bytes(sharded=sharded) for there in of_all)
        usual = self.optimizer.optimizer_state_per_param
        wide = self.optimizer.gradient_bytes_per_param
        own = wide * sum(there.count * there.own_bytes for there in of_all)
        keeps_own = self.optimizer.accumulate > 1
        iteration = Iteration(self.setting, roles, passes, held, keeps_own=keeps_own)
        update = updated * self.optimizer.update_bytes_per_param
        by_pass = tuple(iteration.run(own, update, by_parts=self.optimizer.updates_by_parts))
        return Need(
            parameters=round(sum(there.count * there.lasting_bytes for there in of_all)),
            state=round(sum(there.count * there.state_bytes(usual, sharded=sharded) for there in of_all)),
            gathered=self._gathered_by(roles, last_first, held_only, weight, held) + self._matrices(roles),
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
        """As `_gathered`, once for all devices that have shards of the same slices, in shares of any size."""
        parts = self.setting.parts
        shards = [tuple((parts[role[0]].piece, role[1]) for role in own) for own in (roles, last_first)]
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
            found: dict[Block, Span] = {}
            for position, of_op in enumerate(part.uses):
                for use in of_op:
                    there = held[kind_of[use.block]]
                    if there.gathered_lots and not there.kept_bytes:
                        known = found.get(use.block, Span(part.piece, position, position))
                        found[use.block] = known._replace(last=position)
            for block, span in found.items():
                spans.setdefault(block, []).append(span)
        lots = [
            Lot(num_bytes, tuple(sorted(own)))
            for block, own in spans.items()
            for num_bytes in held[kind_of[block]].gathered_lots
        ]
        return places_of(lots).num_bytes

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
        return sum(each.buffer_bytes for each in gathered if len(each.devices) > 1)

    def _held(self, roles: Sequence[Role], held_only: Sequence[Role], weight: int) -> dict[int, Held]:
        """By kind. `roles`: the last one that runs backward first."""
        held: dict[int, Held] = {}
        pieces: dict[int, int] = {}  # the first that uses a block
        for number, (index, shard, *_) in enumerate((*roles, *held_only)):
            part = self.setting.parts[index]
            for run in self.setting.kinds.runs[part.piece]:
                for kind, use in run.uses:
                    there = held.get(kind)
                    if there is None:
                        there = held[kind] = self._new(kind, use, part, index if number < len(roles) else -1)
                        pieces[kind] = part.piece
                    there.least_tp = min(there.least_tp, 1 if use.is_whole else part.tp)
                    there.num_bytes = max(there.num_bytes, use.num_bytes)
                    there.trained_bytes = max(there.trained_bytes, use.trained_bytes)
                    if use.parts(part.tp) > 1:
                        there.shards.add((shard / part.tp, (shard + 1) / part.tp))
                    else:
                        there.is_whole = True
        holders = self.setting.holders
        for kind, there in held.items():
            block = self.setting.kinds.block[kind]
            num_teams = holders.num_teams(block) if there.sharding.is_fetched else 1
            sharers = holders.in_team(block, pieces[kind]) if num_teams > 1 else ()
            if sharers and min(each.number for each in sharers) > 1:
                there.divide(sharers, weight, num_teams, are_paired=holders.are_paired(block))
                continue
            if sharers:  # each part of it is on one device of a team
                there.sharding = Sharding.OPTIMIZER
            there.divide(holders.of(block), weight)
        return held

    def _new(self, kind: int, use: BlockUse, part: Part, last_part: int) -> Held:
        """A block as the first part that uses it has it."""
        return Held(
            use.num_bytes,
            use.trained_bytes,
            self.setting.kinds.size[kind],
            last_part,
            part.optimizer,
            self._level(kind, use),
            least_tp=1 if use.is_whole else part.tp,
            is_due=kind in self.due,
        )

    def _level(self, kind: int, use: BlockUse) -> Sharding:
        """What its holders share out of a block: of what is tied, as far as each of them runs all that uses
        it (`groups.parameter_groups`).
        """
        level = use.level(self.sharding)
        if (
            level.is_by_pass
            and use.tied_keys
            and not self.setting.holders.num_teams(self.setting.kinds.block[kind])
        ):
            return Sharding.OPTIMIZER
        return level
