"""Fit the paper-size workloads' batch sizes to the published times of their baseline, or check them.

    python scripts/calibrate.py [WORKLOAD ...]    write the rows of all, or of these, into the table of
                                                  docs/benchmarks/calibration.md, from the batch sizes
    python scripts/calibrate.py --fit             search for batch sizes and print them

Only the batch sizes are fitted here; the device's constants are in
src/spindle_cli/profile/machine/devices.py.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import yaml
from calibration_fit import REFERENCE_BATCH, Model, Target, fit
from rich.console import Console

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.profiling import Audience, estimate_profile
from spindle_cli.profile.types import Profile
from spindle_cli.units import GIB
from spindle_cli.workload.settings.types import Looking
from spindle_cli.zoo import multitask_clip, ofasys, qwen_val

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "calibration.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
TOLERANCE = 0.25
# Milliseconds of an iteration of the paper's DeepSpeed baseline on so many A800s, read off the bars of its
# appendix: a few percent uncertain.
PUBLISHED_MS: Mapping[str, Mapping[int, float]] = {
    "clip-4": {8: 855, 16: 529, 32: 454},
    "clip-7": {8: 1269, 16: 757, 32: 592},
    "clip-10": {8: 1552, 16: 890, 32: 747},
    "ofasys-4": {8: 1610, 16: 850, 32: 523},
    "ofasys-7": {8: 3111, 16: 1556, 32: 874},
    "qwen-val": {32: 2521, 64: 1999},
}


@dataclass(frozen=True)
class Family:
    """Workloads whose tasks have the same batch sizes; the first has all tasks, the others its first few.

    `multiple`: of which batch sizes are sought. 32, where 8 to 32 devices can share them evenly. 24 for
    QWen-VAL: with tensor parallelism of 4, 32 devices take 8 shares, and of the 16 that 64 devices could take
    12; the published times scale as badly.
    """

    workloads: tuple[str, ...]
    module: ModuleType
    args: Mapping[str, int]
    multiple: int


FAMILIES = (
    Family(("clip-10", "clip-7", "clip-4"), multitask_clip, {"tasks": 10}, 32),
    Family(("ofasys-7", "ofasys-4"), ofasys, {"tasks": 7}, 32),
    Family(("qwen-val",), qwen_val, {}, 24),
)
NOBODY = Audience(Console(file=io.StringIO()), lambda _: None)


@dataclass(frozen=True)
class Cell:
    """One published time and ours."""

    workload: str
    num_devices: int
    published_ms: float
    plan: Plan
    model_flops: float

    @property
    def predicted_ms(self) -> float:
        """Of our `sequential` plan."""
        return 1e3 * self.plan.predicted.iteration_s

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.predicted_ms / self.published_ms

    @property
    def row(self) -> str:
        """A line of the table."""
        seconds = self.predicted_ms / 1e3
        use = self.model_flops / (seconds * self.num_devices * 312e12)
        tp = max(piece.tp for piece in self.plan.slices)
        again = sum(piece.recompute for piece in self.plan.slices)
        needs = [f"tp {tp}"] * (tp > 1) + [f"recomputation in {again} of {len(self.plan.slices)}"] * (
            again > 0
        )
        return (
            f"| {self.workload} | {self.num_devices} | {self.published_ms:.0f} | {self.predicted_ms:.0f} | "
            f"{self.ratio:.2f}{'' if abs(self.ratio - 1) <= TOLERANCE else ' (!)'} | {use:.0%} | "
            f"{max(self.plan.predicted.peak_memory_bytes) / GIB:.0f} | "
            f"{', '.join(needs) or '-'} |"
        )


def cluster_of(num_devices: int) -> Cluster:
    """Nodes of eight A800s."""
    return Cluster.read(ROOT / "configs" / "clusters" / f"a800-{num_devices // 8}x8.yaml")


def cells_of(workload: str, numbers: Sequence[int] | None = None) -> list[Cell]:
    """Every published cell of a workload, or those with these numbers of devices, predicted."""
    published = PUBLISHED_MS[workload]
    numbers = tuple(published) if numbers is None else numbers
    source = ROOT / "configs" / "workloads" / f"{workload}.yaml"
    profile = _estimate(source, cluster_of(max(numbers)))
    flops = 3 * sum(metaop.num_ops * (metaop.flops_per_op or 0.0) for metaop in profile.metaops)
    return [
        Cell(workload, n, published[n], make_plan(profile, cluster_of(n), "sequential"), flops)
        for n in numbers
    ]


def write_table(workloads: Collection[str]) -> int:
    """Predict every cell of these and put its row into the page, whose other rows stay; gives how many are
    outside of the tolerance.
    """
    cells = [cell for workload in PUBLISHED_MS if workload in workloads for cell in cells_of(workload)]
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    found = {(cell.workload, cell.num_devices): cell.row for cell in cells}
    PAGE.write_text(before + BEGIN + replaced(old, found) + END + after, encoding="utf-8")
    sys.stdout.write("\n".join(cell.row for cell in cells) + "\n")
    return sum(abs(cell.ratio - 1) > TOLERANCE for cell in cells)


def replaced(table: str, rows: Mapping[tuple[str, int], str]) -> str:
    """The table with these rows, by workload and number of devices, in the place of its own."""
    lines = []
    for line in table.splitlines(keepends=True):
        words = [word.strip() for word in line.split("|")[1:3]]
        key = (words[0], int(words[1])) if words and words[0] in PUBLISHED_MS else None
        lines.append(line if key is None or key not in rows else f"{rows[key]}\n")
    return "".join(lines)


def fit_family(family: Family) -> dict[str, int]:
    """Batch sizes whose predicted times come closest to the published ones."""
    start: dict[str, int] = family.module.BATCH_SIZES["paper"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "reference.yaml"
        args = {**family.args, "batch_sizes": dict.fromkeys(start, REFERENCE_BATCH)}
        source.write_text(
            yaml.safe_dump(
                {
                    "schema": "spindle.workload/1",
                    "model": f"{family.module.__name__}:build",
                    "args": args,
                }
            )
        )
        # Enough devices for one sample each, split 8 ways.
        model = Model(_estimate(source, _nodes_of_eight(REFERENCE_BATCH)))
    tasks = list(start)
    targets = [
        Target(tuple(tasks[: _num_tasks(workload, len(tasks))]), n, milliseconds / 1e3)
        for workload in family.workloads
        for n, milliseconds in PUBLISHED_MS[workload].items()
    ]
    found = fit(model, targets, start, family.multiple)
    return {task: found[task] for task in tasks}


def main() -> int:
    """The command; 1 if a cell is outside of the tolerance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true", help="search for batch sizes and print them")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"all: {', '.join(PUBLISHED_MS)}")
    asked = parser.parse_args()
    unknown = [workload for workload in asked.workloads if workload not in PUBLISHED_MS]
    if unknown:
        parser.error(f"{unknown[0]}: expected one of {', '.join(PUBLISHED_MS)}")
    if asked.fit:
        for family in FAMILIES:
            sys.stdout.write(f"{family.workloads[0]}: {fit_family(family)}\n")
        return 0
    return int(write_table(asked.workloads or list(PUBLISHED_MS)) > 0)


def _num_tasks(workload: str, all_tasks: int) -> int:
    last = workload.rsplit("-", 1)[-1]
    return int(last) if last.isdigit() else all_tasks


def _nodes_of_eight(count: int) -> Cluster:
    cluster = cluster_of(8)
    return cluster.model_copy(
        update={"nodes": tuple(group.model_copy(update={"count": count}) for group in cluster.nodes)}
    )


def _estimate(source: Path, cluster: Cluster) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "profile.json"
        # Their batches have one length, and their losses are known to be split as they are.
        return estimate_profile(
            str(source), out, NOBODY, cluster=cluster, check=False, looking=Looking(batches=1)
        )


if __name__ == "__main__":
    sys.exit(main())
