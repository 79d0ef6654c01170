"""Compare the tensors of a plan's run with those of the plain one: every rank's copy of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from spindle_cli.verify.captured import Captured, CapturedRun
from spindle_cli.verify.tally import Tally
from spindle_cli.verify.types import SMALL_ELEMENT, Check, Difference, Noise, What

FINAL: What = "final parameters"
AVERAGE: What = "average of the weights"
# From a name and the plan's and the plain run's tensors, as doubles, to the relative difference.
Measure = Callable[[str, Tensor, Tensor], float]


def compare_initial(plan: CapturedRun, plain: CapturedRun, unused: Collection[str]) -> Check:
    """Every parameter before the first step, bit for bit."""
    tally = Tally("initial parameters", 0.0)
    _compare(tally, plan.initial, plain.initial, unused, _bitwise)
    return tally.check()


def compare_gradients(
    plan: CapturedRun, plain: CapturedRun, noise: Collection[str], tolerance: float
) -> Check:
    """The first step's gradients after the sums: largest difference over the tensor's largest element."""
    tally = Tally("gradients of step 1", tolerance)
    _compare(tally, plan.gradients, plain.gradients, noise, _over_largest)
    return tally.check()


def compare_noise(plan: CapturedRun, plain: CapturedRun, noise: Collection[str], floor: float) -> Check:
    """The gradients that are too small to tell from rounding: largest difference over the noise floor."""
    tally = Tally("gradients near zero", 1.0)
    others = plain.gradients.holders.keys() - set(noise)

    def over_floor(_name: str, ours: Tensor, theirs: Tensor) -> float:
        return _largest(ours - theirs) / floor

    _compare(tally, plan.gradients, plain.gradients, others, over_floor)
    return tally.check()


def compare_final(
    plan: CapturedRun, plain: CapturedRun, left_out: Collection[str], tolerance: float
) -> tuple[Check, tuple[Noise, ...]]:
    """Every parameter after the last step: see `_compare_trained`."""
    return _compare_trained(FINAL, plan, plain, (plan.final, plain.final), left_out, tolerance)


def compare_average(
    plan: CapturedRun, plain: CapturedRun, left_out: Collection[str], tolerance: float
) -> tuple[Check, ...]:
    """The average of every parameter after the last step, where the runs keep one: see `_compare_trained`."""
    if plan.average is None or plain.average is None:
        return ()
    both = (plan.average, plain.average)
    check, _ = _compare_trained(AVERAGE, plan, plain, both, left_out, tolerance)
    return (check,)


def _compare_trained(
    what: What,
    plan: CapturedRun,
    plain: CapturedRun,
    stages: tuple[Captured, Captured],
    left_out: Collection[str],
    tolerance: float,
) -> tuple[Check, tuple[Noise, ...]]:
    """Norm of the difference over the norm, of a stage of both runs.

    A tensor that is beyond the tolerance is compared once more without the elements whose gradient was small
    but not zero; where that makes the difference, they are in the second result.
    """
    tally = Tally(what, tolerance)
    noise: dict[str, Noise] = {}

    def relative(name: str, ours: Tensor, theirs: Tensor) -> float:
        whole = _by_norm(ours, theirs)
        if whole <= tolerance or name not in plain.gradients.holders:
            return whole
        gradient = _larger_gradient(plan, plain, name)
        small = (gradient > 0) & (gradient < SMALL_ELEMENT * gradient.max())
        rest = _by_norm(ours[~small], theirs[~small])
        if rest <= tolerance:
            noise[name] = Noise(
                name=name,
                left_out=int(small.sum()),
                elements=small.numel(),
                largest_gradient=float(gradient[small].max()) / largest_of_all,
            )
        return rest

    largest_of_all = largest_gradient(plain)
    _compare(tally, *stages, left_out, relative)
    return tally.check(), tuple(noise.values())


def compare_buffers(plan: CapturedRun, plain: CapturedRun, tolerance: float) -> Check:
    """Every rank's copy of every buffer after the last step: norm of the difference over the norm.

    Left out is a buffer that no rank holds, as no operator uses it, and that plain training leaves as it was.
    """
    before, after = plain.initial_buffers, plain.final_buffers
    left_out = [
        name
        for name in after.holders
        if name not in plan.final_buffers.holders and torch.equal(before.first(name), after.first(name))
    ]

    def relative(_name: str, ours: Tensor, theirs: Tensor) -> float:
        return _by_norm(ours, theirs)

    tally = Tally("buffers", tolerance)
    _compare(tally, plan.final_buffers, plain.final_buffers, left_out, relative)
    return tally.check()


def largest_change(changed: CapturedRun, plain: CapturedRun, left_out: Collection[str]) -> float:
    """The largest norm-wise relative difference of two plain runs' final parameters."""
    names = plain.final.holders.keys() - set(left_out)
    pairs = ((changed.final.first(name).double(), plain.final.first(name).double()) for name in names)
    return max((_by_norm(ours, theirs) for ours, theirs in pairs), default=0.0)


