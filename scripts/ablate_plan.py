"""What each step from the paper's construction to ours brings, on every workload.

    python scripts/ablate_plan.py

Writes the tables of docs/benchmarks/ablation.md (between its markers): compute above the whole-graph lower
bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean

from bench_tables import BEGIN, END, table
from paper_profiles import ROOT, WORKLOADS, cluster_path, read_profile
from random_profiles import SHAPES, random_profile
from wavefront import level_after_level, overlapping, wave_after_wave, wavefront

from spindle_cli.files.cluster import MOST_GB_PER_S, Cluster, Link, Links
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.improve import search
from spindle_cli.plan.search.listing import Timed, time_jobs
from spindle_cli.plan.strategies.spindle import SHORTEST
from spindle_cli.profile.types import Profile

STEPS = ("waves", "no waves wait", "no levels wait", "dispatched", "improved", "improved for longer")
DEVICES = (8, 64)
SEEDS = range(4)
FREE = Link(latency_us=0, bandwidth_gb_per_s=MOST_GB_PER_S)


def main() -> None:
    """Make every schedule and write the page."""
    page = ROOT / "docs" / "benchmarks" / "ablation.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    text = "\n\n".join([BEGIN, *(_section(n) for n in DEVICES), END])
    page.write_text(before + text + rest.partition(END)[2], encoding="utf-8")


def _section(num_devices: int) -> str:
    # The search counts what messages and sums take, too: here they take nothing.
    cluster = Cluster.read(cluster_path(num_devices)).with_links(Links(intra_node=FREE, inter_node=FREE))
    lines: list[tuple[str, list[float]]] = []
    for name, profile in _profiles(num_devices):
        gaps = _gaps(make_problem(profile, cluster))
        print(num_devices, name, [f"{gap:.1%}" for gap in gaps], flush=True)
        lines.append((name, gaps))
    means = [mean(column) for column in zip(*(gaps for _, gaps in lines), strict=True)]
    cells = [[name, *(f"{gap:.1%}" for gap in gaps)] for name, gaps in [*lines, ("**mean**", means)]]
    return f"## {num_devices} devices\n\n" + table(["workload", *STEPS], cells)


def _profiles(num_devices: int) -> Iterator[tuple[str, Profile]]:
    for workload in WORKLOADS:
        yield workload, read_profile(workload, num_devices)
    for shape in SHAPES:
        for seed in SEEDS:
            yield f"{shape}-{seed}", random_profile(seed, shape)


def _gaps(problem: Problem) -> list[float]:
    """Compute above the bound after each of the steps."""
    bound = lower_bound(problem)
    levels = wavefront(problem)
    schedules: list[Sequence[Timed]] = [
        wave_after_wave(problem, levels),
        level_after_level(problem, levels),
        overlapping(problem, levels),
        *(
            time_jobs(problem, search(problem, bound, jobs, seed=0)[0])
            for jobs in (0, SHORTEST, 16 * SHORTEST)
        ),
    ]
    return [max(end_s for _, _, end_s in timed) / bound.lower_bound_s - 1 for timed in schedules]


if __name__ == "__main__":
    main()
