"""The planner's benchmark on clusters of several types of device.

    python scripts/bench_mixed_plan.py [--random] [--only WORKLOAD ...] [--clusters CLUSTER ...] [--by BY ...]
    python scripts/bench_mixed_plan.py --why

Plans the paper's workloads, their curves estimated for every type, or with `--random` random ones, by
`spindle` and what it is compared with, simulates its plans of the paper's, and writes
docs/benchmarks/mixed-devices.json and the tables of mixed-devices.md beside it, after each plan. Rows that
are not planned again are kept. With `--only` and `--clusters` those of these workloads and clusters are
planned again. `--why` says of the worst plan of each class where its compute above the bound comes from, and
writes nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench_tables import SMALL, put_between_markers
from mixed_clusters import cluster_named, devices_of, without_speed
from mixed_gaps import gap_of
from mixed_tables import Row, sections, worst_of_each
from paper_profiles import FOLDER, NOBODY, ROOT, WORKLOADS
from pattern_bound import pattern_bound_s, with_every_number
from random_mixed_profiles import random_mixed_profile
from random_profiles import SHAPES

from spindle_cli.costs.flops import Arithmetic
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.writing import write_text
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.types import ON_SEVERAL_TYPES, Plan, StrategyName
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.profiling import estimate_profile
from spindle_cli.profile.types import Profile
from spindle_cli.simulate.run import simulate

THREE_TYPES, MANY = "h800-16-a800-16-h20-32", "h800-256-a800-256-h20-256"
CLUSTERS = ("h100-16-a100-32", "h800-16-h20-32", "a100-16-v100-16", THREE_TYPES)
# One of each kind, on three types: estimating takes a minute each.
ON_THREE_TYPES = ("clip-10", "ofasys-4")
# Behind slow links, of the paper's those for which memory is ample.
SLOW_CLUSTERS = ("h100-16-a100-32-at-1.25", "h800-16-h20-32-at-3")
BEHIND_SLOW_LINKS = ("clip-4", "clip-10", "ofasys-4", "ofasys-7")
# V100s have no bfloat16: there all types are estimated in float16.
WITHOUT_BFLOAT16 = ("v100", "p100")
DRAWN = {f"{shape}-{seed}": (shape, seed) for seed in range(3) for shape in SHAPES}
RANDOM = tuple(name + suffix for suffix in ("", SMALL) for name in DRAWN)
RANDOM_CLUSTERS = ("h800-8-h20-8", "h800-16-h20-16", "h800-32-h20-32", THREE_TYPES, MANY)
# Where random workloads are planned on devices with less memory, too.
SMALL_GIB, SMALL_ON = 40, RANDOM_CLUSTERS[1:4]
# Where compute is all that counts.
FREE_ON = ("h800-8-h20-8-free", "h800-16-h20-16-free", "h800-32-h20-32-free")
# The bound of patterns is worked out where a plan is further above the plain one, as long as it takes to
# generate so many patterns, or to know it up to this share.
DOUBTFUL_GAP, MOST_PATTERNS, PRECISION = 0.01, 400, 2e-3
# For more devices workloads are larger, and one of each shape is planned by `spindle` alone: minutes each.
MOST_DEVICES, SEEDS_BEYOND = 64, range(1)
RECORDS = ROOT / "docs" / "benchmarks"
DATA, PAGE = RECORDS / "mixed-devices.json", RECORDS / "mixed-devices.md"

Key = tuple[str, str, StrategyName]


def main() -> None:
    """Plan and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--only", nargs="+", choices=(*WORKLOADS, *RANDOM), metavar="WORKLOAD")
    known = tuple(dict.fromkeys((*CLUSTERS, *SLOW_CLUSTERS, *RANDOM_CLUSTERS, *FREE_ON)))
    parser.add_argument("--clusters", nargs="+", choices=known, default=known, metavar="CLUSTER")
    parser.add_argument("--by", nargs="+", choices=ON_SEVERAL_TYPES, metavar="STRATEGY")
    parser.add_argument("--why", action="store_true")
    arguments = parser.parse_args()
    rows = {(row.workload, row.cluster, row.strategy): row for row in _written()}
    if arguments.why:
        print("\n".join(reasons(list(rows.values()))))
        return
    names = arguments.only or (RANDOM if arguments.random else WORKLOADS)
    for workload, name in pairs(names, arguments.clusters):
        for row in rows_of(workload, name, arguments.by or strategies_on(name)):
            rows[row.workload, row.cluster, row.strategy] = row
            print(row, flush=True)
            # Row by row: what stops the last one loses none of the others.
            _write([rows[key] for key in sorted(rows, key=_place)])


