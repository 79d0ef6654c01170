"""What each device holds in memory, as the iteration goes on.

Parameters, gradients and optimizer state are held all the time. A slice's activations are held from the start
of its forward pass to the end of its backward pass, and so is what it received; what it received for its
backward pass from when the receive is posted to the end of that pass; a gradient that it sends until it has
arrived.
"""

from __future__ import annotations

from spindle_cli.account.device_memory import device_memory
from spindle_cli.costs.memory import slice_activation_bytes
from spindle_cli.plan.types import Plan
from spindle_cli.program.types import Transfer
from spindle_cli.simulate.types import MemoryStep


class Ledger:
    """Bytes held by every device, over time."""

    def __init__(self, plan: Plan) -> None:
        static = device_memory(plan.metaops, plan.slices, plan.cluster, plan)
        self._held = [device.lasting_bytes for device in static]
        self._steps = [[MemoryStep(0.0, held)] for held in self._held]
        self._activations = [
            round(
                slice_activation_bytes(
                    plan.by_name[piece.metaop], piece.ops, piece.dp, piece.tp, recompute=piece.recompute
                )
            )
            for piece in plan.slices
        ]
        self._buffers: dict[tuple[int, int], int] = {}  # received for a slice, by (device, slice)

    def start_forward(self, device: int, piece: int, now_s: float) -> None:
        """A slice starts to fill its activations."""
        self._change(device, self._activations[piece], now_s)

    def post_receive(self, transfer: Transfer, now_s: float) -> None:
        """A buffer for what comes; it is held until the slice it is for has run backward."""
        piece = transfer.producer if transfer.is_gradient else transfer.consumer
        key = (transfer.destination, piece)
        self._buffers[key] = self._buffers.get(key, 0) + transfer.num_bytes
        self._change(transfer.destination, transfer.num_bytes, now_s)

    def end_backward(self, device: int, piece: int, now_s: float) -> None:
        """A slice lets go of its activations and of all that it received."""
        self._change(device, -self._activations[piece] - self._buffers.pop((device, piece), 0), now_s)

    def post_gradient(self, transfer: Transfer, now_s: float) -> None:
        """A gradient waits at its source until it has arrived."""
        self._change(transfer.source, transfer.num_bytes, now_s)

    def gradient_arrived(self, transfer: Transfer, now_s: float) -> None:
        """The source lets go of it."""
        self._change(transfer.source, -transfer.num_bytes, now_s)

    def steps(self) -> tuple[tuple[MemoryStep, ...], ...]:
        """Of each device, ascending in time."""
        return tuple(tuple(steps) for steps in self._steps)

    def _change(self, device: int, num_bytes: int, now_s: float) -> None:
        if not num_bytes:
            return
        self._held[device] += num_bytes
        steps = self._steps[device]
        if steps[-1].at_s == now_s and len(steps) > 1:
            steps.pop()
        steps.append(MemoryStep(now_s, self._held[device]))
