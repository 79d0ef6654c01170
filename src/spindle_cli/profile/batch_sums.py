"""What a profile and a plan say of what an op's shares sum or gather: statistics of batch norms, and what a
contrastive loss compares.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spindle_cli.files.artifact import Model


class BatchSum(Model):
    """Sums, or gathers, of so many bytes that one op takes over all devices of its slice, where they run a
    share each.

    `kind`: "sum": all devices get the sum. "gather": forward they get the rows of all, so many bytes
    together; backward each gets its own rows of the sum of what all have (a reduce-scatter).
    `forward`, `backward`: how many of them in each pass, on average over the MetaOp's ops.
    """

    kind: Literal["sum", "gather"] = "sum"
    num_bytes: Annotated[int, Field(ge=1, le=2**63 - 1)]
    forward: Annotated[float, Field(ge=0, le=1e6)]
    backward: Annotated[float, Field(ge=0, le=1e6)]
