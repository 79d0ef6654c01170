"""The toy workload on islands: its file, and a plan by hand of two devices each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from helpers.toy_plan import write_toy
from spindle_cli.account.traffic import outer_step_bytes, outer_step_s
from spindle_cli.plan.file import read_plan, write_plan
from spindle_cli.plan.types import Plan, PlannedIslands
from spindle_cli.profile.types import LocalSgd


def on_islands(plan: Plan, asked: LocalSgd) -> Plan:
    """A plan as that of each of several islands, all of its nodes each."""
    whole = plan.cluster.changed(nodes=plan.cluster.nodes * asked.islands)
    planned = PlannedIslands(
        cluster=whole,
        outer_step_bytes=outer_step_bytes(plan, asked),
        outer_step_s=outer_step_s(plan, asked, whole),
    )
    fields = {name: getattr(plan, name) for name in plan.model_fields_set}
    return Plan(**{**fields, "local_sgd": asked, "islands": planned})


def write_islands(
    folder: Path,
    asked: LocalSgd,
    train: Mapping[str, object] | None = None,
    steps: int = 4,
    dropout: float = 0.0,
) -> Path:
    """Write toy.yaml and plan.yaml; the path of the plan."""
    settings = {"local_sgd": asked.model_dump(), **(train or {})}
    path = write_toy(folder, steps=steps, train=settings, dropout=dropout)
    write_plan(path, on_islands(read_plan(path), asked))
    return path
