"""Bounds of all schedules, however batches are cut: into any number of micro-batches, shares of any size.

They are the program of `program.py` with shares as allocations: x[m,a] is how many ops of m a sample runs on
average on shares a, of b samples on t devices of type k, which take T seconds an op. In every plan

* an op's share keeps its t devices for the slice, which lasts T or longer: B t T / b device-seconds for all B
  samples, so that sum over m, a of B t T x / b <= N_k C for each type;
* a sample goes forward and back along every chain of MetaOps, in passes that take T or longer, one behind the
  other: sum over the chain of T x <= C, for the mean of all samples as well. (With `accumulate` batches count
  one after another, as in predictions.)

A share that is smaller than the largest of its slice counts as that one, which takes less for each sample.

**Memory** (`lower_bound_with_memory_s`), in bytes as `account/` counts them:

* an op that runs on a share has its parameters (by tensor parallelism at best), and what its forward pass or
  what it keeps and its backward pass take: shares with more than any device of the type has are none;
* an op that needs all samples at once (`batch_sums`, `coupled`) begins when all MetaOps that it hangs on have
  run forward and none backward. Then all devices together hold, once at least, parameters and state, and of
  each op what it keeps: all of it, what is not computed again (T is then longer by the part of the forward
  pass), or its inputs alone. Where activations may be moved to the host that says nothing.

**Links** (`lower_bound_with_links_s`), in seconds at the fastest links (`over_links.py`), where a task is in
one micro-batch for an op that needs all samples at once, so that shares of at most b samples are B / b or
more:

* its sums and gathers make the op longer, if they take more than its times have of them;
* it starts on all devices together, so behind what the one with most samples receives: b samples, less what
  it can have made itself, over its links to its node and to others; and less what its node can have made,
  over that to others alone; and as much backward.

The first op of a MetaOp without inputs runs on d devices in all: the busiest has 1 / d of the op's
device-seconds to do or more, and behind that, and behind the chain, gradients of its parameters are summed
over d devices, and what is updated is gathered where state is shared out. Where a task may be cut the program
takes the best d; else sums are over the shares, and the busiest is so of all devices.

With micro-batches that are asked for, shares of both are no larger than these, and other tasks are in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.bound.allocations import Shares, devices_of_kinds, first_of, shares_of
from spindle_cli.plan.bound.over_links import OverLinks, Spread, Taken, starts_together
from spindle_cli.plan.bound.program import END, FLOAT_SLACK, Array, Row, bounded, chain_rows, device_rows
from spindle_cli.plan.bound.room import fits_alone, keeping_less, room_beside_parameters
from spindle_cli.plan.problem import SHORTEST_S
from spindle_cli.profile.metagraph import topological_order
from spindle_cli.profile.types import MetaOpProfile, Profile


@dataclass(frozen=True, eq=False)
class _Stage:
    """Ops of a MetaOp that are one node of the program.

    Attributes:
        longer_s: by share, seconds that an op is longer on its devices.
        beside_s: by share, seconds that the chain is longer besides.
        spread: the MetaOp's shares that its own are, by how many devices an op has in all, if these are told
            apart.
        uses: by a row beside those of chains and devices, what an op uses of it on each share.
        takes: what it waits for between the ends of some of these and its start.
        first: shares that the program begins with; none: as `first_of` says.
        inputs: stages that come before.
    """

    num_ops: int
    shares: Shares
    longer_s: Array | float = 0.0
    beside_s: Array | float = 0.0
    spread: Spread | None = None
    uses: Mapping[str, Array] = field(default_factory=dict)
    takes: tuple[Taken, ...] = ()
    first: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()

    @cached_property
    def chain_s(self) -> Array:
        """Seconds of the chain for an op, by share."""
        return self.shares.op_s + self.longer_s + self.beside_s

    @cached_property
    def device_s(self) -> Array:
        """Device-seconds of an op, by share."""
        return self.shares.device_s + self.longer_s * self.shares.devices


class AnyCut:
    """The bounds of a profile on a cluster, each worked out when it is asked for."""

    def __init__(
        self, profile: Profile, cluster: Cluster, micro_batches: Mapping[str, int] | None = None
    ) -> None:
        """`micro_batches`: into how many each task's batch is cut, 1 where nothing is said; None: into any
        number.
        """
        self._profile, self._cluster, self._micro_batches = profile, cluster, micro_batches

    @cached_property
    def work_or_chain_s(self) -> float:
        """Seconds that the work takes on all devices, or the longest chain, each on the shares that are best
        for it.
        """
        longest_s: dict[str, float] = {}
        for name in topological_order(self._profile.metaops):
            metaop = self._profile.by_name[name]
            before_s = max((longest_s[producer] for producer in metaop.inputs), default=0.0)
            longest_s[name] = before_s + metaop.num_ops * float(self._shares[name].op_s.min())
        work_s, _ = _least_s(self._stages(self._plain), self._cluster, has_chains=False)
        return max(work_s, max(longest_s.values()) * (1 - FLOAT_SLACK))

    @cached_property
    def lower_bound_s(self) -> float:
        """Seconds before which no schedule ends."""
        return self._without_more[0]

    @cached_property
    def with_memory_s(self) -> float:
        """Seconds before which no schedule ends that fits the devices' memory."""
        fitting = {metaop.name: self._fitting(metaop) for metaop in self._profile.metaops}
        kept, rows = self._kept_at_once(fitting)
        if not rows and all(shares is self._shares[name] for name, shares in fitting.items()):
            return self.lower_bound_s
        of = {
            metaop.name: kept.get(metaop.name, (_Stage(metaop.num_ops, fitting[metaop.name]),))
            for metaop in self._profile.metaops
        }
        bound_s, _ = _least_s(self._stages(of), self._cluster, rows)
        return max(self.lower_bound_s, bound_s)

    @cached_property
    def with_links_s(self) -> float:
        """Seconds before which no iteration ends."""
        counts = self._micro_batches
        uncut = {
            metaop.task
            for metaop in self._profile.metaops
            if counts is not None and counts.get(metaop.task, 1) == 1
        }
        links = OverLinks(self._profile, self._cluster, self._in_micro_batches, uncut)
        if not links.are_any:
            return self.lower_bound_s
        of = {}
        names = topological_order(self._profile.metaops)
        picked = dict(zip(names, self._without_more[1], strict=True))
        for metaop in self._profile.metaops:
            shares, longer_s = self._in_micro_batches[metaop.name], links.longer_s(metaop)
            begin = picked[metaop.name] if shares is self._shares[metaop.name] else ()
            first, *others = (
                _Stage(num_ops, shares, longer_s, first=begin) for num_ops in links.parts(metaop)
            )
            first = replace(first, takes=links.takes(metaop))
            if (spread := links.spread(metaop)) is not None:
                each_s = np.broadcast_to(longer_s, shares.tp.shape)[spread.numbers]
                spread_shares = shares.taken(spread.numbers)
                first = _Stage(1, spread_shares, each_s, beside_s=spread.sum_s, spread=spread)
            of[metaop.name] = (first, *others)
        bound_s, _ = _least_s(self._stages(of), self._cluster)
        return max(self.lower_bound_s, bound_s)

    @cached_property
    def _shares(self) -> dict[str, Shares]:
        return {metaop.name: shares_of(metaop, self._cluster) for metaop in self._profile.metaops}

    @cached_property
    def _in_micro_batches(self) -> dict[str, Shares]:
        """The shares that are no larger than the micro-batches that are asked for."""
        within, counts = dict(self._shares), self._micro_batches or {}
        for metaop in self._profile.metaops:
            shares, count = self._shares[metaop.name], counts.get(metaop.task, 1)
            is_within = shares.fewest <= metaop.batch_size / count
            if count > 1 and is_within.any():
                within[metaop.name] = shares.taken(is_within)
        return within

    @cached_property
    def _without_more(self) -> tuple[float, tuple[tuple[int, ...], ...]]:
        return _least_s(self._stages(self._plain), self._cluster)

    @property
    def _plain(self) -> dict[str, tuple[_Stage, ...]]:
        by_name = self._profile.by_name
        return {name: (_Stage(by_name[name].num_ops, shares),) for name, shares in self._shares.items()}

    def _stages(self, of: Mapping[str, Sequence[_Stage]]) -> list[_Stage]:
        """The stages of all MetaOps, each behind those that it takes from."""
        stages: list[_Stage] = []
        last: dict[str, int] = {}
        for name in topological_order(self._profile.metaops):
            inputs = tuple(last[producer] for producer in self._profile.by_name[name].inputs)
            for stage in of[name]:
                stages.append(replace(stage, inputs=inputs))
                inputs = (len(stages) - 1,)
            (last[name],) = inputs
        return stages

    def _fitting(self, metaop: MetaOpProfile) -> Shares:
        """The shares on which an op of a MetaOp fits; all of them where none does, and there is no plan."""
        shares = self._in_micro_batches[metaop.name]
        fits = fits_alone(metaop, shares, self._cluster)
        return shares if fits.all() or not fits.any() else shares.taken(np.flatnonzero(fits))

    def _kept_at_once(
        self, fitting: Mapping[str, Shares]
    ) -> tuple[dict[str, tuple[_Stage, ...]], dict[str, Row]]:
        """The stages of MetaOps that keep so much for an op that needs all samples at once that it may not
        fit all devices together, and the rows that say so.
        """
        room = room_beside_parameters(self._profile, self._cluster)
        if self._cluster.knows_host_links or room <= 0:
            return {}, {}
        by_name = self._profile.by_name
        sets = dict.fromkeys(
            frozenset(_before(metaop, by_name)) for metaop in by_name.values() if starts_together(metaop)
        )
        kept = {name: keeping_less(by_name[name], fitting[name]) for name in frozenset().union(*sets)}
        uses: dict[str, dict[str, Array]] = {name: {} for name in kept}
        rows: dict[str, Row] = {}
        for number, names in enumerate(sets):
            most = sum(by_name[name].num_ops * float(kept[name].num_bytes.max()) for name in names)
            least = sum(by_name[name].num_ops * float(kept[name].num_bytes.min()) for name in names)
            if least <= room < most:
                rows[f"room_{number}"] = Row({}, 1.0)
                for name in names:
                    uses[name][f"room_{number}"] = kept[name].num_bytes / room
        stages: dict[str, tuple[_Stage, ...]] = {
            name: (_Stage(by_name[name].num_ops, kept[name].shares, uses=stage_uses),)
            for name, stage_uses in uses.items()
            if stage_uses
        }
        return stages, rows


