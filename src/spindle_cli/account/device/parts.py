"""What slices take of their devices, and which of their parameters devices hold alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import count, pairwise
from typing import NamedTuple

from spindle_cli.account.activations import Taken
from spindle_cli.costs.beyond_curve import HOST_BLOCK_BYTES, is_offloaded
from spindle_cli.costs.memory import OpNeeds, SliceShape, op_needs, slice_output_bytes
from spindle_cli.costs.parameters import Block, BlockUse, blocks_of
from spindle_cli.profile.types import MetaOp

# An op that is recomputed keeps the state of the random numbers (torch's, on the CPU).
_RANDOM_STATE_BYTES = 5056


class Keeping(IntEnum):
    """What a device has of an op between its forward and its backward pass."""

    ALL = 0
    INPUTS = 1  # it is recomputed
    NOTHING = 2  # all of it is in host memory
    OUTPUTS = 3  # the same, but for what it hands to an op that keeps its inputs, or to another slice
    SELECTED = 4  # it is recomputed but for what takes longest

    @property
    def is_offloaded(self) -> bool:
        """Whether the rest is in host memory."""
        return self in (Keeping.NOTHING, Keeping.OUTPUTS)

    @property
    def has_casts(self) -> bool:
        """Whether it has parameters that were cast to the type that is computed in."""
        return self in (Keeping.ALL, Keeping.SELECTED)


class UsesCache:
    """A cache of the parameters that ops use, and of their kinds, for any number of plans of the same
    MetaOps.
    """

    def __init__(self) -> None:
        self._of_metaop: dict[str, tuple[tuple[BlockUse, ...], ...]] = {}
        self._kinds: dict[object, Kinds] = {}

    def of(self, metaop: MetaOp) -> tuple[tuple[BlockUse, ...], ...]:
        """The blocks of parameters that each op of a MetaOp uses."""
        if metaop.name not in self._of_metaop:
            self._of_metaop[metaop.name] = tuple(blocks_of(metaop, op) for op in range(metaop.num_ops))
        return self._of_metaop[metaop.name]

    def kinds(
        self, parts: Sequence[Part], slices: Sequence[SliceShape], *, op_by_op: bool, ends_apart: bool
    ) -> Kinds:
        """The kinds of the parts of these slices. They do not depend on devices, times and numbers of
        shares.
        """
        shapes = tuple(
            (slice_.metaop, slice_.ops, slice_.tp, slice_.recompute, slice_.selective, slice_.offload)
            for slice_ in slices
        )
        key = op_by_op, ends_apart, shapes
        if key not in self._kinds:
            self._kinds[key] = Kinds(parts, op_by_op=op_by_op, ends_apart=ends_apart)
        return self._kinds[key]


class Part:
    """What a slice takes of each of its devices; where its shares are not equal, of those with one size."""

    __slots__ = (
        "edges",
        "fields",
        "handed",
        "is_handed_on",
        "keeping",
        "keeps_all",
        "kept_inputs",
        "moves_out",
        "needs",
        "optimizer",
        "shares",
        "slice_index",
        "taken",
        "task",
        "tp",
        "uses",
    )

    def __init__(
        self,
        number: int,
        slice_: SliceShape,
        by_name: Mapping[str, MetaOp],
        shares: float,
        taken: Iterable[Taken],
        *,
        is_handed_on: bool,
        uses_cache: UsesCache,
    ) -> None:
        """`number`: of the slice. `shares`: into how many shares of this size its batch would be cut.
        `taken`: from other slices.
        """
        metaop = by_name[slice_.metaop]
        self.slice_index = number
        self.optimizer = metaop.optimizer
        first, last = slice_.ops
        self.tp = slice_.tp
        self.keeping = _keeping(slice_)
        kinds = set(self.keeping)
        self.keeps_all = kinds == {Keeping.ALL}
        self.moves_out = any(keeping.is_offloaded for keeping in kinds)
        self.needs: list[tuple[int, OpNeeds]] = op_needs(metaop, slice_.ops, shares, slice_.tp)
        self.task, self.shares = metaop.task, shares
        self.fields = sum(size for op, size in metaop.field_bytes.items() if first <= op < last)
        handed = slice_output_bytes(metaop, last, metaop.num_ops) / shares
        self.is_handed_on = is_handed_on
        self.handed = handed if is_handed_on else 0.0
        before, after = self.needs[0][1].joined, self.needs[-1][1].joined
        # Of what a slice is given, and hands on, whole, its ops have a part each besides.
        self.edges = after + (0.0 if self.keeping[0] is Keeping.INPUTS else before / slice_.tp)
        inner = slice_output_bytes(metaop, first + 1, metaop.num_ops) / shares
        self.kept_inputs = max(inner, handed)
        self.taken = [(output.num_bytes / shares, output) for output in taken]
        self.uses = uses_cache.of(metaop)[first:last]

    def kept_of(self, needs: OpNeeds, keeping: Keeping) -> float:
        """Bytes that an op keeps on the device from forward to backward."""
        if keeping is Keeping.ALL:
            return needs.kept
        if keeping is Keeping.SELECTED:
            return needs.kept - needs.recomputed + _RANDOM_STATE_BYTES
        if keeping is Keeping.NOTHING:
            return 0.0
        between = self.kept_inputs / (self.tp if needs.joined else 1)
        return between + (_RANDOM_STATE_BYTES if keeping is Keeping.INPUTS else 0.0)

    def while_recomputed(self, needs: OpNeeds, keeping: Keeping, running: float) -> float:
        """The most that an op takes, beyond what it has kept, while it runs forward again and backward.

        Args:
            running: while it runs backward, beyond all that it keeps where nothing is recomputed.
        """
        most = max(needs.forward, needs.kept + running)
        if keeping is Keeping.INPUTS:
            return most
        # What it hands on is among what it keeps, and is made once more.
        return self.kept_inputs + most - (needs.kept - needs.recomputed)

    def segments(self) -> Iterator[int]:
        """Say for each op which of `needs` it has."""
        return (number for number, (count, _) in enumerate(self.needs) for _ in range(count))


def _keeping(slice_: SliceShape) -> tuple[Keeping, ...]:
    """What the device keeps of each op of a slice."""
    on_device = Keeping.ALL
    if slice_.recompute:
        on_device = Keeping.SELECTED if slice_.selective else Keeping.INPUTS
    if not slice_.offload:
        return (on_device,) * (slice_.ops[1] - slice_.ops[0])
    keeping = []
    for is_out, next_is_out in pairwise([*is_offloaded(slice_), False]):
        if is_out:
            keeping.append(Keeping.NOTHING if next_is_out else Keeping.OUTPUTS)
        else:
            keeping.append(on_device)
    return tuple(keeping)


def in_blocks(num_bytes: float) -> float:
    """Bytes of host memory that an op's activations of so many bytes take."""
    return -(-num_bytes // HOST_BLOCK_BYTES) * HOST_BLOCK_BYTES


class Run(NamedTuple):
    """Consecutive ops of a slice that need the same, and use parameters of the same kinds, none twice.

    Attributes:
        position: of the first of them in the slice.
        num_ops: how many they are.
        segment: which of the part's `needs` they have.
        uses: what the first of them uses, with its kind; the others use as much of blocks of the same kinds.
        kinds: of `uses`.
        trained: of the kinds, those of which anything is trained.
        completes: of the kinds, those of blocks that no op before uses: gradients are complete with these.
        keeping: what the device has of each between forward and backward.
    """

    position: int
    num_ops: int
    segment: int
    uses: tuple[tuple[int, BlockUse], ...]
    kinds: tuple[int, ...]
    trained: tuple[int, ...]
    completes: tuple[int, ...]
    keeping: Keeping


class Kinds:
    """The kinds of blocks of parameters. Those of one kind are used by the same slices, in each of them as
    many bytes by ops that need the same: every device that holds one holds all, in the same shares.

    Attributes:
        kind_of: of each block.
        size: of each kind, how many blocks it has.
        block: of each kind, one of its blocks.
        runs: of each part.
        used, trained: of each part, the kinds that its runs use, and those of which anything is trained.
    """

    def __init__(self, parts: Sequence[Part], *, op_by_op: bool = False, ends_apart: bool = False) -> None:
        """`op_by_op`: with runs of one op each. `ends_apart`: the first op of what would be a run is one by
        itself, and so is the last.
        """
        self.kind_of: dict[Block, int] = {}
        self._numbers = count()
        for part in parts:
            self._tell_apart(part)
        self.size = Counter(self.kind_of.values())
        self.block = {kind: block for block, kind in self.kind_of.items()}
        self.runs = [tuple(self._runs(part, op_by_op=op_by_op, ends_apart=ends_apart)) for part in parts]
        self.used = [frozenset(kind for run in runs for kind in run.kinds) for runs in self.runs]
        self.trained = [frozenset(kind for run in runs for kind in run.trained) for runs in self.runs]

    def _tell_apart(self, part: Part) -> None:
        """Part kinds by how a slice uses their blocks. What several of its ops use is a kind by itself."""
        kind_of = self.kind_of
        kind_of_use: dict[object, int] = {}
        seen: set[Block] = set()
        for position, (segment, uses) in enumerate(zip(part.segments(), part.uses, strict=True)):
            for use in uses:
                block = use.block
                earlier = kind_of.get(block, (block[0], block[2]))
                again = position if block in seen else None
                key = earlier, segment, use.num_bytes, use.trained_bytes, use.is_whole, again
                if key not in kind_of_use:
                    kind_of_use[key] = next(self._numbers)
                kind_of[block] = kind_of_use[key]
                seen.add(block)

    def _runs(self, part: Part, *, op_by_op: bool, ends_apart: bool) -> Iterator[Run]:
        segments = list(part.segments())
        seen: set[Block] = set()
        for first, end in self._ranges(part, segments, op_by_op=op_by_op):
            uses = part.uses[first]
            kinds = tuple(self.kind_of[use.block] for use in uses)
            run = Run(
                position=first,
                num_ops=end - first,
                segment=segments[first],
                uses=tuple(zip(kinds, uses, strict=True)),
                kinds=kinds,
                trained=tuple(kind for kind, use in zip(kinds, uses, strict=True) if use.trained_bytes),
                completes=tuple(self.kind_of[use.block] for use in uses if use.block not in seen),
                keeping=part.keeping[first],
            )
            yield from _ends_apart(run) if ends_apart else (run,)
            seen.update(use.block for of_op in part.uses[first:end] for use in of_op)

    def _ranges(self, part: Part, segments: Sequence[int], *, op_by_op: bool) -> Iterator[tuple[int, int]]:
        """Yield the ops [first, last) of each run. `segments`: which of the part's `needs` each op has."""
        kinds = [tuple(self.kind_of[use.block] for use in uses) for uses in part.uses]
        whole = [tuple(use.is_whole for use in uses) for uses in part.uses]
        alike = list(zip(kinds, whole, segments, part.keeping, strict=True))
        first = 0
        for end in range(1, len(kinds) + 1):
            is_alike = end < len(kinds) and alike[end] == alike[first]
            # Of a kind that several ops use there is one block.
            if is_alike and not op_by_op and (not kinds[end] or part.uses[end] != part.uses[end - 1]):
                continue
            yield first, end
            first = end


def _ends_apart(run: Run) -> Iterator[Run]:
    """Yield the first op of a run, what is between, and its last op as runs by themselves."""
    first, num_ops = run.position, run.num_ops
    lengths = (1, num_ops - 2, 1) if num_ops > 2 else (1,) * num_ops
    for position, length in zip((first, first + 1, first + num_ops - 1), lengths, strict=False):
        yield run._replace(position=position, num_ops=length)
