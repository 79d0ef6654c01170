"""Bytes that ops, slices and their parameters take: the formulas behind `device_memory.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

# Of a transformer layer's activations, what tensor parallelism does not split: 10 of 34 bytes per token and
# channel (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation
# 2, without scores).
UNSPLIT_ACTIVATION_SHARE = 10 / 34
# Of what an op has kept, the gradients that its backward pass holds at once before it lets go of the rest: in
# a transformer layer two of the width between its linear layers, of some four that wide and a few narrower.
WORKING_SHARE = 0.5


class MetaOpSizes(Protocol):
    """What is needed of a MetaOp; `MetaOpProfile` and `PlanMetaOp` have it. Bytes are for the whole batch."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def inputs_of_every_op(self) -> tuple[str, ...]: ...
    @property
    def parameters(self) -> str | None: ...
    @property
    def parameter_blocks(self) -> tuple[int, ...] | None: ...
    @property
    def param_bytes_per_op(self) -> int: ...
    @property
    def extra_param_bytes(self) -> dict[int, int]: ...
    @property
    def trainable_fraction(self) -> float: ...
    @property
    def activation_bytes_per_op(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...
    @property
    def inner_output_bytes(self) -> int | None: ...


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
    def recompute(self) -> bool: ...
    @property
    def start_s(self) -> float: ...


def parameter_block(metaop: MetaOpSizes, op: int) -> tuple[str, int]:
    """Identity of an op's parameters: ops with the same pair hold the same parameters."""
    block = metaop.parameter_blocks[op] if metaop.parameter_blocks is not None else op
    return (metaop.name if metaop.parameters is None else metaop.parameters), block


def op_param_bytes(metaop: MetaOpSizes, op: int) -> int:
    """Bytes of the parameters of one op, unsharded, with those of its glue."""
    return metaop.param_bytes_per_op + metaop.extra_param_bytes.get(op, 0)


def inner_bytes(metaop: MetaOpSizes) -> int:
    """Bytes that an inner op hands to the next one, whole batch."""
    return metaop.output_bytes if metaop.inner_output_bytes is None else metaop.inner_output_bytes


def activation_bytes(
    metaop: MetaOpSizes, num_ops: int, dp: int, tp: int, *, recompute: bool = False
) -> float:
    """Bytes that one device keeps from forward to backward for `num_ops` ops of its share.

    With `recompute` only each op's input is kept; see `recomputed_bytes`.
    """
    if recompute:
        return num_ops * inner_bytes(metaop) / dp
    return num_ops * _op_activation_bytes(metaop, dp, tp)


def recomputed_bytes(metaop: MetaOpSizes, dp: int, tp: int, *, recompute: bool) -> float:
    """Bytes that one device needs while it recomputes an op in the backward pass, one op at a time."""
    return _op_activation_bytes(metaop, dp, tp) if recompute else 0.0


def working_bytes(metaop: MetaOpSizes, dp: int, tp: int) -> float:
    """Bytes of the gradients on their way through the backward pass of one op, on one device."""
    return WORKING_SHARE * _op_activation_bytes(metaop, dp, tp)


def _op_activation_bytes(metaop: MetaOpSizes, dp: int, tp: int) -> float:
    split = UNSPLIT_ACTIVATION_SHARE + (1 - UNSPLIT_ACTIVATION_SHARE) / tp
    return metaop.activation_bytes_per_op / dp * split


def input_bytes(metaop: MetaOpSizes, first_op: int, by_name: Mapping[str, MetaOpSizes]) -> int:
    """Bytes that a slice starting at `first_op` takes in from other slices, whole batch."""
    if first_op == 0:
        return sum(by_name[name].output_bytes for name in metaop.inputs)
    return inner_bytes(metaop) + sum(by_name[name].output_bytes for name in metaop.inputs_of_every_op)


def slice_output_bytes(metaop: MetaOpSizes, last_op: int, num_ops: int) -> int:
    """Bytes that a slice ending before `last_op` hands on, whole batch; `num_ops` is the MetaOp's."""
    return metaop.output_bytes if last_op == num_ops else inner_bytes(metaop)
