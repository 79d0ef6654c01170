"""What parameters cost: which blocks of them ops use, how their gradients are summed, what sharing them out
adds to passes, and what the optimizer's step takes.

The blocks of parameters that ops use: what is always used together.

An op's own parameters are a block, its key and number those of its layer, in two parts: what tensor
parallelism splits, and the rest. Apart from these are the matrices of it whose gradients are gathered, and
what it is tied to: parameters that ops use under several keys (an embedding that is the head's matrix too, or
that several encoders look words up in), which a device holds once however many of these ops it runs.

How long a gather or a scatter takes of which the devices have unequal parts, and which way is faster.

Of B bytes over n devices, of which the largest part is L and the smallest s, on a ring of links of latency a
and bandwidth b:

* padded: equal parts of L each go around; (n - 1) (a + L / b).
* grouped: each part goes around by itself, all in one call. The link before a device carries all parts but
  its own, at most B - s, and a device begins its own one hop after the device before it, so that the last
  one is through after 2 (n - 1) hops: 2 (n - 1) a + (B - s) / b.

Grouped is faster where L - (B - s) / (n - 1) > a b: where the largest part is longer than the mean of all but
the smallest by more than a link carries within its latency. Of two devices, and of equal parts, padding
costs nothing. Under gloo an equal gather is a broadcast from each already, and a scatter a message to
each, so that grouping costs no latency there, and nothing is ever padded.

What padding saves is n - 1 latencies at most, and it takes a copy in memory and its time, which is not
counted here: so only what is small is padded (`MOST_PADDED_BYTES`).

HAP (Zhang et al., EuroSys 2024, arXiv 2401.05965) chooses between the same two for its all-gathers.

Three ways to give every holder of a matrix the sum of its gradients, and how long each takes.

Of p holders, a matrix of M x N elements of w bytes and T tokens of the whole batch over all holders:

* dense: the gradient goes around twice, 2 (p - 1) / p x M N w bytes from each device.
* rows (of an embedding of M words, N wide): a token's gradient is one row of it. The rows and their ids go
  around once, (p - 1) / p x T (N w + i) bytes with ids of i bytes.
* factors (of a linear map; "sufficient factors", Xie et al. 2016, arXiv 1409.5705): the gradient is a product
  of two factors with a row for each token, its output's gradient (M wide) and its input (N wide). Both go
  around once, (p - 1) / p x T (M + N) w bytes, and every device multiplies all of them instead of its own:
  (p - 1) / p x 2 T M N more operations.

Where only bytes count, and ids are as wide as elements, rows pay below T = 2 M N / (N + 1), factors below
T = 2 M N / (M + N); at either limit both ways move the same. A message's latency is paid 2 (p - 1) times by
the first and p - 1 times by the others, so latency alone never speaks for a dense sum.

Shares of unequal size go around padded to the largest: T is then p times the largest.

How much longer passes take where devices share out parameters and gradients: for gathers of what an op
uses, and scatters of the gradients that it makes (ZeRO stages 2 and 3).

The gather for an op starts with the op before it, the first one's with the pass; the scatter of an op's
gradients runs beside the next op's backward pass, and the last one ends the pass. All go one after another
over one communicator. So with g gathers, s scatters and c compute of ops 1 to n in the order in which they
run,

    pass = g_1 + sum over i of max(c_i, g_(i+1) + s_(i-1)) + s_n       (g_(n+1) = s_0 = 0)

and forward passes have no scatters. What belongs to several ops of a slice is gathered for the first that
runs, and scattered behind the last. What is not trained is gathered by itself, and never scattered; where no
gradient comes to a slice, it is gathered forward alone. So is what is kept from a slice's forward pass to its
backward pass; if another slice has it already, not even that, which is not seen here.

What an optimizer keeps, and what its step moves in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from spindle_cli.costs.links import (
    Spread,
    by_node_s,
    per_node,
    spread_all_gather_s,
    spread_collective_s,
    spread_ring_s,
)
from spindle_cli.costs.memory import SliceShape, op_param_bytes, parameter_block, split_param_bytes
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf, ShardWeights
from spindle_cli.profile.types import MetaOp, OptimizerBytes
from spindle_cli.units import MIB

# Parameters that are always used together: key, block, and whether tensor parallelism splits them.
Block = tuple[str, int, bool]


class BlockUse(NamedTuple):
    """A block as an op uses it: bytes unsplit, and those that are trained. `is_gathered`: it is one matrix,
    whose gradient is made of what its devices gather. `tied_keys`: of what ops of several keys use, these.
    `is_whole`: this op uses all of it although others split it.
    """

    block: Block
    num_bytes: float
    trained_bytes: float
    is_gathered: bool = False
    tied_keys: tuple[str, ...] = ()
    is_whole: bool = False

    def parts(self, tp: int) -> int:
        """The number of equal parts of which a device of so many has one for the op."""
        return tp if self.block[2] and not self.is_whole else 1

    @property
    def frozen_bytes(self) -> float:
        """Bytes of the parameters that are not trained."""
        return self.num_bytes - self.trained_bytes

    def level(self, sharding: ShardingOf) -> Sharding:
        """What the devices that hold it share out: of what has several keys, the least of them."""
        if self.is_gathered:
            return Sharding.NONE
        levels = {sharding.get(key, Sharding.OPTIMIZER) for key in self.tied_keys or (self.block[0],)}
        return next(level for level in Sharding if level in levels)


class _Apart(NamedTuple):
    """Parameters of an op that are a block by themselves. `is_split`: whether it lies among those that tensor
    parallelism splits.
    """

    use: BlockUse
    is_split: bool


def blocks_of(metaop: MetaOp, op: int) -> tuple[BlockUse, ...]:
    """The blocks of an op that have any bytes."""
    key, number = parameter_block(metaop, op)
    split = split_param_bytes(metaop, op)
    whole = op_param_bytes(metaop, op) - split
    apart = list(_apart(metaop, op)) if metaop.gathered or metaop.tied else []
    # What tensor parallelism would split lies with what it would, as far as it is there: a layer that it does
    # not split at all counts as split.
    from_whole = min(whole, sum(entry.use.num_bytes for entry in apart if not entry.is_split))
    from_split = min(split, sum(entry.use.num_bytes for entry in apart) - from_whole)
    rest = []
    for size, taken, is_split in ((split, from_split, True), (whole, from_whole, False)):
        if size > taken:
            trained = size * metaop.trainable_fraction - taken * _trained_share(apart)
            block = (key, number, is_split)
            rest.append(BlockUse(block, size - taken, min(size - taken, max(0.0, trained))))
    return (*rest, *(entry.use for entry in apart))


def _trained_share(apart: Sequence[_Apart]) -> float:
    """The trained share of what is apart."""
    total = sum(entry.use.num_bytes for entry in apart)
    return sum(entry.use.trained_bytes for entry in apart) / total if total else 0.0


def _apart(metaop: MetaOp, op: int) -> Iterator[_Apart]:
    gathered = [matrix for matrix in metaop.gathered if matrix.op == op]
    for matrix in gathered:
        use = BlockUse((matrix.parameter, 0, False), matrix.num_bytes, matrix.num_bytes, True)
        yield _Apart(use, matrix.is_split)
    taken = {matrix.parameter for matrix in gathered}
    for tied in metaop.tied:
        if tied.op == op and tied.parameter not in taken:
            trained = tied.num_bytes if tied.is_trained else 0
            block = (tied.parameter, 0, tied.is_split_by_any)
            is_whole = tied.is_split_by_any and not tied.is_split
            use = BlockUse(block, tied.num_bytes, trained, tied_keys=tied.keys, is_whole=is_whole)
            yield _Apart(use, tied.is_split)


# Of the padded copy of one collective: as much as gradient sums under way may take in buffers.
MOST_PADDED_BYTES = 32 * MIB


def padded_s(num_bytes: float, weights: Sequence[int], spread: Spread, cluster: Cluster) -> float:
    """Seconds with every part padded to the largest. `weights`: what the parts are in proportion to."""
    return spread_all_gather_s(num_bytes * len(weights) * max(weights) / sum(weights), spread, cluster)


def grouped_s(num_bytes: float, weights: Sequence[int], spread: Spread, cluster: Cluster) -> float:
    """Seconds with each part by itself, all in one call."""
    count = len(weights)
    if count < 2 or num_bytes <= 0:
        return 0.0
    # A ring moves (n - 1) / n of what it is said to.
    moved = num_bytes * (1 - min(weights) / sum(weights)) * count / (count - 1)
    once_s = spread_ring_s(moved, spread, cluster)
    if cluster.talks_by == "gloo":
        return once_s
    return once_s + spread_ring_s(0.0, spread, cluster)


def is_padded(num_bytes: float, weights: Sequence[int], spread: Spread, cluster: Cluster) -> bool:
    """Whether padding is faster, and small. Where both take as long the parts are grouped, which takes no
    copies.
    """
    if num_bytes * len(weights) * max(weights) / sum(weights) > MOST_PADDED_BYTES:
        return False
    return padded_s(num_bytes, weights, spread, cluster) < grouped_s(num_bytes, weights, spread, cluster)


def parts_collective_s(
    num_bytes: float,
    spread: Spread,
    rounds: int,
    cluster: Cluster,
    weights: Sequence[int] = (),
    *,
    by_node: bool = False,
) -> float:
    """`spread_collective_s`, of unequal parts in the way that `is_padded` says; none: all are equal.
    `by_node`: a scatter or gather inside of nodes and between them.
    """
    if by_node:
        return by_node_s(num_bytes, spread, cluster)
    if not weights or rounds != 1:
        return spread_collective_s(num_bytes, spread, rounds, cluster)
    way_s = padded_s if is_padded(num_bytes, weights, spread, cluster) else grouped_s
    return way_s(num_bytes, weights, spread, cluster)


# Ids are sent as int32: no embedding has 2^31 rows.
ID_BYTES = 4


class Summing(StrEnum):
    """How the gradients of a parameter are summed over the devices that hold it."""

    DENSE = "dense"
    ROWS = "rows"
    FACTORS = "factors"


# Seconds of a collective by the bytes that are whole in the end, and by how often they go around: 2 for a sum
# that all get, 1 for a gather. `costs.links.spread_collective_s` of a cluster, or `ring`.
Collective = Callable[[float, int], float]


@dataclass(frozen=True)
class MatrixGradient:
    """The gradient of a matrix.

    Attributes:
        outputs: rows of the matrix, M: words of an embedding, outputs of a linear map.
        inputs: columns, N: width of an embedding, inputs of a linear map.
        tokens: T, what the uses of the matrix in one step look up or multiply, over all holders: p times the
            largest share, where shares are unequal.
        gradient_width: bytes of an element of the gradient that a dense sum moves.
        factor_width: bytes of an element of the rows or factors.
    """

    outputs: int
    inputs: int
    tokens: int
    gradient_width: int = 4
    factor_width: int = 4

    @property
    def dense_bytes(self) -> int:
        """The bytes of the gradient itself, which a sum takes around twice."""
        return self.outputs * self.inputs * self.gradient_width

    @property
    def rows_bytes(self) -> int:
        """The bytes of all rows and their ids, which a gather takes around once."""
        return self.tokens * (self.inputs * self.factor_width + ID_BYTES)

    @property
    def factors_bytes(self) -> int:
        """The bytes of both factors of all tokens, which a gather takes around once."""
        return self.tokens * (self.outputs + self.inputs) * self.factor_width

    def extra_flops(self, num_devices: int) -> float:
        """Operations that each device does more where it multiplies all factors, not its own share's."""
        return 2.0 * self.tokens * self.outputs * self.inputs * (num_devices - 1) / num_devices


