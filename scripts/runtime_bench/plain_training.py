"""One rank of plain PyTorch training on the same workload: DistributedDataParallel, or FSDP2 (`fully_shard`).

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... python -m runtime_bench.plain_training WORKLOAD ddp|fsdp2 STEPS
    OUT.json

As well as it can be written without Spindle: all tasks forward, one after another, then one backward over
their weighted sum, so that gradients are summed once per iteration, in buckets, while backward still runs.
(`no_sync` on all tasks but the last would let sums overlap with the last task's backward alone.) The next
batch is loaded in a thread.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from spindle_cli.training.batches import Batches
from spindle_cli.training.optimizing.optimizer import make_optimizer
from spindle_cli.workload.building.load import LoadedWorkload, load
from spindle_cli.workload.types import Task, Workload

# On the benchmark's link 1, 4 and 8 are alike, and torch's 25 is 15 % slower.
BUCKET_MB = 4

TaskBatches = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Step:
    """A step of one rank. `task_losses`: over its own half of each batch."""

    iteration_s: float
    task_losses: dict[str, float]


class AllTasks(nn.Module):
    """Every task of a workload, in one forward."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.tasks = nn.ModuleDict({task.name: module_of(task) for task in workload.tasks})
        self.weights = {task.name: task.weight for task in workload.tasks}

    def forward(self, batches: TaskBatches) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted total of the losses, and each of them."""
        losses = {name: module(**batches[name]) for name, module in self.tasks.items()}
        total = sum(self.weights[name] * loss for name, loss in losses.items())
        assert isinstance(total, Tensor)
        return total, {name: loss.detach() for name, loss in losses.items()}


def module_of(task: object) -> nn.Module:
    """A task's module; its loss has to be a mean, so that means over ranks are the whole batch's."""
    assert isinstance(task, Task) and task.reduction == "mean"
    return task.module


def ddp(model: AllTasks, loaded: LoadedWorkload) -> nn.Module:
    """Buckets that gradients are views of, and no buffers to broadcast."""
    del loaded
    return DistributedDataParallel(
        model,
        bucket_cap_mb=BUCKET_MB,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        static_graph=True,
    )


def fsdp2(model: AllTasks, loaded: LoadedWorkload) -> nn.Module:
    """Every operator sharded on its own, gathered once per iteration: memory is not what is compared here.

    What several tasks use would otherwise be given up after the first task's backward, and gathered again for
    the next one's.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, loaded.workload.operators) and next(module.parameters(), None) is not None:
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.set_reshard_after_backward(False)  # type: ignore[operator]  # fully_shard makes it an FSDPModule
    return model


def give_up_gathered(model: nn.Module) -> None:
    """After backward: the next forward gathers what the optimizer is about to change. Nothing with DDP."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


WRAPPERS = {"ddp": ddp, "fsdp2": fsdp2}


def batches_of(workload: Workload, seed: int, steps: int) -> Iterator[TaskBatches]:
    """This rank's part of every task's batch, one step ahead."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sources = {task.name: Batches(task, seed) for task in workload.tasks}

    def read(step: int) -> TaskBatches:
        size = {task.name: task.batch_size // world for task in workload.tasks}
        return {
            name: source.rows(step, rank * size[name], (rank + 1) * size[name])
            for name, source in sources.items()
        }

    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(read, 0)
        for step in range(steps):
            ready = ahead.result()
            if step + 1 < steps:
                ahead = reader.submit(read, step + 1)
            yield ready


def train(source: str, how: str, num_steps: int, begun: Path) -> list[Step]:
    """Train; what each step took, from its batch to its update. `begun`: a file to make after the first."""
    loaded = load(source)
    model = WRAPPERS[how](AllTasks(loaded.workload), loaded)
    optimizer = make_optimizer(loaded.train.choices[0], model.parameters())
    assert optimizer is not None
    steps: list[Step] = []
    begin = time.perf_counter()
    for batches in batches_of(loaded.workload, loaded.train.seed, num_steps):
        total, losses = model(batches)
        total.backward()
        give_up_gathered(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(time.perf_counter() - begin, as_numbers(losses)))
        if len(steps) == 1:
            begun.touch()
        begin = time.perf_counter()
    return steps


def begun_path(out: Path) -> Path:
    """A file that is there from the first step on, of a rank that writes its steps to `out`."""
    return out.with_suffix(".begun")


def as_numbers(losses: Mapping[str, Tensor]) -> dict[str, float]:
    """By task."""
    return {name: float(loss) for name, loss in losses.items()}


def main() -> None:
    """Entry point of a rank."""
    source, how, num_steps, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = train(source, how, int(num_steps), begun_path(Path(out)))
    Path(out).write_text(json.dumps([asdict(step) for step in steps]), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
