"""Which tasks a step runs, worked out a second time from docs/training-settings.md."""

from __future__ import annotations

import hashlib

from spindle_cli.workload.file import TrainSettings


def runs_at(train: TrainSettings, task: str, step: int) -> bool:
    """Whether a step, counted from 0, runs a task."""
    sampling = train.sampling
    if sampling is None:
        return True
    if task in sampling.every:
        each = sampling.every[task]
        return step in range(each.offset, step + 1, each.every)
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
