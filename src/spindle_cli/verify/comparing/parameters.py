"""Compare the tensors of a plan's run with those of the plain one: every rank's copy of each.

Gradients that are zero but for rounding, and the parameters that they move, are told apart from all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from spindle_cli.verify.comparing.captured import Captured, CapturedRun
from spindle_cli.verify.comparing.sizes import (
    Tally,
    by_norm,
    larger_gradient,
    largest,
    largest_gradient,
    noise_elements,
    ratio,
    small_elements,
)
from spindle_cli.verify.comparing.spread import Spread, Spreads
from spindle_cli.verify.rounding import FACTOR
from spindle_cli.verify.types import Check, Difference, Noise, What

GRADIENTS: What = "gradients of step 1"
FINAL: What = "final parameters"
AVERAGE: What = "average of the weights"
BUFFERS: What = "buffers"
# From a name and the plan's and the plain run's tensors, as doubles, to the relative difference.
Measure = Callable[[str, Tensor, Tensor], float]
# From a name to the elements that are compared with what rounding moves; None: all.
Kept = Callable[[str], Tensor | None]


def compare_initial(plan: CapturedRun, plain: CapturedRun, unused: Collection[str]) -> Check:
    """Return every parameter before the first step, bit for bit."""
    tally = Tally("initial parameters", 0.0)
    compare_copies(tally, plan.initial, plain.initial, unused, _bitwise)
    return tally.check()


def compare_gradients(
    plan: CapturedRun,
    plain: CapturedRun,
    noise: Collection[str],
    tolerance: float,
    spreads: Spreads | None = None,
) -> Check:
    """Return the first step's gradients after the sums: largest difference over the tensor's largest element.
    `spreads`: what rounding moves, where that is known.
    """
    tally = Tally(GRADIENTS, tolerance)
    spread = None if spreads is None else spreads.of_gradients(plain)
    compare_copies(tally, plan.gradients, plain.gradients, noise, _over_largest, spread)
    return tally.check()


def compare_final(
    plan: CapturedRun,
    plain: CapturedRun,
    left_out: Collection[str],
    tolerance: float,
    floor: float = 0.0,
    spreads: Spreads | None = None,
) -> tuple[Check, tuple[Noise, ...]]:
    """Return every parameter after the last step: see `_compare_trained`."""
    spread = None if spreads is None else spreads.of(lambda run: run.final)
    both = (plan.final, plain.final)
    return _compare_trained(FINAL, plan, plain, both, left_out, tolerance, floor, spread)


def compare_average(
    plan: CapturedRun,
    plain: CapturedRun,
    left_out: Collection[str],
    tolerance: float,
    floor: float = 0.0,
    spreads: Spreads | None = None,
) -> tuple[Check, ...]:
    """Return the average of every parameter after the last step, where the runs keep one: see
    `_compare_trained`.
    """
    if plan.average is None or plain.average is None:
        return ()
    spread = None if spreads is None else spreads.of(lambda run: run.average)
    both = (plan.average, plain.average)
    check, _ = _compare_trained(AVERAGE, plan, plain, both, left_out, tolerance, floor, spread)
    return (check,)


def _compare_trained(
    what: What,
    plan: CapturedRun,
    plain: CapturedRun,
    stages: tuple[Captured, Captured],
    left_out: Collection[str],
    tolerance: float,
    floor: float,
    spread: Spread | None,
) -> tuple[Check, tuple[Noise, ...]]:
    """Norm of the difference over the norm, of a stage of both runs.

    A tensor that is beyond the tolerance is compared once more without the elements whose gradient was not
    zero but below `floor` of the model's largest, and then without all whose gradient was small
    (`small_elements`); those that make the difference are in the second result. What is beyond it even then
    is compared with what rounding makes of the same elements, where that is known (`spread`).
    """
    tally = Tally(what, tolerance)
    noise: dict[str, Noise] = {}
    kept: dict[str, Tensor] = {}

    def relative(name: str, ours: Tensor, theirs: Tensor) -> float:
        whole = by_norm(ours, theirs)
        if whole <= tolerance or name not in plain.gradients.holders:
            return whole
        gradient = larger_gradient(plan, plain, name)
        rest = whole
        for small in small_elements(gradient, floor * largest_of_all):
            rest = by_norm(ours[~small], theirs[~small])
            kept[name] = ~small
            if rest <= tolerance:
                noise[name] = Noise(
                    name=name,
                    left_out=int(small.sum()),
                    elements=small.numel(),
                    largest_gradient=largest(gradient[small]) / largest_of_all,
                )
                break
        return rest

    largest_of_all = largest_gradient(plain)
    compare_copies(tally, *stages, left_out, relative, spread, kept.get)
    return tally.check(), tuple(noise.values())


def compare_buffers(
    plan: CapturedRun,
    plain: CapturedRun,
    tolerance: float,
    explained: Collection[str] = (),
    spreads: Spreads | None = None,
) -> Check:
    """Return every rank's copy of every buffer after the last step: norm of the difference over the norm.

    Left out is a buffer that no rank holds, as no operator uses it, and that plain training leaves as it was;
    and those that are compared with what rounding does to them (`explained`).
    """
    before, after = plain.initial_buffers, plain.final_buffers
    left_out = [
        name
        for name in after.holders
        if name not in plan.final_buffers.holders and torch.equal(before.first(name), after.first(name))
    ]

    def relative(_name: str, ours: Tensor, theirs: Tensor) -> float:
        return by_norm(ours, theirs)

    tally = Tally(BUFFERS, tolerance)
    spread = None if spreads is None else spreads.of_buffers()
    left_out += explained
    compare_copies(tally, plan.final_buffers, plain.final_buffers, left_out, relative, spread)
    return tally.check()


def largest_change(
    changed: CapturedRun, plain: CapturedRun, left_out: Collection[str], floor: float = 0.0
) -> float:
    """Return the largest norm-wise relative difference of two plain runs' final parameters, without elements
    whose gradient is below `floor` of the model's largest.
    """
    least = floor * largest_gradient(plain)

    def change(name: str) -> float:
        ours, theirs = changed.final.first(name).double(), plain.final.first(name).double()
        if name not in plain.gradients.holders:
            return by_norm(ours, theirs)
        kept = ~noise_elements(larger_gradient(changed, plain, name), least)
        return by_norm(ours[kept], theirs[kept])

    return max((change(name) for name in plain.final.holders.keys() - set(left_out)), default=0.0)


def find_unused(plan: CapturedRun, plain: CapturedRun) -> tuple[str, ...]:
    """The parameters that no rank holds and that plain training has given no gradient and not changed."""
    return tuple(
        name
        for name in plain.initial.holders
        if name not in plan.initial.holders
        and name not in plain.gradients.holders
        and torch.equal(plain.initial.first(name), plain.final.first(name))
    )


def compare_copies(
    tally: Tally,
    plan: Captured,
    plain: Captured,
    left_out: Collection[str],
    relative: Measure,
    spread: Spread | None = None,
    kept: Kept = lambda _name: None,
) -> None:
    """Add every copy that the plan's run has of every tensor of either run, but those left out. `spread`:
    what rounding makes of them, which explains differences of the elements that are `kept`.
    """
    for name in sorted({*plan.holders, *plain.holders} - set(left_out)):
        if name not in plain.holders:
            where = f"rank {plan.holders[name][0]}"
            tally.add(Difference(name=name, where=where, problem="missing in plain PyTorch's run"))
        elif name not in plan.holders:
            tally.add(Difference(name=name, where="every rank", problem="missing in the plan's run"))
        else:
            theirs = plain.first(name)
            for where, ours in plan.copies(name):
                difference = _difference(name, where, ours, theirs, relative)
                if spread is None or difference.relative is None:
                    tally.add(difference)
                else:
                    _judge(tally, difference, (ours.double(), theirs.double()), spread, kept(name))


def _judge(
    tally: Tally, difference: Difference, both: tuple[Tensor, Tensor], spread: Spread, kept: Tensor | None
) -> None:
    """Add a difference where it is known what rounding makes of the tensor."""
    name, (ours, theirs) = difference.name, both
    is_within = (difference.relative or 0.0) <= tally.tolerance
    contradicts = is_within and spread.contradicts(name, ours, theirs, tally.tolerance, kept)
    if is_within and not contradicts:
        tally.add(difference)
        return
    moved = spread.of(name, theirs, kept)
    told = difference.model_copy(update={"rounding": moved if math.isfinite(moved) else None})
    explained = not is_within and spread.explains(name, ours, theirs, kept)
    tally.add(told, 0.0 if contradicts else None, explained=explained)


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
    return max(by_norm(ours, theirs), math.ulp(0.0))


def _over_largest(_name: str, ours: Tensor, theirs: Tensor) -> float:
    return ratio(largest(ours - theirs), largest(theirs))


def find_noise(plan: CapturedRun, plain: CapturedRun, relative_floor: float) -> tuple[Noise, ...]:
    """The parameters whose gradients are not zero but everywhere below the noise floor, in both runs."""
    largest_of_all = largest_gradient(plain)
    noise: list[Noise] = []
    for name in plain.gradients.holders:
        gradient = larger_gradient(plan, plain, name)
        if 0 < largest(gradient) < relative_floor * largest_of_all:
            share = largest(gradient) / largest_of_all
            count = gradient.numel()
            noise.append(Noise(name=name, left_out=count, elements=count, largest_gradient=share))
    return tuple(noise)


def compare_noise(
    plan: CapturedRun, plain: CapturedRun, noise: Collection[str], relative_floor: float
) -> Check:
    """The gradients that are too small to tell from rounding: largest difference over the noise floor."""
    floor = relative_floor * largest_gradient(plain)
    tally = Tally("gradients near zero", 1.0)
    others = plain.gradients.holders.keys() - set(noise)

    def over_floor(_name: str, ours: Tensor, theirs: Tensor) -> float:
        return largest(ours - theirs) / floor

    compare_copies(tally, plan.gradients, plain.gradients, others, over_floor)
    return tally.check()


def compare_moved_by_noise(
    plan: CapturedRun,
    plain: CapturedRun,
    rounded: CapturedRun,
    tolerance: float,
    relative_floor: float,
    buffers: Collection[str] = (),
) -> tuple[Check, ...]:
    """The elements below the noise floor after the last step, and their averages where runs keep them; and
    these buffers, which may be made of such elements: a mean that a batch norm keeps of a layer with a bias.

    Their difference from the plain run's, over what there may be: `tolerance` of them, and `FACTOR` times
    what noise as large as the floor (`rounded`) has moved them. Nothing where there is nothing of all this.
    """
    floor = relative_floor * largest_gradient(plain)
    masks = {name: noise_elements(larger_gradient(plan, plain, name), floor) for name in _trained(plain)}
    masks = {name: mask for name, mask in masks.items() if bool(mask.any())}
    tally = Tally("values near zero gradients", 1.0)
    for ours, theirs, moved in _stages(plan, plain, rounded):

        def over_allowed(name: str, mine: Tensor, plains: Tensor, moved: Captured = moved) -> float:
            mask = masks[name]
            step = float((moved.first(name).double() - plains)[mask].norm())
            allowed = FACTOR * step + tolerance * float(plains[mask].norm())
            return ratio(float((mine - plains)[mask].norm()), allowed)

        others = {*ours.holders, *theirs.holders} - masks.keys()
        compare_copies(tally, ours, theirs, others, over_allowed)

    def over_moved(name: str, mine: Tensor, plains: Tensor) -> float:
        step = float((rounded.final_buffers.first(name).double() - plains).norm())
        return ratio(float((mine - plains).norm()), FACTOR * step + tolerance * float(plains.norm()))

    others = {*plan.final_buffers.holders, *plain.final_buffers.holders} - set(buffers)
    compare_copies(tally, plan.final_buffers, plain.final_buffers, others, over_moved)
    return (tally.check(),) if masks or buffers else ()


def _trained(plain: CapturedRun) -> list[str]:
    return [name for name in plain.gradients.holders if name in plain.final.holders]


def _stages(*runs: CapturedRun) -> Iterator[tuple[Captured, Captured, Captured]]:
    plan, plain, rounded = runs
    yield plan.final, plain.final, rounded.final
    if plan.average is not None and plain.average is not None and rounded.average is not None:
        yield plan.average, plain.average, rounded.average
