"""What a device holds all the time and in each pass, and its fullest moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.account.device.iteration import Fullest, PassBytes
from spindle_cli.account.types import DeviceMemory

# On top of all: what is not counted one by one, such as counters of the optimizer, flags, and the padding of
# buckets. By scripts/bench_memory.py it was 0.2 % at most.
UNCOUNTED_SHARE = 0.01
# On GPUs, what torch's allocator holds beyond the tensors: it rounds sizes up to 512 bytes, cuts what is
# between 1 and 10 MiB out of segments of 20 MiB, which two tensors of 8 MiB fill to four fifths, rounds
# larger ones up to 2 MiB (c10/cuda/CUDACachingAllocator.cpp), and keeps holes between blocks of different
# ages. It is a share of all tensors, as those that stay leave such remainders too. In others' runs on GH200s
# reserved memory was 2 to 12 % more than allocated, 7 % on average (eth-easl/sailor, artifact of SOSP 2025).
ALLOCATOR_SHARE = 0.07


@dataclass(frozen=True)
class MemoryByPass:
    """What a device holds over an iteration, in bytes; the most of all is `DeviceMemory.total_bytes`.

    Attributes:
        idle_bytes: what is there between iterations.
        passes: of each (index of a slice, whether backward), the most while it runs, and what stays.
        update_bytes: the most behind the last pass, while gradients are summed and parameters updated.
    """

    idle_bytes: int
    passes: Mapping[tuple[int, bool], tuple[int, int]]
    update_bytes: int


@dataclass(frozen=True, eq=False)
class Need:
    """What a device holds all the time, and pass by pass.

    `gathered`: of the memory that parameters are gathered into.
    """

    parameters: int
    state: int
    summed_gradients: float
    gathered: float
    updated: float
    allocator_share: float
    passes: tuple[PassBytes, ...]
    in_host: float = 0.0

    def peak(self) -> DeviceMemory:
        """At the fullest moment of all."""
        return self.at(max((each.fullest for each in self.passes), key=lambda fullest: fullest.total))

    def at(self, moment: Fullest) -> DeviceMemory:
        """At a moment."""
        lasting = self.parameters + self.state + round(self.summed_gradients) + round(self.gathered)
        tensors = lasting + moment.total
        uncounted = UNCOUNTED_SHARE * tensors
        return DeviceMemory(
            parameter_bytes=self.parameters,
            gradient_bytes=round(self.summed_gradients + moment.gradients),
            optimizer_bytes=self.state,
            activation_bytes=round(moment.activations),
            buffer_bytes=round(self.gathered + moment.buffers + uncounted),
            updated_bytes=round(self.updated),
            lasting_bytes=lasting,
            allocator_bytes=round(self.allocator_share * (tensors + uncounted)),
            host_bytes=round(self.in_host),
        )

    def by_pass(self, order: Sequence[int], outside: int) -> MemoryByPass:
        """`order`: indices of slices, in the order of their numbers here; `outside`: of the allocator."""

        def total(moment: Fullest) -> int:
            return self.at(moment).total_bytes + outside

        return MemoryByPass(
            idle_bytes=total(self.passes[-1].after),
            passes={
                (order[each.piece], each.is_backward): (total(each.fullest), total(each.after))
                for each in self.passes
                if each.piece is not None
            },
            update_bytes=total(self.passes[-1].fullest),
        )