def ring(num_devices: int, latency_s: float, bandwidth_bytes_per_s: float) -> Collective:
    """Collectives over one ring of equal links."""

    def collective_s(num_bytes: float, rounds: int) -> float:
        step_s = latency_s + num_bytes / num_devices / bandwidth_bytes_per_s
        return rounds * (num_devices - 1) * step_s

    return collective_s


def dense_s(gradient: MatrixGradient, collective_s: Collective) -> float:
    """Seconds of the sum of the gradient itself."""
    return collective_s(gradient.dense_bytes, 2)


def rows_s(gradient: MatrixGradient, collective_s: Collective) -> float:
    """Seconds of the gather of an embedding's rows."""
    return collective_s(gradient.rows_bytes, 1)


def factors_s(
    gradient: MatrixGradient, collective_s: Collective, num_devices: int, flops_per_s: float
) -> float:
    """Seconds of the gather of a linear map's factors, and of what multiplying them takes longer on every
    device; `flops_per_s` of the slowest of them.
    """
    return collective_s(gradient.factors_bytes, 1) + gradient.extra_flops(num_devices) / flops_per_s


def seconds_by_way(
    gradient: MatrixGradient,
    ways: Collection[Summing],
    collective_s: Collective,
    num_devices: int,
    flops_per_s: float | None,
) -> dict[Summing, float]:
    """Seconds of each of some ways, dense first; of one device nothing takes time.

    Args:
        ways: that are right for the matrix.
        flops_per_s: that a product reaches on the slowest device; None: not known, and factors are left out.
    """
    if num_devices < 2:
        return {Summing.DENSE: 0.0}
    seconds = {Summing.DENSE: dense_s(gradient, collective_s)}
    if Summing.ROWS in ways:
        seconds[Summing.ROWS] = rows_s(gradient, collective_s)
    if Summing.FACTORS in ways and flops_per_s is not None:
        seconds[Summing.FACTORS] = factors_s(gradient, collective_s, num_devices, flops_per_s)
    return seconds


