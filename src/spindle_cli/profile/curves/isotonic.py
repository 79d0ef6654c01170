"""Least-squares monotone sequences, by pooling adjacent violators."""

from __future__ import annotations

from collections.abc import Sequence


def non_increasing(values: Sequence[float]) -> list[float]:
    """The non-increasing sequence nearest to `values`; same length, same mean."""
    blocks: list[tuple[float, int]] = []  # (mean, count)
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] < mean:
            earlier, weight = blocks.pop()
            mean, count = (earlier * weight + mean * count) / (weight + count), weight + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def non_decreasing(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values`; same length, same mean."""
    return non_increasing(values[::-1])[::-1]