def _before(metaop: MetaOpProfile, by_name: Mapping[str, MetaOpProfile]) -> set[str]:
    """The MetaOps that one hangs on."""
    names: set[str] = set()
    for name in metaop.inputs:
        names |= {name, *_before(by_name[name], by_name)}
    return names


def _least_s(
    stages: Sequence[_Stage],
    cluster: Cluster,
    more: Mapping[str, Row] | None = None,
    *,
    has_chains: bool = True,
) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """Seconds that the program of these stages proves, and the shares of each that it was solved with.

    Args:
        more: rows beside those of chains and devices.
    """
    numbers = np.array(devices_of_kinds(cluster), float)
    possible = [_always_possible(stage, numbers) for stage in stages]
    unit_s = 2 * max(_serial_s(stages, possible, numbers), SHORTEST_S)
    chains = chain_rows(_consumers(stages)) if has_chains else [{} for _ in stages]
    devices = device_rows(numbers.tolist())
    rows = {name: row for chain in chains for name, row in chain.items()}
    rows |= {f"busy_{n}": Row({END: -1.0}) for n, stage in enumerate(stages) if stage.spread is not None}
    uses = [
        _uses(number, stage, (*chain,), (*devices,), unit_s)
        for number, (stage, chain) in enumerate(zip(stages, chains, strict=True))
    ]
    rows |= _waits(stages, uses, unit_s)
    choices = [
        _OnShares(
            stage.num_ops,
            tuple(used),
            (share, *(stage.first or first_of(stage.shares, stage.chain_s, stage.device_s))),
            np.array(list(used.values())).T,
        )
        for stage, used, share in zip(stages, uses, possible, strict=True)
    ]
    solution = bounded(choices, rows | devices | dict(more or {}))
    picked = tuple(tuple(share for share, _ in allocations) for allocations in solution.ops)
    return float(solution.at_least * unit_s), picked


