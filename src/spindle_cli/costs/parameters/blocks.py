"""The blocks of parameters that ops use: what is always used together.

An op's own parameters are a block, its key and number those of its layer, in two parts: what tensor
parallelism splits, and the rest. Apart from these are the matrices of it whose gradients are gathered, and
what it is tied to: parameters that ops use under several keys (an embedding that is the head's matrix too, or
that several encoders look words up in), which a device holds once however many of these ops it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spindle_cli.costs.memory import op_param_bytes, parameter_block, split_param_bytes
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.profile.types import MetaOp

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
        """Those that are not trained."""
        return self.num_bytes - self.trained_bytes

    def level(self, sharding: ShardingOf) -> Sharding:
        """What the devices that hold it share out: of what has several keys, the least of them."""
        if self.is_gathered:
            return Sharding.NONE
        found = {sharding.get(key, Sharding.OPTIMIZER) for key in self.tied_keys or (self.block[0],)}
        return next(level for level in Sharding if level in found)


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
    from_whole = min(whole, sum(each.use.num_bytes for each in apart if not each.is_split))
    from_split = min(split, sum(each.use.num_bytes for each in apart) - from_whole)
    own = []
    for size, taken, is_split in ((split, from_split, True), (whole, from_whole, False)):
        if size > taken:
            trained = size * metaop.trainable_fraction - taken * _trained_share(apart)
            block = (key, number, is_split)
            own.append(BlockUse(block, size - taken, min(size - taken, max(0.0, trained))))
    return (*own, *(each.use for each in apart))


def _trained_share(apart: Sequence[_Apart]) -> float:
    """The trained share of what is apart."""
    total = sum(each.use.num_bytes for each in apart)
    return sum(each.use.trained_bytes for each in apart) / total if total else 0.0


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
