"""A schedule before and after placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spindle_cli.account.types import Joint, Pass
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import ShardingOf, ShardWeights
from spindle_cli.plan.problem import Node, Point, Problem
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOpProfile


@dataclass(frozen=True)
class UnplacedSlice:
    """Ops [first, last) of a node on one allocation, from start to end; no devices yet.

    As any free devices will do in a schedule, it is valid when no more than N devices are busy at any moment.
    """

    node: int
    first: int
    last: int
    point: Point
    start_s: float
    end_s: float

    @property
    def num_ops(self) -> int:
        """Number of ops."""
        return self.last - self.first


def whole_slice(node: Node, point: Point, start_s: float, end_s: float) -> UnplacedSlice:
    """All ops of a node."""
    return UnplacedSlice(node.index, node.first_op, node.first_op + node.num_ops, point, start_s, end_s)


@dataclass(frozen=True)
class Candidate:
    """A schedule that a strategy proposes: pieces in order of start, producers first.

    Attributes:
        name: the strategy it comes from, for messages.
        devices: of each piece, where the strategy says which; None leaves it to the placement.
        after: for each piece, how many of the pieces before it must have ended, whatever their devices; None
            for
            a schedule in which pieces wait for their inputs and devices only.
        order: of both passes of all pieces, by their indices, where the strategy says that; none before what
            it takes. Times and order of the pieces then only number them.
    """

    name: str
    pieces: tuple[UnplacedSlice, ...]
    devices: tuple[tuple[int, ...], ...] | None = None
    after: tuple[int, ...] | None = None
    order: tuple[Pass, ...] | None = None

    @property
    def end_s(self) -> float:
        """When the last piece ends."""
        return max(slice_.end_s for slice_ in self.pieces)


@dataclass(frozen=True)
class Placed:
    """A candidate with the devices of every piece, in the order in which they hold the batch's shares."""

    candidate: Candidate
    devices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PlacedSlices:
    """What `account/` takes: a placed candidate's slices in order of start, before they are a plan."""

    slices: tuple[Slice, ...]
    by_name: Mapping[str, MetaOpProfile]
    cluster: Cluster
    accumulate: int
    gradient_bytes_per_param: float
    optimizer_state_sharded: bool
    clips_gradients: bool
    scales_losses: bool
    updates_by_parts: bool
    sharding: ShardingOf
    shard_weights: ShardWeights = ()
    joint: Joint | None = None
    member: int = 0
    sums_by_node: bool = True


def placed_slices(problem: Problem, slices: tuple[Slice, ...]) -> PlacedSlices:
    """Some slices of a problem."""
    profile = problem.profile
    return PlacedSlices(
        slices,
        profile.by_name,
        problem.cluster,
        profile.accumulate,
        profile.gradient_bytes_per_param,
        profile.optimizer_state_sharded,
        profile.clips_gradients,
        profile.scales_losses,
        profile.updates_by_parts,
        profile.sharding,
        profile.shard_weights,
    )
