"""What a profile and a plan say of the statistics that an op's shares sum (batch norms)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spindle_cli.files.artifact import Model


class BatchSum(Model):
    """Sums of so many bytes that one op takes over all devices of its slice, where they run a share each.

    `forward`, `backward`: how many of them in each pass, on average over the MetaOp's ops.
    """

    num_bytes: Annotated[int, Field(ge=1, le=2**63 - 1)]
    forward: Annotated[float, Field(ge=0, le=1e6)]
    backward: Annotated[float, Field(ge=0, le=1e6)]
