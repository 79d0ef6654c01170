"""Matrices whose gradients are gathered as what they are made of: over whom, for how many tokens, how large.

A holder's share is all that it looks up or maps of a matrix in a step: over all of its slices and their
micro-batches, in each of the step's batches. Shares are padded to the largest, so that one gather of a fixed
size does for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.parameters.gradient_sums import MatrixGradient, Summing
from spindle_cli.costs.shares.sizes import cuts_by_share
from spindle_cli.profile.types import Matrix, MetaOp


@dataclass(frozen=True)
class GatheredMatrix:
    """A matrix under a plan.

    Attributes:
        matrix: as one of its ops uses it.
        devices: that hold it, ascending.
        share_tokens: of the largest share.
    """

    matrix: Matrix
    devices: tuple[int, ...]
    share_tokens: int

    @property
    def way(self) -> Summing:
        """How its gradient is summed."""
        return Summing(self.matrix.way)

    def gradient(self, gradient_bytes_per_param: float) -> MatrixGradient:
        """For the cost of each way."""
        matrix = self.matrix
        width = matrix.num_bytes // (matrix.outputs * matrix.inputs)
        return MatrixGradient(
            matrix.outputs,
            matrix.inputs,
            self.share_tokens * len(self.devices),
            round(width * gradient_bytes_per_param),
            matrix.factor_width,
        )

    @property
    def num_bytes(self) -> int:
        """That each device has in the end of the gather."""
        gradient = self.gradient(1)
        return gradient.rows_bytes if self.way is Summing.ROWS else gradient.factors_bytes

    @property
    def product_s(self) -> float:
        """Seconds by which each device multiplies longer than if it made the gradient of its own share."""
        if self.way is not Summing.FACTORS or self.matrix.flops_per_s is None:
            return 0.0
        return self.gradient(1).extra_flops(len(self.devices)) / self.matrix.flops_per_s

    @property
    def buffer_bytes(self) -> float:
        """That each device keeps for it: what is gathered, and while the gradient is made of it a copy."""
        return 2 * self.num_bytes


def gathered_matrices(
    slices: Sequence[SliceShape],
    by_name: Mapping[str, MetaOp],
    accumulate: int,
    matrices_of: Mapping[str, Sequence[Matrix]] | None = None,
) -> dict[str, GatheredMatrix]:
    """By the name of the parameter, all of a plan.

    Args:
        accumulate: batches in a step.
        matrices_of: by MetaOp, which to look at; None: those that are gathered.
    """
    tokens: dict[str, dict[int, int]] = {}
    first: dict[str, Matrix] = {}
    for piece in slices:
        metaop = by_name[piece.metaop]
        known = metaop.gathered if matrices_of is None else matrices_of.get(piece.metaop, ())
        for matrix in known:
            if not piece.ops[0] <= matrix.op < piece.ops[1]:
                continue
            first.setdefault(matrix.parameter, matrix)
            of_device = tokens.setdefault(matrix.parameter, {})
            for device, count in _tokens(piece, matrix):
                of_device[device] = of_device.get(device, 0) + count
    return {
        name: GatheredMatrix(first[name], tuple(sorted(found)), accumulate * max(found.values()))
        for name, found in tokens.items()
    }


def _tokens(piece: SliceShape, matrix: Matrix) -> Iterator[tuple[int, int]]:
    """Of each device of a slice, how many tokens its share has in a batch."""
    cuts = cuts_by_share(piece)
    for position, device in enumerate(piece.devices):
        share = matrix.tokens / cuts[position // piece.tp] if cuts[position // piece.tp] else 0.0
        yield device, matrix.fixed_tokens + ceil(share - 1e-9)