def find_noise(plan: CapturedRun, plain: CapturedRun, relative_floor: float) -> tuple[Noise, ...]:
    """The parameters whose gradients are not zero but everywhere below the noise floor, in both runs."""
    largest_of_all = largest_gradient(plain)
    found: list[Noise] = []
    for name in plain.gradients.holders:
        gradient = _larger_gradient(plan, plain, name)
        if 0 < _largest(gradient) < relative_floor * largest_of_all:
            share = _largest(gradient) / largest_of_all
            count = gradient.numel()
            found.append(Noise(name=name, left_out=count, elements=count, largest_gradient=share))
    return tuple(found)


def _larger_gradient(plan: CapturedRun, plain: CapturedRun, name: str) -> Tensor:
    """Element by element, the larger of both runs' first gradients in magnitude: zero only where both are."""
    theirs = plain.gradients.first(name).double().abs()
    if name not in plan.gradients.holders:
        return theirs
    ours = plan.gradients.first(name).double().abs()
    return torch.maximum(ours, theirs) if ours.shape == theirs.shape else theirs


def largest_gradient(plain: CapturedRun) -> float:
    """The largest element of all gradients of the plain run's first step."""
    return max((_largest(plain.gradients.first(name)) for name in plain.gradients.holders), default=0.0)


def find_unused(plan: CapturedRun, plain: CapturedRun) -> tuple[str, ...]:
    """The parameters that no rank holds and that plain training has given no gradient and not changed."""
    return tuple(
        name
        for name in plain.initial.holders
        if name not in plan.initial.holders
        and name not in plain.gradients.holders
        and torch.equal(plain.initial.first(name), plain.final.first(name))
    )


def _compare(
    tally: Tally,
    plan: Captured,
    plain: Captured,
    left_out: Collection[str],
    relative: Measure,
) -> None:
    """Add every copy that the plan's run has of every tensor of either run, but those left out."""
    for name in sorted({*plan.holders, *plain.holders} - set(left_out)):
        if name not in plain.holders:
            where = f"rank {plan.holders[name][0]}"
            tally.add(Difference(name=name, where=where, problem="missing in plain PyTorch's run"))
        elif name not in plan.holders:
            tally.add(Difference(name=name, where="every rank", problem="missing in the plan's run"))
        else:
            theirs = plain.first(name)
            for where, ours in plan.copies(name):
                tally.add(_difference(name, where, ours, theirs, relative))


def _difference(name: str, where: str, ours: Tensor, theirs: Tensor, relative: Measure) -> Difference:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        problem = f"{_kind(ours)} under the plan, {_kind(theirs)} in plain PyTorch"
        return Difference(name=name, where=where, problem=problem)
    if torch.equal(ours, theirs):
        return Difference(name=name, where=where, relative=0.0)
    size = relative(name, ours.double(), theirs.double())
    if not math.isfinite(size):
        return Difference(name=name, where=where, problem="not finite, or not zero where plain PyTorch's is")
    return Difference(name=name, where=where, relative=size)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _bitwise(_name: str, ours: Tensor, theirs: Tensor) -> float:
    """Called for what is not equal only; never zero, however large the rest of the tensor is."""
    return max(_by_norm(ours, theirs), math.ulp(0.0))


def _over_largest(_name: str, ours: Tensor, theirs: Tensor) -> float:
    return _ratio(_largest(ours - theirs), _largest(theirs))


def _by_norm(ours: Tensor, theirs: Tensor) -> float:
    return _ratio(float((ours - theirs).norm()), float(theirs.norm()))


def _ratio(gap: float, size: float) -> float:
    if gap == 0:
        return 0.0
    return gap / size if size > 0 else math.inf


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
