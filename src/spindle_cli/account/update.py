"""How long the optimizer's step takes: every device updates its part of the trained parameters."""

from __future__ import annotations

from collections.abc import Iterable

from spindle_cli.account.device_memory import DeviceMemory


def optimizer_steps_s(devices: Iterable[DeviceMemory], s_per_byte: float) -> tuple[float, ...]:
    """Seconds of the step on each device.

    Args:
        devices: what each holds.
        s_per_byte: of updated parameters, as the profile says.
    """
    return tuple(device.updated_bytes * s_per_byte for device in devices)
