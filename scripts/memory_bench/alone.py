"""What processes of this machine take, measured in trainings by plans of their own."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_memory import ROOT, torchrun

from memory_bench.variants import VARIANTS, Estimates, plan_variant, write_run, write_variant
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile

MEMORY_GIB = 16

WORKLOADS = ROOT / "configs" / "workloads"


@dataclass(frozen=True)
class Told:
    """Of one workload in one variant: `numbers` are what each rank wrote."""

    workload: str
    variant: str
    profile: Profile
    plan: Plan
    numbers: tuple[tuple[int, ...], ...]


def parser(
    text: str | None, *, devices: int, workloads: Sequence[str], variants: Sequence[str]
) -> argparse.ArgumentParser:
    """Of a benchmark with this text, and these by default."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(path.stem for path in WORKLOADS.glob("*.yaml"))
    made.add_argument("--devices", type=int, default=devices, metavar="N")
    made.add_argument("--workloads", nargs="+", default=workloads, choices=known, metavar="NAME")
    made.add_argument("--variants", nargs="+", default=variants, choices=list(VARIANTS), metavar="NAME")
    return made


def measured(asked: argparse.Namespace, what: str, *, steps: int) -> Iterator[Told]:
    """Train each workload in each variant by `memory_bench.<what>`, whose ranks write `<what>.<rank>`."""
    with tempfile.TemporaryDirectory() as folder:
        for workload in asked.workloads:
            for name in asked.variants:
                to = Path(folder) / f"{workload}-{name.replace(' ', '-')}"
                to.mkdir()
                yield _told(workload, name, asked.devices, what, steps, to)


def _told(workload: str, name: str, count: int, what: str, steps: int, folder: Path) -> Told:
    cluster = roomy(Cluster.read(ROOT / "configs" / "clusters" / f"cpu-{count}.yaml"))
    source = write_variant(WORKLOADS / f"{workload}.yaml", VARIANTS[name], folder)
    profile = Estimates(cluster, folder).of(source, VARIANTS[name])
    plan = plan_variant(profile, VARIANTS[name], cluster, "sequential", folder)
    assert plan is not None, "these variants can be planned for any workload"
    run = folder / "runs" / "run"
    write_run(plan, source, run, steps)
    torchrun(count, str(folder / "runs"), module=f"memory_bench.{what}")
    texts = [(run / f"{what}.{rank}").read_text(encoding="utf-8") for rank in range(count)]
    return Told(workload, name, profile, plan, tuple(tuple(map(int, text.split())) for text in texts))


def print_table(columns: Sequence[str], rows: Iterator[Sequence[object]]) -> None:
    """In Markdown, each row as soon as it is there."""
    print(f"| {' | '.join(columns)} |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def roomy(cluster: Cluster) -> Cluster:
    """The cluster with devices that hold any of these workloads whole."""
    return cluster.changed(
        nodes=tuple(group.model_copy(update={"memory_gib": MEMORY_GIB}) for group in cluster.nodes)
    )
