"""Trains the same steps in plain PyTorch, in one process: what a plan's run is compared with.

`verify/plain_process.py` is the process. It shares no code with the runtime: the user's modules are called as
they are, their weighted losses are added, and one `backward` and one optimizer step follow.

What a workload does to parameters beside the optimizer is done as somebody would write it; which tasks a step
runs is worked out a second time, from docs/training-settings.md; the loss scale is torch's own `GradScaler`.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.errors import WorkloadError
from spindle_cli.files.request import CaptureStage, RunRequest, capture_path
from spindle_cli.files.run_files import METRICS_FILE, StepMetrics
from spindle_cli.files.runs.records import append_evaluation
from spindle_cli.plan.types import Plan
from spindle_cli.process.lifetime import die_with_parent
from spindle_cli.process.worker_session import worker_session
from spindle_cli.training.data.reading import LoaderWorkers, first_samples, open_batches
from spindle_cli.training.precision import (
    compute_convolutions_in_float32,
    computing_as_asked,
    convert_module,
    set_matmul_precision,
)
from spindle_cli.training.watch import Watch
from spindle_cli.verify.counted import CountedLoss, counted_losses
from spindle_cli.verify.evaluated import evaluate_all
from spindle_cli.verify.flow import run_flow
from spindle_cli.verify.rounding import ROUNDING_FLAG, RoundingNoise, noise_of_gradients
from spindle_cli.verify.stepping.arithmetic import Arithmetic, convert, float32_copies, move_to
from spindle_cli.verify.stepping.islands import mean_metrics, outer_steps_of, request_of_island
from spindle_cli.verify.stepping.named import as_real, buffer_places, buffers_at, parameters_by_name
from spindle_cli.verify.stepping.operator_noise import OPERATOR_NOISE_FLAG, OperatorNoise
from spindle_cli.verify.stepping.update import Averaging, make_optimizers, make_schedule, weights_at
from spindle_cli.verify.types import NOISE_FLOOR
from spindle_cli.workload.arguments import call_forward
from spindle_cli.workload.building.load import LoadedWorkload, load
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import root_of
from spindle_cli.workload.settings.types import Lengths
from spindle_cli.workload.settings.updates import LossScaleSettings
from spindle_cli.workload.step_values import StepValues
from spindle_cli.workload.types import Constraint, FlowTask, Task, Workload


def train(request: RunRequest, noise: RoundingNoise | OperatorNoise | None = None) -> None:
    """Train `request.steps` steps; leave metrics.jsonl in `run_dir`, and what `verify` compares in
    `capture_dir`. With `noise`, gradients are changed by it before every step, or what operators give.

    Raises:
        InputError: the workload cannot be loaded.
        WorkloadError: a task's loss is not a scalar, or chance takes part in it.
    """
    assert request.steps is not None and request.capture_dir is not None
    torch.set_num_threads(request.threads)
    requests = [request_of_island(request, number) for number in range(request.islands)]
    trainings = [PlainTraining(of_island, noise) for of_island in requests]
    held = [buffer_places(training.workload) for training in trainings]
    for training, buffers in zip(trainings, held, strict=True):
        training.write("initial", training.parameters)
        training.write("initial-buffers", buffers_at(buffers))
    outer_steps = outer_steps_of(
        trainings[0].train, request.outer_every, [training.parameters for training in trainings]
    )
    with (request.run_dir / METRICS_FILE).open("w", encoding="utf-8") as metrics:
        for step in range(request.steps):
            metrics.write(mean_metrics([training.step(step) for training in trainings]).to_line())
            if outer_steps is not None:
                outer_steps.after(step + 1)
    for training, buffers in zip(trainings, held, strict=True):
        training.write("gradients", training.first_gradients)
        training.write("final", training.parameters)
        if training.average is not None:
            training.write("average", training.average.values(training.parameters))
        training.write("final-buffers", buffers_at(buffers))
    trainings[0].evaluate()


class PlainTraining:
    """A workload, and what steps it.

    Attributes:
        train: its settings.
        workload: whose modules are trained in place.
        parameters: by name.
        first_gradients: of each parameter, the first that it has had, in a step that was not skipped.
        average: of the weights, where the train settings ask for it.
    """

    def __init__(self, request: RunRequest, noise: RoundingNoise | OperatorNoise | None) -> None:
        """Raises what `train` raises of a workload that cannot be loaded."""
        loaded = load(request.workload)
        self._request, self._noise, self._train = request, noise, loaded.train
        self.train = loaded.train
        self.workload = loaded.workload
        set_matmul_precision(loaded.train)
        compute_convolutions_in_float32()
        memo = None if request.memo is None else AnalysisMemo.read(request.memo)
        lengths = Plan.read(request.plan).workload.lengths
        self._arithmetic = Arithmetic.of(request, loaded.train)
        self._counted = counted_losses(self.workload, request.workload, memo, lengths, self._arithmetic)
        move_to(self.workload, self._arithmetic.device, self._arithmetic.dtype)
        self.parameters = parameters_by_name(self.workload)
        self._values = StepValues.of(self.workload)
        self._values.begin(0)
        self._watch = Watch.of(self.workload)
        self._step = 0
        self.first_gradients: dict[str, Tensor] = {}
        self._gradient_noise = noise_of_gradients(noise, request.dtype, loaded.train.precision)
        self._make_steppers(loaded)
        self._open_data(lengths)

    def _make_steppers(self, loaded: LoadedWorkload) -> None:
        if self._arithmetic.widens_gradients:
            for parameter in self.parameters.values():
                if parameter.is_floating_point():
                    parameter.grad_dtype = torch.float32
        copies = self._arithmetic.has_copies
        self._stepped = float32_copies(self.parameters) if copies else self.parameters
        self._declared = Declared.of(self.workload, self.parameters, self._stepped)
        made = make_optimizers(loaded, self._stepped)
        self._optimizers = list(made.values())
        self._schedules = [make_schedule(self._train, optimizer, group) for group, optimizer in made.items()]
        settings = self._arithmetic.scaling
        self._scaling = None if settings is None else Scaling(settings, self._arithmetic.device)
        if settings is not None:  # a schedule counts steps that were left out too
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        self.average = Averaging.of(self._train, self._stepped)

    def _open_data(self, lengths: Lengths) -> None:
        loader = self._train.loader
        workers = LoaderWorkers(lambda _: die_with_parent())
        self._batches = {
            task.name: open_batches(
                task, self._train.seed, loader.of(task.name), workers, varies=task.name in lengths
            )
            for task in self.workload.tasks
        }
        for task in self.workload.tasks:
            first_samples(task, 1)  # what their batches are to forward, which loader workers would keep
        self._steps_of = dict.fromkeys(self._batches, 0)

    def step(self, step: int) -> StepMetrics:
        """Train one step, counted from 0.

        Raises:
            WorkloadError: a task's loss is not a scalar, or chance takes part in it.
        """
        began = perf_counter()
        before = generator_states(self._arithmetic.device)
        weights = weights_at(self._train, self.workload.tasks, step)
        self._step = step
        self._watch.check(step)
        self._values.begin(step)
        self._declared.follow("before_forward", step)
        self._watch.record_buffers()
        losses = {
            task.name: self._backward(task, weights[task.name])
            for task in self.workload.tasks
            if runs_at(self._train, task.name, step)
        }
        if not self._request.no_randomness:
            require_no_chance(self.workload, before, self._arithmetic.device)
        scale = None if self._scaling is None else self._scaling.now
        first = {
            name: parameter.grad.clone() if scale is None else parameter.grad / scale
            for name, parameter in self.parameters.items()
            if parameter.grad is not None and name not in self.first_gradients
        }
        if self._gradient_noise is not None:
            self._gradient_noise.add_to(self.parameters.values())
        clipping = self._train.clip_norm, self._train.clip_value
        skipped = step_parameters(
            self.parameters,
            self._stepped,
            self._optimizers,
            clipping,
            self._scaling,
            self._declared.constrain,
        )
        self._declared.follow("after_update", step)
        self._watch.record_buffers()
        if not skipped:
            self.first_gradients |= first
        for schedule in self._schedules:
            if schedule is not None:
                schedule.step()
        if self.average is not None:
            self.average.update(step + 1)
        return step_metrics(weights, step, losses, perf_counter() - began, (scale, skipped))

    def write(self, stage: CaptureStage, tensors: Mapping[str, Tensor]) -> None:
        """Leave tensors where `verify` finds them."""
        assert self._request.capture_dir is not None
        write_tensors(self._request.capture_dir, stage, tensors)

    def evaluate(self) -> None:
        """Leave an evaluation of every task that has a dataset for it, after the last step."""
        request, arithmetic = self._request, self._arithmetic
        requested_dtype = None if request.dtype is None else arithmetic.dtype
        device, dtype = arithmetic.device, arithmetic.dtype
        for task in self.workload.evaluated:
            convert_module(root_of(task), device, dtype)

        def fields(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: convert(field, device, dtype) for name, field in batch.items()}

        @contextmanager
        def computing() -> Iterator[None]:
            with (
                computing_as_asked(requested_dtype, no_randomness=request.no_randomness),
                self._rounding_again(),
                arithmetic.computing(),
            ):
                yield

        steps = request.steps or 0
        for evaluation in evaluate_all(self.workload, self._train.seed, steps, fields, computing):
            append_evaluation(request.run_dir, evaluation)

    def _backward(self, task: Task | FlowTask, weight: float) -> float:
        """Add a task's gradients, of its next batches; its loss."""
        name, count, counted = task.name, self._train.accumulate, self._counted.get(task.name)
        first = self._steps_of[name] * count
        self._steps_of[name] += 1
        # Islands take one of these batches each, in their order.
        numbers = [(first + k) * self._request.islands + self._request.island for k in range(count)]
        taken = [self._batches[name].rows(number, 0, task.batch_size) for number in numbers]
        if counted is not None:
            counted.fit(taken)
        requested_dtype = None if self._request.dtype is None else self._arithmetic.dtype
        self._watch.check(self._step)
        with (
            computing_as_asked(requested_dtype, no_randomness=self._request.no_randomness),
            self._rounding_again(),
        ):
            loss = backward(task, taken, self._arithmetic, counted, weight, self._scaling)
        self._watch.record()
        return loss

    def _rounding_again(self) -> AbstractContextManager[object]:
        """Return what passes run in where operators are to round once more."""
        return self._noise.in_passes() if isinstance(self._noise, OperatorNoise) else nullcontext()


