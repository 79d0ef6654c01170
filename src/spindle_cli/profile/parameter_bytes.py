"""What a profile and a plan say of parameters beside their bytes: what optimizers keep of them, and which ops
use under several keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from spindle_cli.files.artifact import Model
from spindle_cli.profile.points import OpNumber


class OptimizerBytes(Model):
    """What the optimizer keeps of some trained parameters whose settings differ from others', and who steps
    them, for each byte of them. For a class of one's own the figures are those of a matrix of 64 by 96.

    Attributes:
        state_per_param: State that devices with the same parameters share, where they share any.
        whole_state_per_param: State that each of them keeps whole.
        whole_share: Share of the parameters that each of them steps whole.
    """

    state_per_param: Annotated[float, Field(ge=0)] = 0.0
    whole_state_per_param: Annotated[float, Field(ge=0)] = 0.0
    whole_share: Annotated[float, Field(ge=0, le=1)] = 0.0


class TiedParameters(Model):
    """Parameters of an op that ops with other keys of parameters, or other blocks of them, use too: an
    embedding that is the matrix of a head, or in which several encoders look up words.

    Attributes:
        op: Which op of the MetaOp.
        parameter: The name of one of them, the same wherever they are used.
        num_bytes: Bytes of all of them; they are among those of the op.
        keys: Keys of parameters of all ops that use them.
        is_trained: Whether they are trained.
        is_split: Whether tensor parallelism splits them where this op uses them.
        is_split_by_any: Whether it splits them where any op does. An op that they are whole for joins the
            parts.
    """

    op: OpNumber
    parameter: Annotated[str, Field(min_length=1)]
    num_bytes: Annotated[int, Field(ge=1, le=2**63 - 1)]
    keys: Annotated[tuple[str, ...], Field(min_length=1)]
    is_trained: bool = True
    is_split: bool = False
    is_split_by_any: bool = False


def require_among_own(
    tied: Sequence[TiedParameters], num_ops: int, bytes_of: Callable[[int], int], name: str
) -> None:
    """What ops are tied to is of ops that there are, each parameter once, and among what these have.

    Args:
        bytes_of: of an op, its parameters. `name`: of the MetaOp.

    Raises:
        ValueError: it is not.
    """
    by_op: dict[int, dict[str, int]] = {}
    for parameters in tied:
        if parameters.op >= num_ops:
            raise ValueError(f"tied: op {parameters.op}; {name!r} has {num_ops}, counted from 0")
        bytes_by_name = by_op.setdefault(parameters.op, {})
        if parameters.parameter in bytes_by_name:
            raise ValueError(
                f"tied: {parameters.parameter!r} is there twice for op {parameters.op} of {name!r}"
            )
        bytes_by_name[parameters.parameter] = parameters.num_bytes
    for op, bytes_by_name in by_op.items():
        if sum(bytes_by_name.values()) > bytes_of(op):
            raise ValueError(
                f"tied: {sum(bytes_by_name.values())} bytes for op {op} are more than the parameters "
                f"that it has in {name!r}, {bytes_of(op)} (param_bytes_per_op, extra_param_bytes)"
            )
