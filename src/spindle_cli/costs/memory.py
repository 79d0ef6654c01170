"""Bytes that ops, slices and their parameters take: the formulas behind `device_memory.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

from spindle_cli.profile.types import MetaOp, OpMemory
from spindle_cli.units import MIB

# Under gloo, what gradient sums under way may take in receive buffers where optimizer state is
# sharded; the runtime lets further sums wait. A single sum may be larger.
SUM_BUFFER_BYTES = 32 * MIB
# On top of all: what is not counted one by one, such as counters of the optimizer, flags, and the padding of
# buckets. By scripts/bench_memory.py it was 0.2 % at most.
UNCOUNTED_SHARE = 0.01
# On GPUs, what torch's allocator holds beyond the tensors: it rounds sizes up to 512 bytes, cuts what is
# between 1 and 10 MiB out of segments of 20 MiB, which two tensors of 8 MiB fill to four fifths, rounds
# larger ones up to 2 MiB (c10/cuda/CUDACachingAllocator.cpp), and keeps holes between blocks of different
# ages. It is a share of all tensors, as those that stay leave such remainders too. In others' runs on GH200s
# reserved memory was 2 to 12 % more than allocated, 7 % on average (eth-easl/sailor, artifact of SOSP 2025).
ALLOCATOR_SHARE = 0.07
# What is guessed where a profile does not say what ops take of memory.
# Of a transformer layer's activations, what tensor parallelism does not split: 10 of 34 bytes per token and
# channel (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation
# 2, without scores).
UNSPLIT_ACTIVATION_SHARE = 10 / 34
# Of what an op has kept, the gradients that its backward pass holds at once before it lets go of the rest: in
# a transformer layer two of the width between its linear layers, of some four that wide and a few narrower.
WORKING_SHARE = 0.5


class SliceShape(Protocol):
    """What is needed of a slice; `plan.types.Slice` has it."""

    @property
    def metaop(self) -> str: ...
    @property
    def ops(self) -> tuple[int, int]: ...
    @property
    def devices(self) -> tuple[int, ...]: ...
    @property
    def dp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def shares_of_batch(self) -> int: ...
    @property
    def rows(self) -> tuple[int, ...] | None: ...
    @property
    def recompute(self) -> bool: ...
    @property
    def selective(self) -> bool: ...
    @property
    def offload(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def num_recomputed(self) -> int: ...
    @property
    def start_s(self) -> float: ...
    @property
    def backward_start_s(self) -> float | None: ...


def parameter_block(metaop: MetaOp, op: int) -> tuple[str, int]:
    """Identity of an op's parameters: ops with the same pair hold the same parameters."""
    block = metaop.parameter_blocks[op] if metaop.parameter_blocks is not None else op
    return (metaop.name if metaop.parameters is None else metaop.parameters), block


def op_param_bytes(metaop: MetaOp, op: int) -> int:
    """Bytes of the parameters of one op, unsharded, with those of its glue."""
    return metaop.param_bytes_per_op + metaop.extra_param_bytes.get(op, 0)


def inner_bytes(metaop: MetaOp) -> int:
    """Bytes that an inner op hands to the next one, whole batch."""
    return metaop.output_bytes if metaop.inner_output_bytes is None else metaop.inner_output_bytes


def held_param_bytes(metaop: MetaOp, op: int, tp: int) -> float:
    """Bytes of the parameters of one op that each device of a slice holds: of what tensor parallelism
    splits, a part.
    """
    split = split_param_bytes(metaop, op)
    return split / tp + (op_param_bytes(metaop, op) - split)


def split_param_bytes(metaop: MetaOp, op: int) -> int:
    """Bytes of the parameters of one op that tensor parallelism splits, unsplit."""
    op_bytes = metaop.param_bytes_per_op - metaop.whole_param_bytes_per_op
    return op_bytes + metaop.split_extra_param_bytes.get(op, 0)


@dataclass(frozen=True)
class OpNeeds:
    """Bytes that one op takes on one device, as the profile's `OpMemory` has them for any share.

    `kept`: from forward to backward; `forward`: the most while it runs forward; `backward`: the most while it
    runs backward, beyond `kept`; `first_backward`: the same where it makes its parameters' gradients.
    `cast`: of `kept`, what is there whatever the share. `joined`: what the last op of a slice keeps besides:
    all positions of what it hands on a part of. `selective`: kept where the op is recomputed but for what
    takes longest; all of it where that is not known.
    """

    kept: float
    forward: float
    backward: float
    first_backward: float
    cast: float = 0.0
    joined: float = 0.0
    selective: float = inf

    @property
    def recomputed(self) -> float:
        """The part of `kept` that is made again where all but what takes longest is recomputed."""
        return self.kept - min(self.selective, self.kept)


