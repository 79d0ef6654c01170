"""The shortest schedule of a small workload by constraint programming, to see how far a plan is from it.

    python scripts/exact_optimum.py PROFILE.json --cluster CLUSTER.yaml [--seconds 60]

Needs the optional extra `exact` (ortools), and a process of its own: ortools and the planner's solver cannot
be loaded into one. Every op is an interval on one of its MetaOp's allocations; ops of a MetaOp follow each
other, a MetaOp starts when its inputs have ended, and at most N devices are busy. It starts from a plan of
`spindle plan`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile

TICKS = 100_000  # of the plan's compute time; durations are rounded down for the bound


@dataclass(frozen=True)
class Result:
    """What the solver knows: the shortest schedule is between the two."""

    bound_s: float
    best_s: float


def main() -> None:
    """Print the plan's compute time, the best schedule found, and the bounds on both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profile", type=Path)
    parser.add_argument("--cluster", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    profile, cluster = Profile.read(arguments.profile), Cluster.read(arguments.cluster)
    plan = planned(arguments.profile, arguments.cluster)
    result = solve(profile, cluster, plan, arguments.seconds, arguments.workers)
    predicted = plan.predicted
    print(
        json.dumps(
            {
                "workload": profile.workload.name,
                "num_devices": cluster.num_devices,
                "lower_bound_s": predicted.lower_bound_s,
                "exact_bound_s": result.bound_s,
                "exact_best_s": result.best_s,
                "plan_compute_s": predicted.compute_s,
            }
        )
    )


def planned(profile: Path, cluster: Path) -> Plan:
    """A plan made by the command, in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        command = [
            sys.executable,
            "-m",
            "spindle_cli",
            "plan",
            str(profile),
            "--cluster",
            str(cluster),
            "-o",
            str(path),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return read_plan(path)


def points_of(metaop: MetaOpProfile, num_devices: int) -> list[CurvePoint]:
    """The useful allocations: each faster than all with fewer devices."""
    points: list[CurvePoint] = []
    for point in metaop.best_points:
        if point.num_devices <= num_devices and (not points or point.op_s < points[-1].op_s):
            points.append(point)
    return points


def solve(profile: Profile, cluster: Cluster, plan: Plan, seconds: float, workers: int) -> Result:
    """Search for so long, on so many threads."""
    from ortools.sat.python import cp_model

    tick_s = plan.predicted.compute_s / TICKS
    horizon = 2 * TICKS
    model = cp_model.CpModel()
    end = model.new_int_var(0, horizon, "C")
    ends: dict[str, Any] = {}
    intervals: list[Any] = []
    demands: list[int] = []
    hints = _hints(plan)
    for name in _order(profile):
        metaop = profile.by_name[name]
        before = [ends[producer] for producer in metaop.inputs]
        for op in range(metaop.num_ops):
            start, stop = (model.new_int_var(0, horizon, f"{name}.{op}.{what}") for what in ("start", "end"))
            chosen = []
            for point in points_of(metaop, cluster.num_devices):
                present = model.new_bool_var(f"{name}.{op}.{point.num_devices}")
                length = int(point.op_s / tick_s)
                intervals.append(
                    model.new_optional_interval_var(
                        start, length, stop, present, f"{name}.{op}.{point.num_devices}.i"
                    )
                )
                demands.append(point.num_devices)
                chosen.append(present)
                model.add_hint(present, hints[name, op][1] == point.num_devices)
            model.add_exactly_one(chosen)
            for other in before:
                model.add(start >= other)
            before = [stop]
            model.add_hint(start, int(hints[name, op][0] / tick_s))
        ends[name] = before[0]
        model.add(end >= ends[name])
    model.add_cumulative(intervals, demands, cluster.num_devices)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    best = solver.objective_value if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else float("inf")
    return Result(solver.best_objective_bound * tick_s, best * tick_s)


def _order(profile: Profile) -> list[str]:
    from spindle_cli.profile.metagraph import topological_order

    return list(topological_order(profile.metaops))


def _hints(plan: Plan) -> dict[tuple[str, int], tuple[float, int]]:
    """(MetaOp, op) -> its start and its number of devices in the plan."""
    found: dict[tuple[str, int], tuple[float, int]] = {}
    for piece in plan.slices:
        op_s = (piece.end_s - piece.start_s) / piece.num_ops
        for number, op in enumerate(range(*piece.ops)):
            found[piece.metaop, op] = (piece.start_s + number * op_s, len(piece.devices))
    return found


if __name__ == "__main__":
    main()
