"""What a profile and a plan say of what an op's shares sum or gather: statistics of batch norms, what a
contrastive loss compares, and what the gradients of a matrix are made of.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal

from pydantic import Field

from spindle_cli.files.artifact import Model
from spindle_cli.profile.points import OpNumber


class BatchSum(Model):
    """Sums, or gathers, that one op takes over all devices of its slice, where they run a share each.

    Attributes:
        kind: `sum`: all devices get the sum (batch norms). `gather`: forward they get the rows of all,
            backward each gets its own rows of the sum of what all have, a reduce-scatter (contrastive
            losses).
        num_bytes: Bytes of each; of a gather, of the rows of all together.
        forward: How many of them in a forward pass, on average over the MetaOp's ops.
        backward: How many of them in a backward pass.
    """

    kind: Literal["sum", "gather"] = "sum"
    num_bytes: Annotated[int, Field(ge=1, le=2**63 - 1)]
    forward: Annotated[float, Field(ge=0, le=1e6)]
    backward: Annotated[float, Field(ge=0, le=1e6)]


class Matrix(Model):
    """A trained matrix of an op whose gradient may be gathered as what it is made of, not summed as it is.

    Attributes:
        op: Which op of the MetaOp.
        parameter: Its name, the same wherever it is used.
        way: `rows`: every use of it in the workload is a lookup of an embedding. `factors`: every one is a
            linear map.
        outputs: Its rows: words, or what the map makes.
        inputs: Its columns: the width, or what the map takes.
        num_bytes: Bytes of the matrix.
        factor_width: Bytes of an element of the rows or factors.
        tokens: Tokens that the op looks up or maps for the whole batch, a share of n samples its part of
            them.
        fixed_tokens: Tokens that it looks up or maps besides in every pass, whatever its share.
        is_split: Whether tensor parallelism would split the matrix.
        flops_per_s: In a plan, what its slowest device multiplies factors with; absent: nothing is
            multiplied.
    """

    op: OpNumber
    parameter: Annotated[str, Field(min_length=1)]
    way: Literal["rows", "factors"]
    outputs: Annotated[int, Field(ge=1, lt=2**31)]
    inputs: Annotated[int, Field(ge=1, lt=2**31)]
    num_bytes: Annotated[int, Field(ge=1, le=2**63 - 1)]
    factor_width: Annotated[int, Field(ge=1, le=8)] = 4
    tokens: Annotated[int, Field(ge=0, le=2**40)]
    fixed_tokens: Annotated[int, Field(ge=0, le=2**40)] = 0
    is_split: bool = False
    flops_per_s: Annotated[float, Field(gt=0)] | None = None

    def rebatched(self, ratio: float) -> Matrix:
        """Return this matrix's use by a batch of `ratio` times as many samples."""
        return self.model_copy(update={"tokens": ceil(self.tokens * ratio)})
