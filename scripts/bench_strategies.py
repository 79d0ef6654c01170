"""Strategies against each other: every one of the paper's workloads x devices x strategy.

    python scripts/bench_strategies.py [--quick] [--only WORKLOAD ... [--devices N ...] [--by STRATEGY ...]]

Writes docs/benchmarks/strategies.json and the tables of strategies.md beside it (between its markers), after
each plan.
`--quick` leaves out 256 and 1,024 devices and writes nothing. `--only` plans these workloads again, on so
many devices, by these strategies, and keeps what was written of the others. Whether plans have become
better or worse is what bench_plan.py says.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from bench_tables import Row, write_page
from paper_profiles import ROOT, WORKLOADS, cluster_path, profile_path
from pattern_bound import pattern_bound_s

from spindle_cli.costs.beyond_curve import Again
from spindle_cli.costs.flops import arithmetic_of, flops_by_metaop, peak_flops_per_s
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import MAX_MEMORY_GIB, Cluster
from spindle_cli.files.writing import write_text
from spindle_cli.plan.assemble import exact_slices
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.placing.placement import place_in_sequence
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback, Point, make_point
from spindle_cli.plan.schedule import Candidate, UnplacedSlice
from spindle_cli.plan.search.evaluate import measure
from spindle_cli.plan.types import Plan, Slice, StrategyName
from spindle_cli.profile.types import Profile
from spindle_cli.simulate.run import simulate

RECORDS = ROOT / "docs" / "benchmarks"
ROWS = RECORDS / "strategies.json"
STRATEGIES: tuple[StrategyName, ...] = ("sequential", "distmm", "optimus", "spindle")
DEVICES = (8, 16, 32, 64, 256, 1024)
# A plan further above the bound than this gets the tighter bound too, where that takes seconds rather than
# minutes.
DOUBTFUL_GAP = 0.02
MOST_PATTERNS = 120
# Simulating takes longer than planning on more devices.
MOST_SIMULATED = 256


def main() -> None:
    """Plan everything and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, metavar="WORKLOAD")
    parser.add_argument("--devices", nargs="+", type=int, choices=DEVICES, default=DEVICES, metavar="N")
    parser.add_argument("--by", nargs="+", choices=STRATEGIES, default=STRATEGIES, metavar="STRATEGY")
    arguments = parser.parse_args()
    devices = [n for n in DEVICES if n <= 64] if arguments.quick else list(DEVICES)
    if arguments.only:
        paper = [name for name in WORKLOADS if name in arguments.only]
        made = paper_rows(arguments.devices, paper, arguments.by)
    else:
        made = paper_rows(devices)
    if arguments.quick:
        _summarise(list(_shown(made)))
        return
    rows = _written()
    known = {_which(row) for row in rows}
    new: dict[Which, Row] = {}
    for row in _shown(made):
        # Row by row: hours of planning are not lost with what stops the last one.
        new[_which(row)] = row
        _write(
            [new.get(_which(old), old) for old in rows]
            + [each for key, each in new.items() if key not in known]
        )
    if not arguments.only:
        _write(list(new.values()))
    _summarise(list(new.values()))


Which = tuple[str, int, StrategyName]


def _which(row: Row) -> Which:
    return row.workload, row.num_devices, row.strategy


def _written() -> list[Row]:
    """The rows that were written before."""
    kept = json.loads(ROWS.read_text(encoding="utf-8"))
    return [Row(**{**row, "notes": tuple(row["notes"])}) for row in kept]


