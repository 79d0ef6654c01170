"""The search behind `calibrate.py --fit`: batch sizes whose `sequential` plans take the published times.

Curves for any batch come from one estimate of a large batch, as an op's seconds depend on its share alone;
memory from the profile's sizes. Both are about what the planner computes, without buffers, transfers and
gradient sums.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.costs.memory import slice_activation_bytes
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.units import GIB

# The batch that curves are estimated for: it has many divisors, so that any share lies close to two of
# its own.
# Shares of the activations that are recomputed, as the search tries them.
RECOMPUTED_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
REFERENCE_BATCH = 720
_LARGEST = 1216
_MEMORY_BYTES = 74 * GIB  # of 80 GiB: buffers, which are not counted here, need some
_SWEEPS = 6
_STARTS = 30
_CLOSE = 0.16  # as a logarithm
_EVENNESS = 0.05


@dataclass(frozen=True)
class Target:
    """A published cell: which tasks, on how many devices, in how many seconds."""

    tasks: tuple[str, ...]
    num_devices: int
    seconds: float


@dataclass(frozen=True)
class Phases:
    """Seconds of all ops of something, by direction, and bytes that a device keeps for it."""

    forward_s: float
    backward_s: float
    kept_bytes: float


class Model:
    """Predicts `sequential` for any batch sizes."""

    def __init__(self, reference: Profile) -> None:
        self._of_task: dict[str, list[MetaOpProfile]] = {}
        for metaop in reference.metaops:
            self._of_task.setdefault(metaop.task, []).append(metaop)
        blocks: dict[tuple[str, int], float] = {}
        for metaop in reference.metaops:
            for op in range(metaop.num_ops):
                block = op if metaop.parameter_blocks is None else metaop.parameter_blocks[op]
                size = metaop.param_bytes_per_op + metaop.extra_param_bytes.get(op, 0)
                key = (metaop.parameters or metaop.name, block)
                blocks[key] = max(blocks.get(key, 0.0), size)
        self._state_bytes = sum(blocks.values()) * (2 + reference.optimizer_state_per_param)
        self._degrees = sorted({point.tp for metaop in reference.metaops for point in metaop.curve})
        self._known: dict[tuple[str, int, int, int], list[Phases]] = {}
        self._curves: dict[tuple[str, int], list[tuple[int, float, float]]] = {}

    def seconds(self, batch_sizes: Mapping[str, int], target: Target) -> float:
        """Seconds of the fastest iteration that fits the memory; infinite if none does."""
        best = math.inf
        for least_tp in self._degrees:
            parts = [
                part
                for task in target.tasks
                for part in self._task(task, batch_sizes[task], target.num_devices, least_tp)
            ]
            room = _MEMORY_BYTES - self._state_bytes / least_tp
            best = min(best, _fitting_s(parts, room))
        return best

    def _task(self, task: str, batch: int, num_devices: int, least_tp: int) -> list[Phases]:
        key = (task, batch, num_devices, least_tp)
        if key not in self._known:
            self._known[key] = [
                self._metaop(metaop, batch, num_devices, least_tp) for metaop in self._of_task[task]
            ]
        return self._known[key]

    def _metaop(self, metaop: MetaOpProfile, batch: int, num_devices: int, least_tp: int) -> Phases:
        has = {point.tp for point in metaop.curve}
        least_tp = min(least_tp, max(has))
        best: tuple[float, Phases] | None = None
        for tp in sorted(tp for tp in has if least_tp <= tp <= num_devices):
            for dp in range(1, 1 + (1 if metaop.coupled else num_devices // tp)):
                if batch % dp:
                    continue
                forward_s, backward_s = self._at(metaop, tp, batch // dp)
                if best is None or forward_s + backward_s < best[0]:
                    n = metaop.num_ops
                    kept = slice_activation_bytes(metaop, (0, n), dp, tp) * batch / metaop.batch_size
                    phases = Phases(n * forward_s, n * backward_s, kept)
                    best = (forward_s + backward_s, phases)
        assert best is not None
        return best[1]

    def _at(self, metaop: MetaOpProfile, tp: int, rows: int) -> tuple[float, float]:
        """Forward and backward seconds of a share, linear between shares that were estimated."""
        if metaop.coupled:
            return metaop.curve[0].forward_s, metaop.curve[0].backward_s
        key = (metaop.name, tp)
        if key not in self._curves:
            self._curves[key] = sorted(
                (metaop.batch_size // point.dp, point.forward_s, point.backward_s)
                for point in metaop.curve
                if point.tp == tp
            )
        curve = self._curves[key]
        place = min(max(bisect_left(curve, (rows,)), 1), len(curve) - 1)
        (a, fa, ba), (b, fb, bb) = curve[place - 1], curve[place]
        share = (rows - a) / (b - a)
        return fa + share * (fb - fa), ba + share * (bb - ba)


def _fitting_s(parts: Sequence[Phases], room_bytes: float) -> float:
    """Seconds with as many of the heaviest MetaOps recomputed as the planner's fallback has to."""
    seconds = sum(part.forward_s + part.backward_s for part in parts)
    kept = total = sum(part.kept_bytes for part in parts)
    left = sorted(parts, key=lambda part: part.kept_bytes)
    for share in (0.0, *RECOMPUTED_SHARES):
        while left and total - kept < share * total:
            part = left.pop()
            kept -= part.kept_bytes
            seconds += part.forward_s
        if kept <= room_bytes:
            return seconds
    return math.inf


def fit(model: Model, targets: Sequence[Target], start: Mapping[str, int], multiple: int) -> dict[str, int]:
    """Batch sizes by coordinate descent from `start` and from random places: of each task in turn, the
    candidate with the least error.

    Args:
        multiple: candidates are multiples of it, with no prime factor above 5. Where all devices of the
            published clusters can share them evenly, `sequential` loses nothing to odd numbers that are our
            own choice.
    """
    draw = random.Random(0)  # noqa: S311 - a search, no secrets
    candidates = [size for size in range(multiple, _LARGEST + 1, multiple) if _has_many_divisors(size)]
    tasks = sorted(start)

    def error(sizes: Mapping[str, int]) -> float:
        ratios = [model.seconds(sizes, target) / target.seconds for target in targets]
        if not all(math.isfinite(ratio) for ratio in ratios):
            return math.inf
        # No cell far off first; then all close; and tasks of about equal sizes rather than one with all work.
        logs = [abs(math.log(ratio)) for ratio in ratios]
        far = max(0.0, max(logs) - _CLOSE)
        middle = sum(math.log(size) for size in sizes.values()) / len(sizes)
        uneven = sum((math.log(size) - middle) ** 2 for size in sizes.values()) / len(sizes)
        return 10 * far + sum(log * log for log in logs) / len(logs) + _EVENNESS * uneven

    found = []
    for attempt in range(_STARTS):
        sizes = {t: start[t] if attempt == 0 else draw.choice(candidates) for t in tasks}
        found.append(_descend(sizes, candidates, error, draw))
    return min(found, key=error)


def _has_many_divisors(size: int) -> bool:
    for prime in (2, 3, 5):
        while size % prime == 0:
            size //= prime
    return size == 1


def _descend(
    sizes: dict[str, int],
    candidates: Sequence[int],
    error: Callable[[Mapping[str, int]], float],
    draw: random.Random,
) -> dict[str, int]:
    for _ in range(_SWEEPS):
        before = dict(sizes)
        for task in draw.sample(sorted(sizes), len(sizes)):
            tried = [{**sizes, task: size} for size in candidates]
            sizes = min(tried, key=error)
        if sizes == before:
            break
    return sizes
