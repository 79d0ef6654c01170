"""Compare the tensors of a plan's run with those of the plain one: every rank's copy of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from spindle_cli.verify.captured import Captured, CapturedRun
from spindle_cli.verify.tally import Tally
from spindle_cli.verify.types import Check, Difference, Noise


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
    _compare(tally, plan.gradients, plain.gradients, noise, _by_largest)
    return tally.check()


def compare_noise(plan: CapturedRun, plain: CapturedRun, noise: Collection[str], floor: float) -> Check:
    """The gradients that are too small to tell from rounding: largest difference over the noise floor."""
    tally = Tally("gradients near zero", 1.0)
    others = plain.gradients.holders.keys() - set(noise)

    def over_floor(ours: Tensor, theirs: Tensor) -> float:
        return _largest(ours - theirs) / floor

    _compare(tally, plan.gradients, plain.gradients, others, over_floor)
    return tally.check()


def compare_final(
    plan: CapturedRun, plain: CapturedRun, left_out: Collection[str], tolerance: float
) -> Check:
    """Every parameter after the last step: norm of the difference over the norm."""
    tally = Tally("final parameters", tolerance)
    _compare(tally, plan.final, plain.final, left_out, _by_norm)
    return tally.check()


def find_noise(plain: CapturedRun, relative_floor: float) -> tuple[tuple[Noise, ...], float]:
    """The parameters whose gradients are not zero but below the noise floor, and the floor itself."""
    largest = {name: _largest(plain.gradients.first(name)) for name in plain.gradients.holders}
    largest_of_all = max(largest.values(), default=0.0)
    floor = relative_floor * largest_of_all
    found = [name for name, size in largest.items() if 0 < size < floor]
    return tuple(Noise(name=name, largest_gradient=largest[name] / largest_of_all) for name in found), floor


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
    relative: Callable[[Tensor, Tensor], float],
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
            for rank, ours in plan.copies(name):
                tally.add(_difference(name, f"rank {rank}", ours, theirs, relative))


def _difference(
    name: str, where: str, ours: Tensor, theirs: Tensor, relative: Callable[[Tensor, Tensor], float]
) -> Difference:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        problem = f"{_kind(ours)} under the plan, {_kind(theirs)} in plain PyTorch"
        return Difference(name=name, where=where, problem=problem)
    if torch.equal(ours, theirs):
        return Difference(name=name, where=where, relative=0.0)
    size = relative(ours.double(), theirs.double())
    if not math.isfinite(size):
        return Difference(name=name, where=where, problem="not finite, or not zero where plain PyTorch's is")
    return Difference(name=name, where=where, relative=size)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _bitwise(ours: Tensor, theirs: Tensor) -> float:
    """Called for what is not equal only; never zero, however large the rest of the tensor is."""
    return max(_by_norm(ours, theirs), math.ulp(0.0))


def _by_largest(ours: Tensor, theirs: Tensor) -> float:
    return _ratio(_largest(ours - theirs), _largest(theirs))


def _by_norm(ours: Tensor, theirs: Tensor) -> float:
    return _ratio(float((ours - theirs).norm()), float(theirs.norm()))


def _ratio(gap: float, size: float) -> float:
    if gap == 0:
        return 0.0
    return gap / size if size > 0 else math.inf


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
