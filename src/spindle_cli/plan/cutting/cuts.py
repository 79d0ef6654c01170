"""How a batch is cut over devices of several types so that the longest share is as short as can be.

Within T seconds a device of type k does at most c_k(T) samples, of its times as they are known. n_k devices
of each type do the batch of B samples within T if

    sum over k of n_k c_k(T) >= B

and the shortest T that does is the time of a share: it is found by bisection over these times. Shares are
whole samples, so the cut is exact, and not rounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from spindle_cli.plan.cutting.shares import ShareTimes

# Of so many MetaOps and degrees what was worked out is kept.
_MOST_KEPT = 2048


@lru_cache(_MOST_KEPT)
def cutter_of(times: ShareTimes) -> Cutter:
    """Return the cutter of these times, one object for equal ones."""
    return Cutter(times)


class Cutter:
    """Cuts the batch of a MetaOp at one degree of tensor parallelism."""

    def __init__(self, times: ShareTimes) -> None:
        self._times = times
        known_s = [type_times.at_most_s[np.isfinite(type_times.at_most_s)] for type_times in times.of_types]
        self._longest_s = np.unique(np.concatenate(known_s))
        self._most = [self._most_within(number) for number in range(len(times.of_types))]

    def _most_within(self, number: int) -> list[int]:
        """For each time, the most samples that a device of a type does within it."""
        of_type = self._times.of_types[number]
        samples = np.flatnonzero(np.isfinite(of_type.at_most_s))
        if not samples.size:
            return [0] * len(self._longest_s)
        places = np.searchsorted(of_type.at_most_s[samples], self._longest_s, side="right")
        return [int(samples[place - 1]) if place else 0 for place in places]

    def cut(self, counts: Sequence[int]) -> tuple[int, ...] | None:
        """Samples of each share, type after type; None where shares of these sizes are not known.

        Args:
            counts: shares of each type.
        """
        batch_size, num_shares = self._times.batch_size, sum(counts)
        if not num_shares or num_shares > batch_size:
            return None
        used = [number for number, count in enumerate(counts) if count]

        def does(place: int) -> bool:
            most = [self._most[number][place] for number in used]
            return min(most) > 0 and sum(map(_times, most, (counts[n] for n in used))) >= batch_size

        place = bisect_left(range(len(self._longest_s)), True, key=does)
        if place == len(self._longest_s):
            return None
        most = [self._most[number][place] if count else 0 for number, count in enumerate(counts)]
        return self._less(counts, most, sum(map(_times, most, counts)) - batch_size)

    def _less(self, counts: Sequence[int], most: Sequence[int], surplus: int) -> tuple[int, ...] | None:
        """Shares of at most so many samples, less what there is too much of: evenly of each type's, of the
        type first whose shares are longest.
        """
        order = sorted(
            (number for number, count in enumerate(counts) if count),
            key=lambda number: -self._times.of_types[number].at_most_s[most[number]],
        )
        samples_of_type: dict[int, list[int]] = {}
        for number in order:
            count = counts[number]
            spare = count * (most[number] - self._times.of_types[number].fewest)
            taken = min(surplus, spare)
            surplus -= taken
            left = count * most[number] - taken
            samples_of_type[number] = [
                left * (place + 1) // count - left * place // count for place in range(count)
            ]
        cut = tuple(samples for number in sorted(samples_of_type) for samples in samples_of_type[number])
        return None if surplus or not self._is_known(counts, cut) else cut

    def _is_known(self, counts: Sequence[int], cut: Sequence[int]) -> bool:
        kinds = [number for number, count in enumerate(counts) for _ in range(count)]
        return all(
            self._times.of_types[kind].of_samples[samples] is not None
            for kind, samples in set(zip(kinds, cut, strict=True))
        )


def offsets(samples: Sequence[int]) -> tuple[int, ...] | None:
    """`rows` of shares of so many samples; None where all are equal."""
    return None if len(set(samples)) == 1 else tuple(accumulate(samples, initial=0))


def _times(a: int, b: int) -> int:
    return a * b