def backward(
    task: Task | FlowTask,
    batches: Sequence[Mapping[str, Tensor]],
    arithmetic: Arithmetic,
    counted: CountedLoss | None,
    weight: float,
    scaling: Scaling | None = None,
) -> float:
    """Add the gradients of a task's weighted loss on a step's batches, times what losses are scaled by.

    Args:
        batches: as the dataset gives them.
        weight: of the loss in the step's total.
        counted: where the loss is a mean over what counts, which is one mean for all of these.

    Returns:
        The loss, unweighted.
    """
    device, dtype = arithmetic.device, arithmetic.dtype

    def fields(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: convert(field, device, dtype) for name, field in batch.items()}

    total, call = 0.0, partial(loss_of, task)
    parts: Sequence[Callable[[], Tensor]]
    if counted is not None:
        with arithmetic.computing():
            parts = counted.parts([fields(batch) for batch in batches], call)
    else:
        parts = [partial(lambda batch: call(fields(batch)), batch) for batch in batches]
    for part in parts:
        with arithmetic.computing():
            loss = part()
        if counted is None and task.reduction == "mean":
            loss = loss / len(batches)
        total += float(loss.detach())
        weighted = loss * weight
        scaled = weighted if scaling is None else scaling.scale(weighted)
        scaled.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return total