def fastest(seconds: Mapping[Summing, float]) -> Summing:
    """The way that takes the least time; of equals the one that comes first."""
    return min(seconds, key=seconds.__getitem__)


def rows_limit(words: int, width: int) -> float:
    """Tokens of the whole batch below which rows move less than a dense sum: elements and ids of 4 bytes."""
    return 2 * words * width / (width + 1)


def factors_limit(outputs: int, inputs: int) -> float:
    """Tokens of the whole batch below which factors move less than a dense sum: all of one width."""
    return 2 * outputs * inputs / (outputs + inputs)


class SharedOut(Protocol):
    """What is needed of a plan, or of a profile that one is looked for."""

    @property
    def sharding(self) -> ShardingOf: ...
    @property
    def gradient_bytes_per_param(self) -> float: ...
    @property
    def shard_weights(self) -> ShardWeights: ...


def level_of(metaop: MetaOp, sharding: ShardingOf) -> Sharding:
    """What the devices of a MetaOp share out of its parameters."""
    return sharding.get(metaop.parameters or metaop.name, Sharding.OPTIMIZER)


@dataclass(frozen=True)
class Moved:
    """Seconds of the collectives of each op of a slice, first to last.

    `forward`, `backward`: its gathers in that pass; `scatters`: of gradients that are complete with it.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    scatters: tuple[float, ...]

    def longer_s(self, forward_s: float, backward_s: float) -> tuple[float, float]:
        """How much longer each pass of the slice takes.

        Args:
            forward_s, backward_s: what one of its ops computes.
        """
        nothing = (0.0,) * len(self.forward)
        return (
            _longer_s(forward_s, self.forward, nothing),
            _longer_s(backward_s, self.backward[::-1], self.scatters[::-1]),
        )


def _longer_s(compute_s: float, gathers: Sequence[float], scatters: Sequence[float]) -> float:
    """How much longer ops take, in the order in which they run, than what they compute."""
    overlapping = zip((*gathers[1:], 0.0), (0.0, *scatters[:-1]), strict=True)
    held_up = sum(max(0.0, gather + scatter - compute_s) for gather, scatter in overlapping)
    return gathers[0] + held_up + scatters[-1]


def moved_in_passes(
    slice_: SliceShape, metaop: MetaOp, cluster: Cluster, step: SharedOut, *, is_reached: bool = True
) -> Moved | None:
    """What a slice, which runs on all devices that hold its parameters, gathers and scatters; None: nothing.

    What tensor parallelism splits is shared out by the devices with the same part of it, the rest by all.

    Args:
        is_reached: whether gradients come to its MetaOp (`reached_by_gradients`).
    """
    if not level_of(metaop, step.sharding).is_by_pass or len(slice_.devices) == 1:
        return None
    first, last = slice_.ops
    used: dict[tuple[Block, bool], _Use] = {}
    for op in range(first, last):
        for use in blocks_of(metaop, op):
            level = use.level(step.sharding)
            if level.is_by_pass:
                key = use.block, use.parts(2) > 1
                earlier = used.get(key, _Use(op - first, op - first, level))
                used[key] = earlier.and_then(op - first, use, slice_.tp)
    seconds = _Seconds(slice_, cluster, step.shard_weights)
    in_ranges = 1 - (metaop.optimizer.whole_share if metaop.optimizer else 0.0)
    forward, backward, scatters = ([0.0] * (last - first) for _ in range(3))
    for (_, is_split), of_block in used.items():
        for num_bytes in (in_ranges * of_block.trained, of_block.frozen) if of_block.level.is_fetched else ():
            gather_s = seconds.of(num_bytes, is_split=is_split)
            forward[of_block.first] += gather_s
            backward[of_block.last] += (
                gather_s if is_reached and of_block.level is Sharding.PARAMETERS else 0.0
            )
        scatters[of_block.first] += seconds.of(
            step.gradient_bytes_per_param * of_block.trained, is_split=is_split
        )
    return Moved(tuple(forward), tuple(backward), tuple(scatters))


@dataclass(frozen=True)
class _Use:
    """A block in a slice: which of its ops are the first and the last that use it; what devices share out of
    it; bytes of it that a device needs, trained ones and others.
    """

    first: int
    last: int
    level: Sharding
    trained: float = 0.0
    frozen: float = 0.0

    def and_then(self, op: int, use: BlockUse, tp: int) -> _Use:
        """With a later op's use of it, on one of so many devices of a tensor-parallel group."""
        parts = use.parts(tp)
        trained = max(self.trained, use.trained_bytes / parts)
        return _Use(self.first, op, self.level, trained, max(self.frozen, use.frozen_bytes / parts))


