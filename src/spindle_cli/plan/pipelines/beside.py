"""What lanes have to do beside their passes: the update of what they hold, and where devices are processors
that communicate and read samples themselves (`account/compute.py`), messages and samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.account.compute import costs_nothing
from spindle_cli.plan.pipelines.cuts import Assignment, Piece
from spindle_cli.plan.pipelines.lanes import Lanes
from spindle_cli.plan.pipelines.sections import Section


class Beside:
    """Of a problem in some lanes."""

    def __init__(self, lanes: Lanes, sections: Sequence[Section]) -> None:
        self._lanes = lanes
        self._widths = [len(devices) for devices in lanes.devices]
        profile = lanes.problem.profile
        self._costs = profile.processor
        self._is_free = costs_nothing(profile.processor)
        shares = self._widths if profile.optimizer_state_sharded else [1] * lanes.count
        self._update_s = [
            [num_bytes * profile.optimizer_s_per_byte / share for share in shares]
            for num_bytes in (sum(section.num_bytes) / section.num_ops for section in sections)
        ]

    def seconds(self, assignment: Assignment, pieces: Sequence[Piece]) -> list[float]:
        """Of each lane."""
        seconds = [0.0] * self._lanes.count
        for parts, update_s in zip(assignment, self._update_s, strict=True):
            first = 0
            for last, lane in parts:
                seconds[lane] += update_s[lane] * (last - first)
                first = last
        if not self._is_free:
            self._add_processor(seconds, pieces)
        return seconds

    def _add_processor(self, seconds: list[float], pieces: Sequence[Piece]) -> None:
        """Each device of a lane sends, receives and reads its share; what it takes comes back as a
        gradient.
        """
        costs = self._costs
        read: dict[tuple[int, str], float] = {}
        for piece in pieces:
            here = piece.lane
            for source, num_bytes in piece.takes:
                there = pieces[source].lane
                for lane in (here, there) if there != here else ():
                    seconds[lane] += 2 * (costs.message_s + num_bytes / self._widths[lane] * costs.s_per_byte)
            metaop = self._lanes.problem.nodes[piece.node].metaop
            if any(piece.first <= op < piece.last for op in metaop.field_bytes):
                samples = metaop.batch_size / self._widths[here]
                read[here, metaop.task] = samples * costs.load_s.get(metaop.task, 0.0)
        for (lane, _), read_s in read.items():
            seconds[lane] += read_s
