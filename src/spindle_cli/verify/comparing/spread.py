"""What rounding alone makes of a tensor: the plain run next to others whose operators round once more.

Where a plan's run differs by more than the tolerance, it may differ by so many times what those differ: by
norm, and in the largest element. They are plain PyTorch alone, so that no fault of a plan can widen it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from spindle_cli.verify.comparing.captured import Captured, CapturedRun
from spindle_cli.verify.comparing.sizes import largest, largest_gradient, ratio
from spindle_cli.verify.types import (
    MOST_EXPLAINED,
    MOST_EXPLAINED_OF_STATE,
    SMALL_GRADIENT,
    ArithmeticName,
    Noise,
)

# How many times what rounding moves at most in a few runs it may move in one more. Gradients beyond the
# tolerance of plans that are right were seen to differ by half of it; of what Adam makes of them, where it
# takes full steps in directions of chance, no draw is the larger for sure.
GRADIENT_FACTOR, FACTOR = 1.0, 2.0
# Where rounding is measured it also tells what tolerances of low precision cannot. Beyond a part of these
# a tensor may differ by so many times what rounding moves it.
SHARP_FACTOR, SHARP_SHARE = 2.5, 0.05
# A gradient of which rounding moves more than this is rounding: its sign is chance, and so is Adam's step.
_ALL_ROUNDING = 0.5


@dataclass(frozen=True)
class Spread:
    """One stage of runs that differ from the plain one by rounding alone.

    Attributes:
        stages: of these runs.
        most: beyond this relative difference rounding is no excuse, however much it moves: a share of a batch
            that is missing or counted twice is larger.
        size: what a difference is relative to.
        also_below: nor is a difference below this one by its largest element, relative to nothing.
        is_sharp: differences within the tolerance are judged too.
        factor: how many times what these runs differ is explained.
    """

    stages: Sequence[Captured]
    most: float
    size: Callable[[Tensor], float]
    also_below: float = 0.0
    is_sharp: bool = False
    factor: float = FACTOR

    def of(self, name: str, theirs: Tensor, kept: Tensor | None = None) -> float:
        """Return how far rounding moves a tensor of the plain run, relative to its size."""
        norm, element = self._moved(name, theirs, kept)
        part = theirs if kept is None else theirs[kept]
        return ratio(element if self.size is largest else norm, self.size(part))

    def explains(self, name: str, ours: Tensor, theirs: Tensor, kept: Tensor | None = None) -> bool:
        """Whether ours differs by no more than rounding moves theirs. `kept`: the elements to look at."""
        gap = (ours - theirs) if kept is None else (ours - theirs)[kept]
        size = self.size(theirs if kept is None else theirs[kept])
        relative = ratio(self.size(gap), size)
        is_near = relative <= self.most or largest(gap) <= self.also_below
        return is_near and self._covers(name, gap, theirs, kept, self.factor)

    def contradicts(
        self, name: str, ours: Tensor, theirs: Tensor, tolerance: float, kept: Tensor | None = None
    ) -> bool:
        """Whether ours, though within the tolerance, differs by more than rounding alone would have it."""
        gap = (ours - theirs) if kept is None else (ours - theirs)[kept]
        size = self.size(theirs if kept is None else theirs[kept])
        if not self.is_sharp or ratio(self.size(gap), size) <= SHARP_SHARE * tolerance:
            return False
        return not self._covers(name, gap, theirs, kept, SHARP_FACTOR)

    def _covers(self, name: str, gap: Tensor, theirs: Tensor, kept: Tensor | None, factor: float) -> bool:
        norm, element = self._moved(name, theirs, kept)
        return float(gap.norm()) <= factor * norm and largest(gap) <= factor * element

    def _moved(self, name: str, theirs: Tensor, kept: Tensor | None) -> tuple[float, float]:
        """The largest norm and element of what rounding does; 0 where that is not known for all runs."""
        norms, elements = [0.0], [0.0]
        for stage in self.stages:
            if name not in stage.holders:
                return 0.0, 0.0
            moved = stage.first(name).double() - theirs
            moved = moved if kept is None else moved[kept]
            norms.append(float(moved.norm()))
            elements.append(largest(moved))
        is_finite = all(map(math.isfinite, norms))
        return (max(norms), max(elements)) if is_finite else (0.0, 0.0)


@dataclass(frozen=True)
class Spreads:
    """The runs that show what rounding does, of which each comparison takes its stage."""

    runs: Sequence[CapturedRun]
    dtype: ArithmeticName

    def of_gradients(self, plain: CapturedRun) -> Spread:
        """Return what is left where all else cancels is compared with the model's largest gradient too."""
        below = SMALL_GRADIENT[self.dtype] * largest_gradient(plain)
        gradients = [run.gradients for run in self.runs]
        return Spread(gradients, MOST_EXPLAINED[self.dtype], largest, below, self._is_sharp, GRADIENT_FACTOR)

    def of(self, stage: Callable[[CapturedRun], Captured | None]) -> Spread:
        """Return the spread of parameters or averages between the runs."""
        stages = [captured for run in self.runs if (captured := stage(run)) is not None]
        return Spread(stages, MOST_EXPLAINED[self.dtype], _norm, is_sharp=self._is_sharp)

    def of_buffers(self) -> Spread:
        """Return the spread of buffers between the runs."""
        most = max(MOST_EXPLAINED[self.dtype], MOST_EXPLAINED_OF_STATE)
        return Spread([run.final_buffers for run in self.runs], most, _norm, is_sharp=self._is_sharp)

    @property
    def _is_sharp(self) -> bool:
        """In float32 the tolerances are: what operators sum inside of themselves rounds too."""
        return self.dtype != "float32"

    def find_noise(self, plain: CapturedRun) -> tuple[Noise, ...]:
        """Return the parameters whose gradient is small in the model, and rounding as measured."""
        largest_of_all, spread = largest_gradient(plain), self.of_gradients(plain)
        noise: list[Noise] = []
        for name in plain.gradients.holders:
            gradient = plain.gradients.first(name).double()
            size = largest(gradient)
            is_small = 0 < size < SMALL_GRADIENT[self.dtype] * largest_of_all
            if is_small and spread.of(name, gradient) > _ALL_ROUNDING:
                count, share = gradient.numel(), size / largest_of_all
                noise.append(Noise(name=name, left_out=count, elements=count, largest_gradient=share))
        return tuple(noise)


def _norm(tensor: Tensor) -> float:
    return float(tensor.norm())
