"""The same training in plain PyTorch, in one process: what a plan's run is compared with.

`python -m spindle_cli.verify.plain REQUEST.json [--rounding]`. It shares no code with the runtime: the user's
modules are called as they are, their weighted losses are added, and one `backward` and one optimizer step
follow.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.files.request import CaptureStage, RunRequest, capture_path
from spindle_cli.files.run_files import METRICS_FILE, StepMetrics
from spindle_cli.plan.types import Plan
from spindle_cli.process.parent_death import die_with_parent
from spindle_cli.process.worker_session import worker_session
from spindle_cli.verify.counted import CountedLoss, counted_losses
from spindle_cli.verify.flow import root_of, run_flow
from spindle_cli.verify.rounding import ROUNDING_FLAG, RoundingNoise
from spindle_cli.verify.stepping.due import runs_at
from spindle_cli.verify.stepping.update import Averaging, make_optimizers, make_schedule, weights_at
from spindle_cli.verify.types import NOISE_FLOOR
from spindle_cli.workload.building.load import load
from spindle_cli.workload.data.loaders import LoaderWorkers
from spindle_cli.workload.data.reading import StreamBatches, open_batches
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.memo import AnalysisMemo
from spindle_cli.workload.training.batches import Batches
from spindle_cli.workload.training.no_randomness import computing_as_asked
from spindle_cli.workload.training.precision import convert_module
from spindle_cli.workload.types import FlowTask, Task, Workload


def train(request: RunRequest, noise: RoundingNoise | None = None) -> None:
    """Train `request.steps` steps; leave metrics.jsonl in `run_dir`, and what `verify` compares in
    `capture_dir`. With `noise`, gradients are changed by it before every step.

    Raises:
        InputError: the workload cannot be loaded.
        WorkloadError: a task's loss is not a scalar, or chance takes part in it.
    """
    assert request.steps is not None and request.capture_dir is not None
    torch.set_num_threads(request.threads)
    loaded = load(request.workload)
    if loaded.train.float32_matmul is not None:
        torch.set_float32_matmul_precision(loaded.train.float32_matmul)
    memo = None if request.memo is None else AnalysisMemo.read(request.memo)
    lengths = Plan.read(request.plan).workload.lengths
    counted = counted_losses(loaded.workload, request.workload, memo, lengths)
    arithmetic = Arithmetic.of(request, loaded.train)
    move_to(loaded.workload, arithmetic.device, arithmetic.dtype)
    parameters = parameters_by_name(loaded.workload)
    if arithmetic.widens_gradients:
        for parameter in parameters.values():
            parameter.grad_dtype = torch.float32
    stepped = float32_copies(parameters) if arithmetic.has_copies else parameters
    optimizers = make_optimizers(loaded, stepped)
    schedules = [make_schedule(loaded.train, optimizer) for optimizer in optimizers]
    average = Averaging.of(loaded.train, stepped)
    loader = loaded.train.loader
    workers = LoaderWorkers(lambda _: die_with_parent())
    batches = {
        task.name: open_batches(
            task, loaded.train.seed, loader.of(task.name), workers, varies=task.name in lengths
        )
        for task in loaded.workload.tasks
    }
    held = buffer_places(loaded.workload)
    write_tensors(request.capture_dir, "initial", parameters)
    write_tensors(request.capture_dir, "initial-buffers", buffers_at(held))
    asked = None if request.dtype is None else arithmetic.dtype
    steps_of = dict.fromkeys(batches, 0)
    gradients: dict[str, Tensor] = {}  # of each parameter the first
    with (request.run_dir / METRICS_FILE).open("w", encoding="utf-8") as metrics:
        for step in range(request.steps):
            began = perf_counter()
            before = torch.get_rng_state()
            weights = weights_at(loaded.train, loaded.workload.tasks, step)
            losses: dict[str, float] = {}
            for task in loaded.workload.tasks:
                if not runs_at(loaded.train, task.name, step):
                    continue
                taken = _taken(batches[task.name], task, steps_of[task.name], loaded.train.accumulate)
                steps_of[task.name] += 1
                if task.name in counted:
                    counted[task.name].fit(taken)
                with computing_as_asked(asked, no_randomness=request.no_randomness):
                    losses[task.name] = backward(
                        task, taken, arithmetic, counted.get(task.name), weights[task.name]
                    )
            if not request.no_randomness:
                require_no_chance(loaded.workload, before)
            for name, parameter in parameters.items():
                if parameter.grad is not None and name not in gradients:
                    gradients[name] = parameter.grad.clone()
            if noise is not None:
                noise.add_to(parameters.values())
            step_parameters(parameters, stepped, optimizers, loaded.train.clip_norm)
            for schedule in schedules:
                if schedule is not None:
                    schedule.step()
            if average is not None:
                average.update(step + 1)
            metrics.write(step_metrics(weights, step, losses, perf_counter() - began).to_line())
    write_tensors(request.capture_dir, "gradients", gradients)
    write_tensors(request.capture_dir, "final", parameters)
    if average is not None:
        write_tensors(request.capture_dir, "average", average.values(parameters))
    write_tensors(request.capture_dir, "final-buffers", buffers_at(held))


def _taken(
    batches: Batches | StreamBatches, task: Task | FlowTask, step: int, count: int
) -> list[dict[str, Tensor]]:
    """The `count` batches of a task that its step number `step` takes, counted among those that run it."""
    return [batches.rows(step * count + number, 0, task.batch_size) for number in range(count)]


@dataclass(frozen=True)
class Arithmetic:
    """On which device and in which numbers to train.

    Attributes:
        dtype: what everything floating-point is converted to; None: nothing is.
        autocast: forward passes run in torch.autocast with bfloat16.
        has_copies: the optimizer steps float32 copies of the parameters, which are the copies rounded.
        widens_gradients: gradients are added up in float32, whatever the parameters are.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    autocast: bool = False
    has_copies: bool = False
    widens_gradients: bool = False

    @classmethod
    def of(cls, request: RunRequest, train: TrainSettings) -> Arithmetic:
        """A dtype that the request asks for goes before the train settings' precision."""
        device = torch.device(request.device_type)
        if request.dtype is not None:
            return cls(device, getattr(torch, request.dtype))
        if train.precision == "bf16":
            widens = train.reduce != "parameters"
            return cls(device, torch.bfloat16, has_copies=True, widens_gradients=widens)
        return cls(device, autocast=train.precision == "bf16-autocast")