class _Seconds:
    """The seconds of gathers, and of scatters, which take as long, over the devices of a slice."""

    def __init__(self, slice_: SliceShape, cluster: Cluster, weights: ShardWeights) -> None:
        self._cluster = cluster
        self._weights = weights
        parts = {
            self._sharers(slice_.devices[part :: slice_.tp], side_by_side=slice_.tp)
            for part in range(slice_.tp)
        }
        self._spreads = {True: parts, False: {self._sharers(slice_.devices)}}
        self._known: dict[tuple[float, bool], float] = {}

    def _sharers(self, devices: Sequence[int], *, side_by_side: int = 1) -> tuple[Spread, tuple[int, ...]]:
        """How devices lie on the nodes, and their weights, ascending, where these are not equal.
        `side_by_side`: of as many parts of the same layers, all of which are on each of the nodes.
        """
        weights = sorted(self._weights[device] for device in devices) if self._weights else []
        spread = per_node(devices, self._cluster)._replace(side_by_side=side_by_side)
        return spread, tuple(weights) if len(set(weights)) > 1 else ()

    def of(self, num_bytes: float, *, is_split: bool) -> float:
        """Gives the seconds of a collective over so many bytes, which takes as long as its slowest part."""
        if not num_bytes:
            return 0.0
        key = num_bytes, is_split
        if key not in self._known:
            spreads = self._spreads[is_split]
            self._known[key] = max(
                parts_collective_s(num_bytes, spread, 1, self._cluster, weights)
                for spread, weights in spreads
            )
        return self._known[key]


class OptimizerState(Protocol):
    """What is known of the optimizer of all parameters; `Profile` and `Plan` have it."""

    @property
    def optimizer_state_per_param(self) -> float: ...


def optimizer_bytes(metaop: MetaOp, of_all: OptimizerState) -> OptimizerBytes:
    """What the optimizer keeps of a MetaOp's trained parameters."""
    return metaop.optimizer or OptimizerBytes(state_per_param=of_all.optimizer_state_per_param)


def update_traffic(state_per_param: float) -> float:
    """Bytes of memory traffic for each byte that an elementwise optimizer updates.

    It reads the parameter, its gradient and its state, writes the parameter and its state, and the gradient
    is set to zero for the next iteration.
    """
    return 4 + 2 * state_per_param