def pairs(workloads: Sequence[str], clusters: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Which of these workloads are planned for which of these clusters."""
    for workload in workloads:
        for name in clusters:
            if name in SLOW_CLUSTERS:
                is_planned = workload in BEHIND_SLOW_LINKS
            elif workload in WORKLOADS:
                is_planned = name in CLUSTERS and (name != THREE_TYPES or workload in ON_THREE_TYPES)
            elif workload.endswith(SMALL):
                is_planned = name in SMALL_ON
            elif name in FREE_ON:
                is_planned = True
            else:
                is_few = name != MANY or DRAWN[workload][1] in SEEDS_BEYOND
                is_planned = name in RANDOM_CLUSTERS and is_few
            if is_planned:
                yield workload, name


def strategies_on(name: str) -> Sequence[StrategyName]:
    """By what workloads are planned on a cluster."""
    are_few = sum(devices_of(name).values()) <= MOST_DEVICES and name not in FREE_ON
    return ON_SEVERAL_TYPES if are_few else ON_SEVERAL_TYPES[:1]


def rows_of(workload: str, name: str, strategies: Sequence[StrategyName]) -> Iterator[Row]:
    """A workload on a cluster by some strategies."""
    cluster = _cluster(workload, name)
    profile = _profile(workload, name, cluster)
    for strategy in strategies:
        begun_s = time.process_time()
        try:
            plan = make_plan(profile, cluster, strategy)
        except NoPlanError as error:  # a row without times
            planning_s = time.process_time() - begun_s
            yield Row(workload, name, strategy, None, planning_s=planning_s, notes=(error.message,))
            continue
        planning_s = time.process_time() - begun_s
        predicted, is_ours = plan.predicted, strategy == "spindle"
        yield Row(
            workload,
            name,
            strategy,
            iteration_s=predicted.iteration_s,
            compute_s=predicted.compute_s,
            lower_bound_s=predicted.lower_bound_s,
            # Some MetaOps of random workloads take from others of another batch, which no program runs.
            simulated_s=simulate(plan).iteration_s if is_ours and workload in WORKLOADS else None,
            tighter_s=tighter_bound_s(profile, plan) if is_ours else None,
            planning_s=planning_s,
            notes=plan.notes,
        )


def tighter_bound_s(profile: Profile, plan: Plan) -> float | None:
    """Of patterns of all allocations, if that is in doubt and found in minutes; not of plans that give up
    something for memory, or have micro-batches.
    """
    cluster, predicted = plan.cluster, plan.predicted
    gives_up = any(piece.recompute or piece.offload for piece in plan.slices) or bool(plan.micro_batches)
    is_near = predicted.compute_s <= (1 + DOUBTFUL_GAP) * predicted.lower_bound_s
    if gives_up or is_near or cluster.num_devices > MOST_DEVICES:
        return None
    problem = with_every_number(make_problem(seen_on(profile, cluster), cluster))
    return pattern_bound_s(problem, max_patterns=MOST_PATTERNS, precision=PRECISION)


def reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Of the worst plan of each class, planned again, where its gap comes from."""
    for kind, row in worst_of_each(rows):
        cluster = _cluster(row.workload, row.cluster)
        profile = _profile(row.workload, row.cluster, cluster)
        gap = gap_of(make_plan(profile, cluster), profile)
        yield f"{kind}: {row.workload} on {row.cluster}, {row.gap:.1%}: {gap}; {' '.join(row.notes)}"


def _cluster(workload: str, name: str) -> Cluster:
    return cluster_named(name, SMALL_GIB if workload.endswith(SMALL) else None)


def _profile(workload: str, name: str, cluster: Cluster) -> Profile:
    if workload in WORKLOADS:
        return Profile.read(_profile_path(workload, without_speed(name), cluster))
    shape, seed = DRAWN[workload.removesuffix(SMALL)]
    scale = max(1, cluster.num_devices // MOST_DEVICES)
    return random_mixed_profile(seed, shape, cluster, scale=scale)


def _profile_path(workload: str, name: str, cluster: Cluster) -> Path:
    """Estimated for all types unless it has been before."""
    has_bfloat16 = not any(kind.startswith(WITHOUT_BFLOAT16) for kind in cluster.types)
    precision: Arithmetic = "bfloat16" if has_bfloat16 else "float16"
    path = FOLDER / f"{workload}-on-{name}-{precision}.json"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        source = ROOT / "configs" / "workloads" / f"{workload}.yaml"
        estimate_profile(str(source), path, NOBODY, cluster=cluster, precision=precision, check=False)
    return path


def _written() -> list[Row]:
    """The rows that were written before."""
    kept = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else []
    return [Row(**{**row, "notes": tuple(row.get("notes", ()))}) for row in kept]


def _place(key: Key) -> tuple[int, int]:
    """In the order of workloads, then of clusters."""
    clusters = (*CLUSTERS, *SLOW_CLUSTERS, *RANDOM_CLUSTERS, *FREE_ON)
    return (*WORKLOADS, *RANDOM).index(key[0]), clusters.index(key[1])


def _write(rows: Sequence[Row]) -> None:
    write_text(DATA, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    put_between_markers(PAGE, "\n\n".join(sections(rows)))


if __name__ == "__main__":
    main()
