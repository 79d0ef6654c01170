"""Gradients that are zero but for rounding, and the parameters that they move."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor

from spindle_cli.verify.comparing.captured import Captured, CapturedRun
from spindle_cli.verify.comparing.parameters import compare_copies
from spindle_cli.verify.comparing.sizes import (
    larger_gradient,
    largest,
    largest_gradient,
    noise_elements,
    ratio,
)
from spindle_cli.verify.comparing.tally import Tally
from spindle_cli.verify.rounding import FACTOR
from spindle_cli.verify.types import Check, Noise


def find_noise(plan: CapturedRun, plain: CapturedRun, relative_floor: float) -> tuple[Noise, ...]:
    """The parameters whose gradients are not zero but everywhere below the noise floor, in both runs."""
    largest_of_all = largest_gradient(plain)
    found: list[Noise] = []
    for name in plain.gradients.holders:
        gradient = larger_gradient(plan, plain, name)
        if 0 < largest(gradient) < relative_floor * largest_of_all:
            share = largest(gradient) / largest_of_all
            count = gradient.numel()
            found.append(Noise(name=name, left_out=count, elements=count, largest_gradient=share))
    return tuple(found)


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
