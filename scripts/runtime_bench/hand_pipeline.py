"""One rank of a pipeline written by hand for `generalist-5`, to hold Spindle's plan against.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... python -m runtime_bench.hand_pipeline WORKLOAD STEPS OUT.json

The trunk is cut in two: its first layers are on host 1, the others on host 0, so that nothing is summed. The
heaviest encoder, vision, is on host 0, the others on host 1. Host 0 begins with what it sees, runs the second
half of each task forward and backward as its activations come in, and ends with vision's backward passes;
host 1 runs everything forward, then backward as gradients come. Receives are posted an iteration ahead,
nobody waits for what it sends, and hosts wait for each other only where they take something.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime_bench.plain_training import Step
from spindle_cli.training.batches import Batches
from spindle_cli.training.optimizing.optimizer import make_optimizer
from spindle_cli.workload.building.load import load
from spindle_cli.workload.types import FlowTask, Task, Workload
from spindle_cli.zoo.generalist import ENCODERS, GeneralistTask
from spindle_cli.zoo.senses import WIDTH

# Layers of the trunk on host 1; with vision on host 0 both compute about the same.
FIRST_LAYERS = 6
# Tasks in the order in which host 1 runs them: what it senses itself first.
ORDER = ("speaker", "topic", "sound", "scene", "object")
SEEN = "vision"


class Mail:
    """Messages to and from the other host: one value each way of a task's activation and its gradient."""

    def __init__(self, workload: Workload, rank: int) -> None:
        self.peer = 1 - rank
        self.shapes = {
            task.name: (task.batch_size, ENCODERS[model_of(task).sense].tokens, WIDTH)
            for task in workload.tasks
        }
        self.tags = {name: 4 * number for number, name in enumerate(self.shapes)}
        self.coming: dict[tuple[str, int], tuple[Tensor, dist.Work]] = {}
        self.going: list[tuple[Tensor, dist.Work]] = []

    def expect(self, task: str, kind: int) -> None:
        """Post a receive."""
        buffer = torch.empty(self.shapes[task])
        work = dist.irecv(buffer, self.peer, tag=self.tags[task] + kind)
        assert work is not None
        self.coming[task, kind] = buffer, work

    def take(self, task: str, kind: int, *, again: bool) -> Tensor:
        """What has come; the next one is expected at once if `again`."""
        buffer, work = self.coming.pop((task, kind))
        work.wait()
        if again:
            self.expect(task, kind)
        return buffer

    def send(self, task: str, kind: int, value: Tensor) -> None:
        """Start sending."""
        held = value.detach().contiguous()
        work = dist.isend(held, self.peer, tag=self.tags[task] + kind)
        assert work is not None
        self.going.append((held, work))

    def let_go(self) -> None:
        """Wait for what was sent an iteration ago."""
        for _, work in self.going:
            work.wait()
        self.going.clear()


# Kinds of messages: what is seen, to host 1; from the first half to the second; and the gradients of both.
SIGHT, HALFWAY, HALFWAY_GRADIENT, SIGHT_GRADIENT = range(4)


def model_of(task: Task | FlowTask) -> GeneralistTask:
    """A task's model."""
    assert isinstance(task, Task) and isinstance(task.module, GeneralistTask)
    return task.module


