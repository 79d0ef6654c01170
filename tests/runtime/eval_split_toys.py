"""Layers that tensor parallelism splits, evaluated on other samples than they are trained on."""

from __future__ import annotations

import split_toys

from spindle_cli.workload.types import Workload


def build() -> Workload:
    workload = split_toys.build()
    left, right = workload.tasks
    left.eval_dataset = split_toys.Items(("image", "label"), 13, 5)
    right.eval_dataset = split_toys.Items(("image", "caption"), 6, 6)
    return workload
