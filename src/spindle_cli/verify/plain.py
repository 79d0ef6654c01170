"""The same training in plain PyTorch, in one process: what a plan's run is compared with.

`python -m spindle_cli.verify.plain REQUEST.json [--rounding]`. It shares no code with the runtime: the user's
modules are called as they are, their weighted losses are added, and one `backward` and one optimizer step
follow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.request import CaptureStage, RunRequest, capture_path
from spindle_cli.run_files import METRICS_FILE, StepMetrics
from spindle_cli.verify.flow import root_of, run_flow
from spindle_cli.verify.rounding import ROUNDING_FLAG, RoundingNoise
from spindle_cli.worker_session import worker_session
from spindle_cli.workload.batches import Batches
from spindle_cli.workload.load import LoadedWorkload, load
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
    device = torch.device(request.device_type)
    dtype = None if request.dtype is None else getattr(torch, request.dtype)
    move_to(loaded.workload, device, dtype)
    parameters = parameters_by_name(loaded.workload)
    optimizer = make_optimizer(loaded, parameters)
    schedule = make_schedule(loaded, optimizer)
    batches = {task.name: Batches(task, loaded.train.seed) for task in loaded.workload.tasks}
    write_tensors(request.capture_dir, "initial", parameters)
    count = loaded.train.accumulate
    with (request.run_dir / METRICS_FILE).open("w", encoding="utf-8") as metrics:
        for step in range(request.steps):
            began = perf_counter()
            before = torch.get_rng_state()
            losses = {task.name: 0.0 for task in loaded.workload.tasks}
            for index in range(step * count, (step + 1) * count):
                for name, loss in backward(loaded.workload, batches, index, count, device, dtype).items():
                    losses[name] += loss
            require_no_chance(loaded.workload, before)
            if step == 0:
                gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
                write_tensors(request.capture_dir, "gradients", gradients)
            if noise is not None:
                noise.add_to(parameters.values())
            if loaded.train.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters.values(), loaded.train.clip_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
            metrics.write(step_metrics(loaded.workload, step, losses, perf_counter() - began).to_line())
    write_tensors(request.capture_dir, "final", parameters)


def backward(
    workload: Workload,
    batches: Mapping[str, Batches],
    index: int,
    count: int,
    device: torch.device,
    dtype: torch.dtype | None,
) -> dict[str, float]:
    """Add the gradients of every task's weighted loss on its batch number `index`, one of `count` in a step.

    Returns:
        What the batch adds to the step's losses, unweighted: of a mean, a share.
    """
    losses: dict[str, float] = {}
    for task in workload.tasks:
        batch = batches[task.name].rows(index, 0, task.batch_size)
        loss = loss_of(task, {name: convert(field, device, dtype) for name, field in batch.items()})
        if task.reduction == "mean":
            loss = loss / count
        losses[task.name] = float(loss.detach())
        (loss * task.weight).backward()  # type: ignore[no-untyped-call]
    return losses


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
        hint="Verify it with its dropout and random augmentation at zero.",
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
        root_of(task).to(device=device, dtype=dtype)


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


def make_optimizer(loaded: LoadedWorkload, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The train settings' optimizer over what is trained."""
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, loaded.train.optimizer)
    return make(trained, lr=loaded.train.lr, **loaded.train.optimizer_args)


def make_schedule(
    loaded: LoadedWorkload, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The train settings' learning-rate schedule, if they have one."""
    asked = loaded.train.schedule
    if asked is None:
        return None
    make: Callable[..., torch.optim.lr_scheduler.LRScheduler] = getattr(torch.optim.lr_scheduler, asked.name)
    return make(optimizer, **asked.arguments)


def step_metrics(
    workload: Workload, step: int, losses: Mapping[str, float], iteration_s: float
) -> StepMetrics:
    """A line of metrics.jsonl; `step` counted from 0."""
    total = sum(task.weight * losses[task.name] for task in workload.tasks)
    return StepMetrics(step=step + 1, loss=total, task_losses=dict(losses), iteration_s=iteration_s)


def write_tensors(capture_dir: Path, stage: CaptureStage, tensors: Mapping[str, Tensor]) -> None:
    """Write copies of named tensors where `verify` finds them, as rank 0's."""
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, capture_path(capture_dir, stage, 0))


def main() -> None:
    """Entry point of the process."""
    request = RunRequest.read(Path(sys.argv[1]))
    noise = RoundingNoise() if ROUNDING_FLAG in sys.argv[2:] else None
    with worker_session(request.run_dir, rank=0):
        train(request, noise)


if __name__ == "__main__":
    main()