def _serial_s(stages: Sequence[_Stage], shares: Sequence[int], numbers: Array) -> float:
    """Seconds of all stages one after another, each on such shares, and of what they wait for."""
    seconds = sum(
        stage.num_ops * float(_alone_s(stage, numbers)[share])
        + sum(taken.own_s[share] for taken in stage.takes)
        for stage, share in zip(stages, shares, strict=True)
    )
    return float(seconds)


def _consumers(stages: Sequence[_Stage]) -> list[list[int]]:
    """The stages that take from each."""
    consumers: list[list[int]] = [[] for _ in stages]
    for number, stage in enumerate(stages):
        for producer in stage.inputs:
            consumers[producer].append(number)
    return consumers


def _uses(
    number: int, stage: _Stage, chain: tuple[str, ...], devices: tuple[str, ...], unit_s: float
) -> dict[str, Array]:
    """What an op of a stage uses of each row, by share.

    Args:
        number: of the stage.
        chain, devices: names of the rows of what comes behind it, and of the types of device.
    """
    uses: dict[str, Array] = dict.fromkeys(chain, stage.chain_s / unit_s)
    if stage.spread is not None:
        uses[f"busy_{number}"] = (stage.device_s / stage.spread.most + stage.beside_s) / unit_s
    for kind, name in enumerate(devices):
        uses[name] = stage.device_s / unit_s * (stage.shares.kinds == kind)
    return uses | dict(stage.uses)


