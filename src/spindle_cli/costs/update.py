"""What an optimizer's step moves in memory."""

from __future__ import annotations


def update_traffic(state_per_param: float) -> float:
    """Bytes of memory traffic for each byte that an elementwise optimizer updates.

    It reads the parameter, its gradient and its state, writes the parameter and its state, and the gradient
    is set to zero for the next iteration.
    """
    return 4 + 2 * state_per_param