def _write(rows: Sequence[Row]) -> None:
    write_text(ROWS, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    write_page(RECORDS / "strategies.md", rows)


def paper_rows(
    devices: Sequence[int],
    workloads: Sequence[str] = WORKLOADS,
    strategies: Sequence[StrategyName] = STRATEGIES,
) -> Iterator[Row]:
    """The paper's workloads by these strategies."""
    for workload in workloads:
        for num_devices in devices:
            path = profile_path(workload, num_devices)
            for strategy in strategies:
                yield plan_row(workload, num_devices, strategy, path)


def plan_row(workload: str, num_devices: int, strategy: StrategyName, path: Path) -> Row:
    """Plan once."""
    cluster_file = cluster_path(num_devices)
    profile, cluster = Profile.read(path), Cluster.read(cluster_file)
    started_s = time.process_time()
    try:
        plan = make_plan(profile, cluster, strategy)
    except NoPlanError as error:
        return Row(workload, num_devices, strategy, fits=False, notes=(error.message,))
    planning_s = time.process_time() - started_s
    if strategy == "spindle":
        planning_s = command_s(path, cluster_file)
    predicted = plan.predicted
    in_sequence_s, tighter_s = 0.0, predicted.lower_bound_s
    if strategy == "spindle":
        in_sequence_s = transfers_in_sequence_s(profile, cluster, plan)
        tighter_s = max(tighter_s, tighter_bound_s(profile, cluster, plan))
    return Row(
        workload,
        num_devices,
        strategy,
        fits=True,
        iteration_s=predicted.iteration_s,
        compute_s=predicted.compute_s,
        lower_bound_s=predicted.lower_bound_s,
        tighter_bound_s=tighter_s,
        transfer_s=predicted.transfer_s,
        in_sequence_transfer_s=in_sequence_s,
        gradient_sum_s=predicted.gradient_sum_s,
        peak_memory_bytes=max(predicted.peak_memory_bytes),
        least_memory_bytes=min(predicted.peak_memory_bytes),
        peak_share=peak_share(plan, profile),
        simulated_s=simulate(plan).iteration_s if num_devices <= MOST_SIMULATED else None,
        planning_s=planning_s,
        notes=plan.notes,
    )


def peak_share(plan: Plan, profile: Profile) -> float | None:
    """Of all that the devices could compute in the predicted iteration at their published peak."""
    flops, arithmetic = flops_by_metaop(plan.metaops), arithmetic_of(profile.environment)
    peak = None if arithmetic is None else peak_flops_per_s(plan.cluster.device_type, arithmetic)
    if flops is None or peak is None:
        return None
    return sum(flops.values()) / (plan.predicted.iteration_s * plan.cluster.num_devices * peak)


def tighter_bound_s(profile: Profile, cluster: Cluster, plan: Plan) -> float:
    """The bound with the layers split and recomputed that the plan splits and recomputes; else that of
    patterns.
    """
    fallback = fallback_of(plan)
    if fallback != MemoryFallback():
        return lower_bound(make_problem(profile, cluster, fallback)).lower_bound_s
    if plan.predicted.compute_s <= plan.predicted.lower_bound_s * (1 + DOUBTFUL_GAP):
        return 0.0
    return pattern_bound_s(make_problem(profile, cluster), max_patterns=MOST_PATTERNS)


def fallback_of(plan: Plan) -> MemoryFallback:
    """What a plan gave up for memory."""
    whole, selective = (
        {
            metaop.name: sum(
                piece.num_ops
                for piece in plan.slices
                if piece.metaop == metaop.name and Again.of(piece) is again
            )
            // plan.micro_batches.get(metaop.task, 1)
            for metaop in plan.metaops
        }
        for again in (Again.ALL, Again.SELECTIVE)
    )
    degree = {
        metaop.name: min(piece.tp for piece in plan.slices if piece.metaop == metaop.name)
        for metaop in plan.metaops
    }
    split = {name: tp for name, tp in degree.items() if tp > 1}
    return MemoryFallback(
        min(split.values(), default=1),
        frozenset(split),
        {name: ops for name, ops in whole.items() if ops},
        {name: ops for name, ops in selective.items() if ops},
    )


def command_s(profile: Path, cluster: Path) -> float:
    """Processor seconds of the whole `spindle plan`, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "spindle_cli", "plan", str(profile), "--cluster", str(cluster)]
        subprocess.run([*command, "-o", f"{folder}/plan.yaml"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def transfers_in_sequence_s(profile: Profile, cluster: Cluster, plan: Plan) -> float:
    """What transfers would add to the iteration if the plan's schedule took the lowest free devices; of
    micro-batches, which are placed in rounds, and of unequal shares, which are points of no curve, what they
    add.
    """
    if plan.micro_batches or any(piece.rows is not None for piece in plan.slices):
        return plan.predicted.transfer_s
    roomy = Cluster(
        name=cluster.name,
        nodes=tuple(group.model_copy(update={"memory_gib": MAX_MEMORY_GIB}) for group in cluster.nodes),
        links=cluster.links,
    )
    problem = make_problem(profile, roomy)
    index = {node.metaop.name: node.index for node in problem.nodes}
    pieces = tuple(
        UnplacedSlice(index[piece.metaop], *piece.ops, point_of(plan, piece), piece.start_s, piece.end_s)
        for piece in plan.slices
    )
    placed = place_in_sequence(problem, Candidate("in sequence", pieces))
    evaluated = measure(problem, "in sequence", exact_slices(problem, placed))
    assert evaluated is not None, "everything fits so much memory"
    return evaluated.prediction.transfer_s


def point_of(plan: Plan, piece: Slice) -> Point:
    """The allocation of a slice."""
    curve = plan.by_name[piece.metaop].curve
    point = next(point for point in curve if (point.dp, point.tp) == (piece.dp, piece.tp))
    return make_point(point, plan.by_name[piece.metaop], Again.of(piece))


def _shown(rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        print(f"{row.workload:12s} {row.num_devices:5d} {row.strategy:10s} {_in_words(row)}", flush=True)
        yield row


def _in_words(row: Row) -> str:
    if not row.fits:
        return "no plan fits"
    shares = (
        f"transfers {row.transfer_s / row.iteration_s:5.1%}  sums {row.gradient_sum_s / row.iteration_s:5.1%}"
    )
    return f"{row.iteration_s * 1e3:9.1f} ms  gap {row.gap:6.1%}  {shares}  planned in {row.planning_s:.2f} s"


def _summarise(rows: Sequence[Row]) -> None:
    for num_devices in sorted({row.num_devices for row in rows}):
        gaps = [
            row.gap
            for row in rows
            if row.fits and row.strategy == "spindle" and row.num_devices == num_devices
        ]
        print(f"{num_devices:5d} devices: mean gap {mean(gaps):.2%}, worst {max(gaps):.2%}")


if __name__ == "__main__":
    main()
