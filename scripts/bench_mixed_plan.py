"""The planner's benchmark on clusters of several types of device.

    python scripts/bench_mixed_plan.py [--only WORKLOAD ...] [--clusters CLUSTER ...]

Plans the paper's workloads, their curves estimated for every type, by `spindle` and what it is compared with,
simulates its plans, and writes docs/mixed-devices.json and the table of docs/mixed-devices.md. Rows that are
not planned again are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from bench_tables import put_between_markers, table
from paper_profiles import FOLDER, NOBODY, ROOT, WORKLOADS

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import ON_SEVERAL_TYPES, StrategyName
from spindle_cli.profile.machine.devices import Precision
from spindle_cli.profile.profiling import estimate_profile
from spindle_cli.profile.types import Profile
from spindle_cli.simulate.run import simulate

CLUSTERS = ("h100-16-a100-32", "h800-16-h20-32", "a100-16-v100-16")
# V100s have no bfloat16: there all types are estimated in float16.
WITHOUT_BFLOAT16 = ("v100", "p100")
DATA, PAGE = ROOT / "docs" / "mixed-devices.json", ROOT / "docs" / "mixed-devices.md"


@dataclass(frozen=True)
class Row:
    """One plan; seconds. `simulated_s`: of `spindle` alone. `iteration_s`: None where no plan fits."""

    workload: str
    cluster: str
    strategy: StrategyName
    iteration_s: float | None
    compute_s: float = 0.0
    lower_bound_s: float = 0.0
    simulated_s: float | None = None
    planning_s: float = 0.0


def main() -> None:
    """Plan and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=WORKLOADS, metavar="WORKLOAD")
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=CLUSTERS, metavar="CLUSTER")
    arguments = parser.parse_args()
    kept = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else []
    rows = {(row["workload"], row["cluster"], row["strategy"]): Row(**row) for row in kept}
    for workload in arguments.only:
        for name in arguments.clusters:
            for row in rows_of(workload, name):
                rows[row.workload, row.cluster, row.strategy] = row
                print(row, flush=True)
    order = sorted(rows, key=lambda key: (WORKLOADS.index(key[0]), CLUSTERS.index(key[1])))
    text = json.dumps([asdict(rows[key]) for key in order], indent=1) + "\n"
    DATA.write_text(text, encoding="utf-8")
    put_between_markers(PAGE, _table([rows[key] for key in order]))


def rows_of(workload: str, name: str) -> list[Row]:
    """A workload on a cluster by every strategy."""
    cluster = Cluster.read(ROOT / "configs" / "clusters" / f"{name}.yaml")
    profile = Profile.read(_profile_path(workload, name, cluster))
    found = []
    for strategy in ON_SEVERAL_TYPES:
        begun_s = time.process_time()
        try:
            plan = make_plan(profile, cluster, strategy)
        except NoPlanError:  # a row without times
            found.append(Row(workload, name, strategy, None))
            continue
        planning_s = time.process_time() - begun_s
        predicted = plan.predicted
        simulated_s = simulate(plan).iteration_s if strategy == "spindle" else None
        times = predicted.iteration_s, predicted.compute_s, predicted.lower_bound_s
        found.append(Row(workload, name, strategy, *times, simulated_s, planning_s))
    return found


def _profile_path(workload: str, name: str, cluster: Cluster) -> Path:
    """Estimated for all types unless it has been before."""
    has_bfloat16 = not any(kind.startswith(WITHOUT_BFLOAT16) for kind in cluster.types)
    precision: Precision = "bfloat16" if has_bfloat16 else "float16"
    path = FOLDER / f"{workload}-on-{name}-{precision}.json"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        source = ROOT / "configs" / "workloads" / f"{workload}.yaml"
        estimate_profile(str(source), path, NOBODY, cluster=cluster, precision=precision, check=False)
    return path


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for workload, name in dict.fromkeys((row.workload, row.cluster) for row in rows):
        own = {row.strategy: row for row in rows if (row.workload, row.cluster) == (workload, name)}
        ours = own["spindle"]
        iterations = [_ms(own[strategy]) for strategy in ON_SEVERAL_TYPES if strategy in own]
        if ours.iteration_s is None or ours.simulated_s is None:
            lines.append([f"{workload}, {name}", *iterations, "-", "-", "-"])
            continue
        off = ours.simulated_s / ours.iteration_s - 1
        lines.append(
            [f"{workload}, {name}", *iterations, f"{_gap(ours):.1%}", f"{off:+.1%}", f"{ours.planning_s:.1f}"]
        )
    gaps = [_gap(row) for row in rows if row.strategy == "spindle" and row.iteration_s is not None]
    head = ["workload, cluster", *ON_SEVERAL_TYPES, "above the bound", "simulated", "planned in, s"]
    summary = f"Compute above the bound: {mean(gaps):.1%} in the mean, {max(gaps):.1%} at worst."
    return f"{table(head, lines)}\n\n{summary}"


def _gap(row: Row) -> float:
    return row.compute_s / row.lower_bound_s - 1


def _ms(row: Row) -> str:
    return "no plan" if row.iteration_s is None else f"{row.iteration_s * 1e3:.0f}"


if __name__ == "__main__":
    main()
