"""What one device holds at its fullest moment, by what takes it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device at its fullest moment, by what takes them.

    `allocator_bytes`: what torch's allocator holds beyond the tensors. `outside_bytes`: what is outside of
    it, the cluster's reserve for context and libraries, and communicators.
    `updated_bytes`: of the parameters, those that the device's own optimizer updates. `lasting_bytes`: of
    all, what is there at every moment.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    buffer_bytes: int
    updated_bytes: int
    lasting_bytes: int
    allocator_bytes: int = 0
    outside_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of them together, as the driver shows it."""
        return self.tensor_bytes + self.allocator_bytes + self.outside_bytes

    def with_communicators(self, num_bytes: int) -> DeviceMemory:
        """The same with what communicators take, if that was not counted."""
        return replace(self, outside_bytes=self.outside_bytes + num_bytes)

    @property
    def tensor_bytes(self) -> int:
        """Of all, what tensors take."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.buffer_bytes
        )

    @property
    def parts(self) -> dict[str, int]:
        """All of them by what people call them."""
        return {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer state": self.optimizer_bytes,
            "activations": self.activation_bytes,
            "buffers": self.buffer_bytes,
            "allocator": self.allocator_bytes,
            "reserve and communicators": self.outside_bytes,
        }