def _waits(stages: Sequence[_Stage], uses: Sequence[dict[str, Array]], unit_s: float) -> dict[str, Row]:
    """The rows that say what stages wait for (`_Stage.takes`); what ops use of them is added to `uses`."""
    rows: dict[str, Row] = {}
    for number, stage in enumerate(stages):
        for place, taken in enumerate(stage.takes):
            producer, name = stage.inputs[taken.place], f"takes_{number}_{place}"
            before = stages[producer]
            rows[name] = Row({f"start_{producer}": 1.0, f"start_{number}": -1.0})
            less_s = taken.less_s if before.spread is None else taken.less_s[before.spread.numbers]
            uses[producer][name] = (before.chain_s - less_s) / unit_s
            uses[number][name] = taken.own_s / unit_s
    return rows


@dataclass(frozen=True, eq=False)
class _OnShares:
    """A node of the program, as `Choice` says: its allocations are shares, by their numbers.

    Attributes:
        every: what an op uses, for each share of all rows.
    """

    num_ops: float
    rows: tuple[str, ...]
    first: tuple[int, ...]
    every: Array

    def uses(self, allocation: int) -> Array:
        return np.asarray(self.every[allocation])

    def cheapest(self, prices: Array) -> int:
        return int(np.argmin(self.every @ prices))


def _always_possible(stage: _Stage, numbers: Array) -> int:
    """The share that is fastest for a stage's ops one after another, each on all devices of a type, of those
    that keep least.
    """
    alone_s = _alone_s(stage, numbers)
    for used in stage.uses.values():
        alone_s = np.where(used == used.min(), alone_s, np.inf)
    return int(np.argmin(alone_s))


def _alone_s(stage: _Stage, numbers: Array) -> Array:
    return np.maximum(stage.chain_s, stage.device_s / numbers[stage.shares.kinds])
