"""What is asked of `verify`, what it compares by, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.files.request import DtypeName
from spindle_cli.launch.types import RUNTIME_WORKER

# The dtype asked for, or the precision of the train settings.
ArithmeticName = Literal["float32", "float64", "bf16-autocast", "fp16-autocast", "bf16"]
DEFAULT_STEPS = 3
# What the plan's run and the plain one may differ by, relative to the size of what is compared: rounding
# alone.
TOLERANCE: dict[ArithmeticName, float] = {
    "float32": 1e-5,
    "float64": 1e-9,
    "bf16-autocast": 3e-2,
    "fp16-autocast": 8e-3,
    "bf16": 3e-2,
}
# The same for final parameters and their averages in float64. Rounding is 1e-16 of the largest gradient, and
# what it decides more of than this is left out (`SMALL_ELEMENT`) or measured (verify/rounding.py).
FINAL_TOLERANCE = 1e-12
# The same for gradients where layers are split: what each device rounds to few bits is summed and rounded
# again, in every split layer.
SPLIT_GRADIENT_TOLERANCE: dict[ArithmeticName, float] = {
    "bf16-autocast": 8e-2,
    "fp16-autocast": 2e-2,
    "bf16": 8e-2,
}
# And for what comes of them: a bias that began at 0 is after a few of Adam's steps little but their
# directions, of which elements with small gradients take the other one.
SPLIT_FINAL_TOLERANCE: dict[ArithmeticName, float] = {
    "bf16-autocast": 2e-1,
    "fp16-autocast": 5e-2,
    "bf16": 2e-1,
}
# Where a difference is beyond these, what rounding alone moves is measured (comparing/spread.py). It excuses
# no more than this: with low precision, what a value loses where most of it cancels.
MOST_EXPLAINED: dict[ArithmeticName, float] = {
    "float32": 1e-3,
    "float64": 0.0,
    "bf16-autocast": 2.5e-1,
    "fp16-autocast": 5e-2,
    "bf16": 2.5e-1,
}
# What is left where all else cancels may differ wholly: a gradient by this share of the model's largest. In
# float32 that is above the noise floor (below), which sums over many places are.
SMALL_GRADIENT: dict[ArithmeticName, float] = {
    "float32": 1e-5,
    "float64": 0.0,
    "bf16-autocast": 1e-2,
    "fp16-autocast": 2.5e-3,
    "bf16": 1e-2,
}
# Of buffers and evaluations rounding excuses more in float32. A running mean behind a layer with a bias is
# made of that bias, which Adam moves by full steps in a direction that rounding decides; a stale copy is
# further off.
MOST_EXPLAINED_OF_STATE = 5e-2
# A tensor whose gradients are all below this share of the model's largest may hold rounding noise and nothing
# else: a value that is zero by mathematics (an attention's key bias) comes out as the unit roundoff times
# what cancelled.
NOISE_FLOOR: dict[ArithmeticName, float] = {
    "float32": 1e-6,
    "float64": 1e-13,
    "bf16-autocast": 1e-2,
    "fp16-autocast": 2.5e-3,
    "bf16": 1e-2,
}
# A small gradient within a tensor: below this share of the tensor's largest. Rounding, some 1e-7 of the
# largest, is then more than 1e-4 of it, and of Adam's step.
SMALL_ELEMENT = 1e-3


@dataclass(frozen=True)
class VerifyOptions:
    """What the user asks of a verification; `worker_module` is the runtime under test."""

    steps: int = DEFAULT_STEPS
    dtype: DtypeName | None = None
    no_randomness: bool = False
    run_dir: Path | None = None
    worker_module: str = RUNTIME_WORKER


What = Literal[
    "initial parameters",
    "losses",
    "loss scales",
    "gradients of step 1",
    "gradients near zero",
    "values near zero gradients",
    "final parameters",
    "average of the weights",
    "buffers",
    "evaluations",
]


class Difference(Model):
    """One thing that differs between the plan's run and the plain one, or the largest difference of its kind.

    Attributes:
        name: of the parameter, or of the loss.
        where: 'rank 2', 'step 1'.
        relative: the difference over the size of what is compared; None where they cannot be compared.
        problem: then, what is wrong.
        rounding: what rounding alone moves in plain PyTorch, relative to the same size; None: not measured.
    """

    name: str
    where: str
    relative: Annotated[float, Field(ge=0)] | None = None
    problem: str | None = None
    rounding: Annotated[float, Field(ge=0)] | None = None

    def __str__(self) -> str:
        said = self.problem if self.relative is None else f"relative difference {self.relative:.2e}"
        if self.rounding is not None:
            said = f"{said} (plain PyTorch's own rounding: {self.rounding:.2e})"
        return f"{self.name} ({self.where}): {said}"


class Check(Model):
    """The result of one kind of comparison.

    Attributes:
        what: What is compared.
        compared: How many were.
        tolerance: Relative difference that is allowed.
        largest: The largest difference.
        failures: All that are beyond the tolerance.
        explained: Those beyond it, too, but not beyond what rounding alone moves in plain PyTorch.
    """

    what: What
    compared: int
    tolerance: float
    largest: Difference | None
    failures: tuple[Difference, ...]
    explained: tuple[Difference, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing is beyond the tolerance."""
        return not self.failures and self.compared > 0


class Noise(Model):
    """Elements of a parameter whose value is not compared, because their gradient is too close to zero.

    An optimizer that divides a gradient by its own size, as Adam does, turns the rounding in such a gradient
    into a step of full size: no two ways to sum agree on the value. The gradient itself is compared.

    Attributes:
        name: of the parameter.
        left_out, elements: how many of how many. All of them where the whole tensor is below the noise floor;
            else only if the tensor differs by more than the tolerance with them, and not without. In float64
            the values of those below the floor are compared with what noise alone does to them.
        largest_gradient: of those left out, in the plain run's first step, over the model's largest.
    """

    name: str
    left_out: int
    elements: int
    largest_gradient: float


class VerifyReport(Artifact):
    """The result of `spindle verify`, its document for `--json`.

    Attributes:
        same: Every check has passed.
        workload: The workload's name.
        strategy: Which strategy made the plan.
        workers: Workers of the run.
        steps: Steps that both runs trained.
        dtype: The arithmetic of both.
        no_randomness: Both runs drew nothing.
        checks: The comparisons.
        rounding: Where final parameters were beyond the tolerance, how far rounding alone moves them in plain
            PyTorch (verify/rounding.py); their check's tolerance then rests on it. None where not needed.
        islands: Groups of devices that train copies of the model, each of which is compared with a plain one.
        outer_every: After so many steps these average; null: there is one group of all devices.
        noise_floor: Relative to the model's largest gradient; see `Noise`.
        noise: Elements that are not compared, as their gradients are too close to zero.
        unused: Parameters that no operator uses; neither run changes them.
        draws: So often plain PyTorch was trained with operators that round once more
            (verify/comparing/spread.py), as differences were beyond the tolerances.
    """

    KIND: ClassVar[str] = "verify-report"

    schema_: Annotated[Literal["spindle.verify-report/1"], Field(alias="schema")] = "spindle.verify-report/1"
    same: bool
    workload: str
    strategy: str
    workers: int
    steps: int
    dtype: ArithmeticName
    no_randomness: bool = False
    checks: tuple[Check, ...]
    rounding: float | None = None
    islands: int = 1
    outer_every: int | None = None
    noise_floor: float
    noise: tuple[Noise, ...]
    unused: tuple[str, ...]
    draws: int = 0