def op_needs(metaop: MetaOp, ops: tuple[int, int], dp: float, tp: int) -> list[tuple[int, OpNeeds]]:
    """What the ops [first, last) of a MetaOp need: (number of consecutive ops, of each of them). `dp`: into
    how many shares of this size the batch would be cut.
    """
    first, last = ops
    entries = [entry for entry in metaop.memory if entry.tp == tp]
    if not entries:
        return [(last - first, _guessed(metaop, dp, tp))]
    ends = [*(entry.first_op for entry in entries[1:]), last]
    needs: list[tuple[int, OpNeeds]] = []
    for entry, end in zip(entries, ends, strict=True):
        count = min(end, last) - max(entry.first_op, first)
        if count > 0:
            needs.append((count, _of_share(entry, dp)))
    return needs


def _of_share(entry: OpMemory, dp: float) -> OpNeeds:
    (kept, kept_all), (forward, forward_all) = entry.kept_bytes, entry.forward_bytes
    (backward, backward_all), (first, first_all) = entry.backward_bytes, entry.first_backward_bytes
    return OpNeeds(
        kept=kept + kept_all / dp,
        forward=forward + forward_all / dp,
        backward=backward + backward_all / dp,
        first_backward=first + first_all / dp,
        cast=kept,
        joined=entry.joined_bytes / dp,
        selective=inf if entry.selective_bytes is None else _on_share(entry.selective_bytes, dp),
    )


def _on_share(pair: tuple[int, int], dp: float) -> float:
    """Bytes whatever the share, and those of one of `dp` shares."""
    fixed, whole = pair
    return fixed + whole / dp


def _guessed(metaop: MetaOp, dp: float, tp: int) -> OpNeeds:
    """From the profile's one number; gradients of an op's input and output pass through it."""
    split = UNSPLIT_ACTIVATION_SHARE + (1 - UNSPLIT_ACTIVATION_SHARE) / tp
    kept = metaop.activation_bytes_per_op / dp * split
    backward = WORKING_SHARE * kept + 2 * inner_bytes(metaop) / dp
    trained = metaop.param_bytes_per_op / tp * metaop.trainable_fraction
    return OpNeeds(kept, kept, backward, backward + trained)


def slice_activation_bytes(
    metaop: MetaOp,
    ops: tuple[int, int],
    dp: float,
    tp: int,
    *,
    recompute: bool = False,
    selective: bool = False,
) -> float:
    """Bytes that one device keeps from forward to backward for the ops [first, last) of its share, with the
    fields of the batch.

    With `recompute` only each op's output is kept, which is the next one's input, with `selective` also what
    takes longest.
    """
    first, last = ops
    fields = sum(size for op, size in metaop.field_bytes.items() if first <= op < last) / dp
    if recompute and not selective:
        return fields + (last - first) * inner_bytes(metaop) / dp
    kept = sum(
        count * (needs.kept - (needs.recomputed if selective else 0.0))
        for count, needs in op_needs(metaop, ops, dp, tp)
    )
    return fields + kept


def running_bytes(
    metaop: MetaOp, ops: tuple[int, int], dp: float, tp: int, *, recompute: bool, selective: bool = False
) -> float:
    """Bytes that an op takes at most while it runs, beyond what is kept of it."""
    most = 0.0
    for _, needs in op_needs(metaop, ops, dp, tp):
        again = (needs.recomputed if selective else needs.kept) if recompute else 0.0
        most = max(most, max(needs.forward - needs.kept, needs.backward) + again)
    return most


def input_bytes(metaop: MetaOp, first_op: int, by_name: Mapping[str, MetaOp]) -> int:
    """Bytes that a slice starting at `first_op` takes in from other slices, whole batch."""
    if first_op == 0:
        return sum(by_name[name].output_bytes for name in metaop.inputs)
    return inner_bytes(metaop) + sum(by_name[name].output_bytes for name in metaop.inputs_of_every_op)


def slice_output_bytes(metaop: MetaOp, last_op: int, num_ops: int) -> int:
    """Bytes that a slice ending before `last_op` hands on, whole batch; `num_ops` is the MetaOp's."""
    return metaop.output_bytes if last_op == num_ops else inner_bytes(metaop)