def backward(
    task: Task | FlowTask,
    batches: Sequence[Mapping[str, Tensor]],
    arithmetic: Arithmetic,
    counted: CountedLoss | None,
    weight: float,
) -> float:
    """Add the gradients of a task's weighted loss on a step's batches.

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

    total = 0.0
    for some in [batches] if counted is not None else [[batch] for batch in batches]:
        with torch.autocast(device.type, torch.bfloat16, enabled=arithmetic.autocast):
            if counted is not None:
                loss = counted.of([fields(batch) for batch in some], lambda batch: loss_of(task, batch))
            else:
                loss = loss_of(task, fields(some[0]))
        if counted is None and task.reduction == "mean":
            loss = loss / len(batches)
        total += float(loss.detach())
        (loss * weight).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return total


def float32_copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """A copy of each parameter, by its name."""
    return {
        name: nn.Parameter(parameter.detach().to(torch.float32, copy=True), parameter.requires_grad)
        for name, parameter in parameters.items()
    }


def step_parameters(
    parameters: Mapping[str, nn.Parameter],
    stepped: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    clip_norm: float | None,
) -> None:
    """One update from the parameters' gradients, which are forgotten. `stepped`: what the optimizers step."""
    if stepped is not parameters:
        for name, parameter in parameters.items():
            stepped[name].grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
            parameter.grad = None
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(stepped.values(), clip_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if stepped is not parameters:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(stepped[name])


def require_no_chance(workload: Workload, before: Tensor) -> None:
    """Refuse a workload that has drawn random numbers since the state `before` was taken.

    Raises:
        WorkloadError: it has; no two runs would draw the same, so that nothing could be compared.
    """
    if torch.equal(before, torch.get_rng_state()):
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
    """A task's scalar loss on its batch.

    Raises:
        WorkloadError: it returns something else.
    """
    output = run_flow(task, batch) if isinstance(task, FlowTask) else task.module(**batch)
    loss = output["loss"] if isinstance(output, dict) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise WorkloadError(f"task {task.name!r}: its loss is not a scalar tensor")
    return loss


def convert(field: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """A batch field where and as the model wants it; only floating-point fields change their type."""
    return field.to(device, dtype if field.is_floating_point() else None)


def move_to(workload: Workload, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move every module, in place: parameters stay the objects that tasks share."""
    for task in workload.tasks:
        convert_module(root_of(task), device, dtype)


def parameters_by_name(workload: Workload) -> dict[str, nn.Parameter]:
    """Each distinct parameter once, as '<first task that has it>.<its dotted name there>'."""
    found: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    for task in workload.tasks:
        for name, parameter in root_of(task).named_parameters():
            if id(parameter) not in found:
                found[id(parameter)] = f"{task.name}.{name}"
                parameters[found[id(parameter)]] = parameter
    return parameters


def buffer_places(workload: Workload) -> dict[str, tuple[nn.Module, str]]:
    """Each distinct buffer once, named as parameters are: the module that holds it, and its name there."""
    places: dict[int, str] = {}
    found: dict[str, tuple[nn.Module, str]] = {}
    for task in workload.tasks:
        root = root_of(task)
        for name, buffer in root.named_buffers():
            if id(buffer) not in places:
                owner, _, attribute = name.rpartition(".")
                places[id(buffer)] = f"{task.name}.{name}"
                found[places[id(buffer)]] = (root.get_submodule(owner), attribute)
    return found


def buffers_at(places: Mapping[str, tuple[nn.Module, str]]) -> dict[str, Tensor]:
    """What the modules hold there now; complex numbers as pairs."""
    buffers = {name: getattr(module, attribute) for name, (module, attribute) in places.items()}
    return {
        name: torch.view_as_real(buffer) if buffer.is_complex() else buffer
        for name, buffer in buffers.items()
    }


def step_metrics(
    weights: Mapping[str, float], step: int, losses: Mapping[str, float], iteration_s: float
) -> StepMetrics:
    """A line of metrics.jsonl; `step` counted from 0."""
    total = sum(weights[name] * loss for name, loss in losses.items())
    return StepMetrics(step=step + 1, loss=total, task_losses=dict(losses), iteration_s=iteration_s)


def write_tensors(capture_dir: Path, stage: CaptureStage, tensors: Mapping[str, Tensor]) -> None:
    """Write copies of named tensors where `verify` finds them, as rank 0's."""
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, capture_path(capture_dir, stage, 0))


def main() -> None:
    """Entry point of the process."""
    request = RunRequest.read(Path(sys.argv[1]))
    # Where numbers are as sharp as float64, it is also asked how far what is rounding alone can move values.
    floor = NOISE_FLOOR["float64"] if request.dtype == "float64" else 0.0
    noise = RoundingNoise(floor) if ROUNDING_FLAG in sys.argv[2:] else None
    with worker_session(request.run_dir, rank=0):
        train(request, noise)


if __name__ == "__main__":
    main()