def through(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """A part of the trunk."""
    for layer in layers:
        x = layer(x)
    return x


class Part:
    """What a host runs."""

    def __init__(self, workload: Workload, rank: int) -> None:
        self.rank = rank
        self.modules = {task.name: model_of(task) for task in workload.tasks}
        self.seen = [name for name in ORDER if self.modules[name].sense == SEEN]
        trunk = next(iter(self.modules.values())).get_submodule("trunk.blocks")
        assert isinstance(trunk, nn.ModuleList)
        self.half = trunk[:FIRST_LAYERS] if rank == 1 else trunk[FIRST_LAYERS:]
        self.mail = Mail(workload, rank)
        self.taken = [(name, HALFWAY) for name in ORDER] + [(name, SIGHT_GRADIENT) for name in self.seen]
        if rank == 1:
            self.taken = [(name, SIGHT) for name in self.seen] + [(name, HALFWAY_GRADIENT) for name in ORDER]

    def parameters(self) -> list[nn.Parameter]:
        """Those that this host trains."""
        modules: list[nn.Module] = [self.half]
        for name, module in self.modules.items():
            if (name in self.seen) == (self.rank == 0):
                modules.append(self.encoder(name))
            if self.rank == 0:
                modules.append(module.get_submodule("loss"))
        return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))

    def encoder(self, name: str) -> nn.Module:
        """Of a task."""
        module = self.modules[name]
        return module.get_submodule(module.sense)

    def step_0(self, batches: dict[str, dict[str, Tensor]], *, again: bool) -> dict[str, float]:
        """Host 0's: the losses by task."""
        made, losses = {}, {}
        for name in self.seen:
            made[name] = self.encoder(name)(batches[name]["content"])
            self.mail.send(name, SIGHT, made[name])
        for name in ORDER:
            x = self.mail.take(name, HALFWAY, again=again).requires_grad_()
            loss = self.modules[name].get_submodule("loss")(through(self.half, x), batches[name]["label"])
            loss.backward()
            assert x.grad is not None
            self.mail.send(name, HALFWAY_GRADIENT, x.grad)
            losses[name] = loss.detach()
        for name in self.seen:
            made[name].backward(self.mail.take(name, SIGHT_GRADIENT, again=again))
        return {name: float(losses[name]) for name in self.modules}

    def step_1(self, batches: dict[str, dict[str, Tensor]], *, again: bool) -> dict[str, float]:
        """Host 1's; it has no losses."""
        made, seen = {}, {}
        for name in ORDER:
            if name in self.seen:
                x = seen[name] = self.mail.take(name, SIGHT, again=again).requires_grad_()
            else:
                x = self.encoder(name)(batches[name]["content"])
            made[name] = through(self.half, x)
            self.mail.send(name, HALFWAY, made[name])
        for name in ORDER:
            made[name].backward(self.mail.take(name, HALFWAY_GRADIENT, again=again))  # type: ignore[no-untyped-call]  # torch: untyped
            if name in self.seen:
                gradient = seen[name].grad
                assert gradient is not None
                self.mail.send(name, SIGHT_GRADIENT, gradient)
        return {}


def train(source: str, num_steps: int) -> list[Step]:
    """Train; what each step took, from its batch to its update."""
    loaded = load(source)
    rank = dist.get_rank()
    part = Part(loaded.workload, rank)
    optimizer = make_optimizer(loaded.train.choices[0], part.parameters())
    assert optimizer is not None
    run = part.step_0 if rank == 0 else part.step_1
    sources = {task.name: Batches(task, loaded.train.seed) for task in loaded.workload.tasks}
    sizes = {task.name: task.batch_size for task in loaded.workload.tasks}

    def read(step: int) -> dict[str, dict[str, Tensor]]:
        return {name: source.rows(step, 0, sizes[name]) for name, source in sources.items()}

    steps: list[Step] = []
    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(read, 0)
        for name, kind in part.taken:
            part.mail.expect(name, kind)
        begin = time.perf_counter()
        for step in range(num_steps):
            batches = ahead.result()
            is_last = step + 1 == num_steps
            if not is_last:
                ahead = reader.submit(read, step + 1)
            losses = run(batches, again=not is_last)
            part.mail.let_go()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(Step(time.perf_counter() - begin, losses))
            begin = time.perf_counter()
    return steps


def main() -> None:
    """Entry point of a rank."""
    source, num_steps, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = train(source, int(num_steps))
    Path(out).write_text(json.dumps([asdict(step) for step in steps]), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
