"""How long the optimizer's step takes: every device updates its part of the trained parameters.

The one definition: planner and simulator call it.
"""

from __future__ import annotations

from collections.abc import Iterable

from spindle_cli.costs.device_memory import DeviceMemory


def optimizer_steps_s(devices: Iterable[DeviceMemory], s_per_byte: float) -> tuple[float, ...]:
    """Seconds of the step on each device.

    Args:
        devices: what each holds.
        s_per_byte: of updated parameters, as the profile says.
    """
    return tuple(device.updated_bytes * s_per_byte for device in devices)


def update_traffic(state_per_param: float) -> float:
    """Bytes of memory traffic for each byte that an elementwise optimizer updates.

    It reads the parameter, its gradient and its state, writes the parameter and its state, and the gradient
    is set to zero for the next iteration.
    """
    return 4 + 2 * state_per_param
