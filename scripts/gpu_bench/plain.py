"""The plain loop that a workload's training is compared with: how long a step of it takes on one device.

    python -m gpu_bench.plain WORKLOAD.yaml cuda|cpu STEPS [--trace TRACE.json.gz]

All tasks forward, one backward over their weighted sum, the workload's optimizer, autocast as its train
settings say; nothing else. Prints a probe's line with the median step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import nullcontext
from statistics import median

import torch
from runtime_bench.plain_training import AllTasks
from torch.profiler import ProfilerActivity, profile

from spindle_cli.training.batches import Batches
from spindle_cli.training.optimizing.optimizer import make_optimizer
from spindle_cli.workload.building.load import load

LEFT_OUT = 2
AUTOCAST = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}


def main() -> int:
    """Train, and print the time of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("steps", type=int)
    parser.add_argument("--trace", metavar="TRACE.json.gz")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    loaded = load(asked.workload)
    train = loaded.train
    torch.manual_seed(train.seed)
    model = AllTasks(loaded.workload).to(device)
    optimizer = make_optimizer(train.choices[0], model.parameters())
    assert optimizer is not None, "something is trained"
    batches = {task.name: Batches(task, train.seed) for task in loaded.workload.tasks}
    sizes = {task.name: task.batch_size for task in loaded.workload.tasks}
    dtype = AUTOCAST.get(train.precision)
    taken: list[float] = []

    def step(number: int) -> None:
        begun_s = time.perf_counter()
        batch = {
            name: {key: value.to(device) for key, value in each.rows(number, 0, sizes[name]).items()}
            for name, each in batches.items()
        }
        with torch.autocast(device.type, dtype) if dtype else nullcontext():
            total, _ = model(batch)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        total.item()
        taken.append(time.perf_counter() - begun_s)

    for number in range(asked.steps):
        step(number)
    step_s = median(taken[LEFT_OUT:] or taken)
    if asked.trace:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as seen:
            step(asked.steps)
        seen.export_chrome_trace(asked.trace)
    said = f"{step_s * 1e3:.1f} ms a step"
    print(json.dumps({"probe": "plain loop", "status": "ok", "said": said, "seconds": step_s}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