def step_parameters(
    parameters: Mapping[str, nn.Parameter],
    stepped: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    clipping: tuple[float | None, float | None],
    scaling: Scaling | None = None,
    constrain: Callable[[], None] = lambda: None,
) -> bool | None:
    """One update from the parameters' gradients, which are forgotten. `stepped`: what the optimizers step.
    `clipping`: by norm, and by value. `constrain`: what is done to it behind the optimizers.

    Returns:
        Whether it was left out as a gradient has overflowed; None where losses are not scaled.
    """
    skipped = None if scaling is None else scaling.unscale(optimizers)
    if stepped is not parameters:
        _move_gradients(parameters, stepped)
    by_norm, by_value = clipping
    if by_norm is not None:
        nn.utils.clip_grad_norm_(stepped.values(), by_norm)
    if by_value is not None:
        nn.utils.clip_grad_value_(stepped.values(), by_value)
    if scaling is not None:
        scaling.step()
    for optimizer in optimizers:
        if scaling is None:
            optimizer.step()
        optimizer.zero_grad()
    constrain()
    if stepped is not parameters:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(stepped[name])
    return skipped


def _move_gradients(parameters: Mapping[str, nn.Parameter], copies: Mapping[str, nn.Parameter]) -> None:
    """Give the gradients of parameters to copies of them, in the copies' numbers."""
    for name, parameter in parameters.items():
        copy = copies[name]
        copy.grad = None if parameter.grad is None else parameter.grad.to(copy.dtype)
        parameter.grad = None


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a workload on a device draws from: the processor's, and on
    CUDA all devices'.
    """
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if device.type == "cuda" else ())]


def require_no_chance(workload: Workload, before: Sequence[Tensor], device: torch.device) -> None:
    """Refuse a workload that has drawn random numbers on a device since the states `before` were taken.

    Raises:
        WorkloadError: it has; no two runs would draw the same, so that nothing could be compared.
    """
    if all(map(torch.equal, before, generator_states(device))):
        return
    names = sorted(
        {
            type(module).__name__
            for task in workload.tasks
            for module in root_of(task).modules()
            if "Dropout" in type(module).__name__ or _has_dropout(module)
        }
    )
    where = f" ({', '.join(names)})" if names else ""
    raise WorkloadError(
        f"workload {workload.name!r} draws random numbers while it trains{where}; "
        "no two runs draw the same, so there is nothing to compare",
        hint="--no-randomness lets both runs draw nothing: dropout drops nothing, other draws are means.",
    )


def _has_dropout(module: nn.Module) -> bool:
    """Whether a module has a rate of dropout as a number, as attention and recurrent layers do."""
    rate = getattr(module, "dropout", 0.0)
    return isinstance(rate, float) and rate > 0


def loss_of(task: Task | FlowTask, batch: Mapping[str, Tensor]) -> Tensor:
    """Return a task's scalar loss on its batch.

    Raises:
        WorkloadError: it returns something else.
    """
    output = run_flow(task, batch) if isinstance(task, FlowTask) else call_forward(task, batch)
    loss = output["loss"] if isinstance(output, dict) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise WorkloadError(f"task {task.name!r}: its loss is not a scalar tensor")
    return loss


def step_metrics(
    weights: Mapping[str, float],
    step: int,
    losses: Mapping[str, float],
    iteration_s: float,
    scaled: tuple[float | None, bool | None] = (None, None),
) -> StepMetrics:
    """Return a line of metrics.jsonl; `step` counted from 0. `scaled`: the loss scale, and whether the step
    was skipped.
    """
    return StepMetrics(
        step=step + 1,
        loss=sum(weights[name] * loss for name, loss in losses.items()),
        task_losses=dict(losses),
        iteration_s=iteration_s,
        loss_scale=scaled[0],
        skipped=scaled[1],
    )


def write_tensors(capture_dir: Path, stage: CaptureStage, tensors: Mapping[str, Tensor]) -> None:
    """Write copies of named tensors where `verify` finds them, as rank 0's."""
    copies = {
        name: as_real(tensor.detach()).to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    save_file(copies, capture_path(capture_dir, stage, 0))


def main() -> None:
    """Entry point of the process."""
    request = RunRequest.read(Path(sys.argv[1]))
    with worker_session(request.run_dir, rank=0):
        train(request, _noise(sys.argv[2:], request))


def _noise(flags: Sequence[str], request: RunRequest) -> RoundingNoise | OperatorNoise | None:
    if OPERATOR_NOISE_FLAG in flags:
        return OperatorNoise(int(flags[flags.index(OPERATOR_NOISE_FLAG) + 1]))
    if ROUNDING_FLAG not in flags:
        return None
    # Where numbers are as sharp as float64, it is also asked how far what is rounding alone can move values.
    return RoundingNoise(NOISE_FLOOR["float64"] if request.dtype == "float64" else 0.0)


@dataclass(frozen=True)
class Declared:
    """What is declared of a workload whose modules are trained in place. `stepped`: by the parameters' ids,
    what the optimizer steps in their place.
    """

    workload: Workload
    stepped: Mapping[int, nn.Parameter]

    @classmethod
    def of(
        cls,
        workload: Workload,
        parameters: Mapping[str, nn.Parameter],
        stepped: Mapping[str, nn.Parameter],
    ) -> Declared:
        """`stepped`: by the same names as `parameters`."""
        return cls(workload, {id(parameter): stepped[name] for name, parameter in parameters.items()})

    @torch.no_grad()
    def constrain(self) -> None:
        """The optimizer has made an update."""
        for constraint in self.workload.constraints:
            for parameter in _trained(constraint):
                stepped = self.stepped[id(parameter)]
                if constraint.clamp is not None:
                    stepped.clamp_(*constraint.clamp)
                elif constraint.unit_norm is not None:
                    stepped.copy_(nn.functional.normalize(stepped, dim=constraint.unit_norm))

    @torch.no_grad()
    def follow(self, when: str, step: int) -> None:
        """Ahead of the forward passes of a step, counted from 0, or behind its update."""
        for follows in self.workload.follows:
            if follows.when != when:
                continue
            decay = _number(follows.decay, step)
            slow, fast = (
                [followed] if isinstance(followed, nn.Parameter) else list(followed.parameters())
                for followed in (follows.slow, follows.fast)
            )
            for average, parameter in zip(slow, fast, strict=True):
                average.mul_(decay).add_(parameter, alpha=1 - decay)


def _number(decay: float | Callable[[int], float], step: int) -> float:
    return float(decay(step) if callable(decay) else decay)


def _trained(constraint: Constraint) -> Iterator[nn.Parameter]:
    parameters = [constraint.of] if isinstance(constraint.of, nn.Parameter) else constraint.of.parameters()
    yield from (parameter for parameter in parameters if parameter.requires_grad)


def runs_at(train: TrainSettings, task: str, step: int) -> bool:
    """Whether a step, counted from 0, runs a task."""
    sampling = train.sampling
    if sampling is None:
        return True
    if task in sampling.every:
        turns = sampling.every[task]
        return step in range(turns.offset, step + 1, turns.every)
    draw = sampling.draw
    if draw is None or task not in draw.weights:
        return True
    seed = train.seed if draw.seed is None else draw.seed
    number = int(hashlib.sha256(f"{seed}:{step}".encode()).hexdigest()[:16], 16) // 2048 / 9007199254740992
    names = sorted(draw.weights)
    flattened = [draw.weights[name] ** (1.0 / draw.temperature) for name in names]
    below = 0.0
    for name, weight in zip(names[:-1], flattened, strict=False):
        below += weight / sum(flattened)
        if number < below:
            return task == name
    return task == names[-1]


class Scaling:
    """Scales losses, and leaves out the updates of all optimizers where a gradient of any has overflowed.

    `GradScaler` by itself leaves out those of the optimizer alone whose gradients have: then some parameters
    would be a step ahead of others.
    """

    def __init__(self, settings: LossScaleSettings, device: torch.device) -> None:
        self._fixed = settings.init_scale if settings.fixed else None
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=settings.init_scale,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
        )
        self._unscaled: list[torch.optim.Optimizer] = []

    @property
    def now(self) -> float:
        """The scale of the step that is trained."""
        return self._scaler.get_scale()

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale."""
        return self._scaler.scale(loss)

    def unscale(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Take the scale out of the gradients of all optimizers; whether any has overflowed."""
        self._unscaled = [optimizer for optimizer in optimizers if _has_gradients(optimizer)]
        overflow_flags: list[Tensor] = []
        for optimizer in self._unscaled:
            self._scaler.unscale_(optimizer)
            overflow_flags.extend(self._scaler._found_inf_per_device(optimizer).values())
        overflowed = any(bool(flag.item()) for flag in overflow_flags)
        for flag in overflow_flags:
            flag.fill_(float(overflowed))
        return overflowed

    def step(self) -> None:
        """Update by all optimizers or none, and then the scale."""
        for optimizer in self._unscaled:
            self._scaler.step(optimizer)
        if self._unscaled:
            self._scaler.update(self._fixed)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
    )
