"""What each device holds in memory, as the iteration goes on: `account/device_memory.py` at the times of the
simulation.

From the start of a pass a device holds the most that the pass takes, from its end on what stays of it. So
what is simulated and what is predicted peak at the same.
"""

from __future__ import annotations

from spindle_cli.account.device_memory import memory_by_pass
from spindle_cli.account.traffic import communicator_bytes
from spindle_cli.plan.types import Plan
from spindle_cli.simulate.types import MemoryStep


class Ledger:
    """Bytes held by every device, over time."""

    def __init__(self, plan: Plan) -> None:
        self._of = memory_by_pass(
            plan.metaops, plan.slices, plan.cluster, plan, communicator_bytes(plan), plan.turn
        )
        self._steps = [[MemoryStep(0.0, memory.idle_bytes)] for memory in self._of]

    def start_pass(self, device: int, piece: int, now_s: float, *, is_backward: bool) -> None:
        """A slice starts to run forward or backward."""
        self._set(device, self._of[device].passes[piece, is_backward][0], now_s)

    def end_pass(self, device: int, piece: int, now_s: float, *, is_backward: bool) -> None:
        """It is through."""
        self._set(device, self._of[device].passes[piece, is_backward][1], now_s)

    def finish_sums(self, device: int, now_s: float) -> None:
        """A device's passes are over: it waits for its sums, and updates its parameters."""
        self._set(device, self._of[device].update_bytes, now_s)

    def end_update(self, device: int, now_s: float) -> None:
        """A device's iteration is over."""
        self._set(device, self._of[device].idle_bytes, now_s)

    def steps(self) -> tuple[tuple[MemoryStep, ...], ...]:
        """The steps of each device's memory, ascending in time."""
        return tuple(tuple(steps) for steps in self._steps)

    def _set(self, device: int, num_bytes: int, now_s: float) -> None:
        steps = self._steps[device]
        if steps[-1].num_bytes != num_bytes:
            steps.append(MemoryStep(now_s, num_bytes))
