"""What an optimizer keeps, and what its step moves in memory."""

from __future__ import annotations

from typing import Protocol

from spindle_cli.profile.types import MetaOp, OptimizerBytes


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
