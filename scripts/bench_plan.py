"""Plan the corpus, the problems of scripts/plan_corpus, against the plans that were frozen.

    python scripts/bench_plan.py [--quick] [--only NAME ...] [--group GROUP ...] [--jobs N]
                                 [--same-plans] [--twice] [--again] [--freeze]

Each problem goes through `spindle plan` on files; its plan is checked and simulated. Exits with 1 where a
tolerance is broken. What was planned by the same code is kept under build/, so that a run that was stopped
goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean

from bench_tables import table
from plan_corpus.compare import Tolerances, allowed_far_off, compare, far_off, summary
from plan_corpus.measure import BOUNDS, FOLDER, code_digest, inputs_digest, keep, kept_rows, measured
from plan_corpus.problems import PROBLEMS, Problem
from plan_corpus.rows import TABLE, Row, Table, read_table, write_table

# Planned within so many processor seconds when frozen: the quick problems.
QUICK_S = 6.0
# Processor seconds that planning may take: of a problem that is not frozen yet, or so many times as long.
BUDGET_S, TIMES_AS_LONG, LEAST_BUDGET_S = 400.0, 4.0, 30.0
ENDS = (0, 4)  # of the command: a plan, or that none fits
HEAD = (
    "group",
    "problems",
    "iteration, ms",
    "above bound, mean",
    "worst",
    "plan to simulation, worst",
    "planning, s",
    "longest, s",
)


def main() -> None:
    """Plan, compare, and freeze where asked to."""
    groups = {name: problem.group for name, problem in PROBLEMS.items()}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="those that take seconds; under 3 minutes")
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, metavar="NAME")
    parser.add_argument("--group", nargs="+", choices=sorted(set(groups.values())))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--same-plans", action="store_true", help="every other plan file breaks a tolerance")
    parser.add_argument("--twice", action="store_true", help="plan a second time: the same bytes?")
    parser.add_argument("--again", action="store_true", help="plan what was planned by this code, too")
    parser.add_argument("--freeze", action="store_true", help="write what was planned into the table")
    asked = parser.parse_args()
    if asked.jobs < 1:
        parser.error(f"argument --jobs: {asked.jobs}, expected 1 or more")
    try:
        frozen = read_table() if TABLE.exists() else Table("", "", {})
    except ValueError as error:
        print(
            f"{error}\nTake it from the repository again, or remove it and run with --freeze.",
            file=sys.stderr,
        )
        sys.exit(3)
    names = [
        name
        for name in PROBLEMS
        if (not asked.only or name in asked.only)
        and (not asked.group or groups[name] in asked.group)
        and (not asked.quick or is_quick(frozen.rows.get(name)))
    ]
    rows = planned(names, frozen.rows, asked.jobs, again=asked.again)
    broken: list[str] = []
    if asked.twice:
        second = planned(names, frozen.rows, asked.jobs, again=True)
        broken += other_plans(rows, second, "planned a second time, another plan file")
    print("\n" + table(HEAD, summary(rows, groups)) + "\n")
    say_over_bounds(rows)
    say_far_off(rows)
    faulty = [name for name, row in rows.items() if row.exit_code not in ENDS or row.violations]
    if asked.freeze and faulty:
        broken.append(f"nothing is frozen: faults in {', '.join(faulty)}; see {FOLDER}/NAME/output.txt")
    elif asked.freeze:
        kept = {name: rows.get(name) or frozen.rows.get(name) for name in PROBLEMS}
        write_table(
            Table(
                machine(),
                datetime.now(tz=UTC).date().isoformat(),
                {name: row for name, row in kept.items() if row is not None},
            )
        )
        print(f"wrote {TABLE}: {len(rows)} problems")
    else:
        found = compare(frozen.rows, rows, groups)
        broken += found.broken
        others = list(other_plans(frozen.rows, rows, "another plan file than the frozen one"))
        broken += others if asked.same_plans else []
        print("".join(f"note: {line}\n" for line in found.pointed_out), end="")
        print(f"{len(rows)} problems: {len(others)} plan files differ from the frozen ones")
    print("".join(f"BROKEN: {line}\n" for line in broken), end="")
    sys.exit(1 if broken else 0)


def is_quick(row: Row | None) -> bool:
    """Whether a problem is planned in seconds."""
    return row is not None and row.planning_s <= QUICK_S


def planned(names: Sequence[str], frozen: Mapping[str, Row], jobs: int, *, again: bool) -> dict[str, Row]:
    """The rows of these problems, those that take longest first."""
    code = code_digest()
    kept = {} if again else kept_rows(code)
    rows = {name: kept[name] for name in names if name in kept and is_of(kept[name], PROBLEMS[name])}
    left = sorted(
        (name for name in names if name not in rows),
        key=lambda name: -frozen[name].planning_s if name in frozen else 0.0,
    )
    same = {name: frozen[name] for name in left if name in frozen and is_of(frozen[name], PROBLEMS[name])}
    with ProcessPoolExecutor(jobs) as pool:
        running = {pool.submit(measured, PROBLEMS[name], budget_s(same.get(name))): name for name in left}
        for done in as_completed(running):
            name, row = running[done], done.result()
            rows[name] = row
            keep(code, name, row)
            print(said(name, row, same.get(name)), flush=True)
    return {name: rows[name] for name in names}


def is_of(row: Row, problem: Problem) -> bool:
    """Whether a row is of the problem as it is."""
    return row.inputs == inputs_digest(problem)


def budget_s(frozen: Row | None) -> float:
    """Processor seconds."""
    return BUDGET_S if frozen is None else max(LEAST_BUDGET_S, TIMES_AS_LONG * frozen.planning_s)


def said(name: str, row: Row, frozen: Row | None) -> str:
    """A line."""
    if row.exit_code != 0:
        end = "stopped" if row.exit_code is None else f"exit code {row.exit_code}"
        return f"{name:48s} {end}, {row.planning_s:.1f} s"
    ratio = f"{row.simulated_s / frozen.simulated_s:7.4f} x" if frozen and frozen.has_plan else " " * 9
    return (
        f"{name:48s} {row.simulated_s * 1e3:9.2f} ms {ratio}  plan {row.off_simulation:+6.1%}  "
        f"bounds {said_bounds(row)} ms  above {row.above_bound:+7.1%}  planned in {row.planning_s:6.1f} s"
        + (f"  BREAKS {len(row.violations)} rules" if row.violations else "")
    )


def said_bounds(row: Row) -> str:
    """In milliseconds, by compute of whole batches, with memory, and with links."""
    return " ".join(f"{row.bounds_s[name] * 1e3:.2f}" if name in row.bounds_s else "-" for name in BOUNDS)


def say_over_bounds(rows: Mapping[str, Row]) -> None:
    """The geometric mean of plan over bound, of all plans that have it."""
    for name in BOUNDS:
        ratios = [row.over_bound(name) for row in rows.values() if row.has_plan and name in row.bounds_s]
        if ratios:
            print(f"plan over bound, {name}: {geometric_mean(ratios):.4f} in the geometric mean")


def other_plans(rows: Mapping[str, Row], others: Mapping[str, Row], what: str) -> Iterator[str]:
    """Which plan files differ."""
    for name, row in others.items():
        if name in rows and row.plan != rows[name].plan:
            yield f"{name}: {what}"


def say_far_off(rows: Mapping[str, Row]) -> None:
    """How many plans are far from their simulation, and how many may be."""
    share = Tolerances().off_simulation
    far = far_off(rows, share)
    print(
        f"more than {share:.0%} from their simulation: {len(far)} plans "
        f"(one of twenty would be {allowed_far_off(rows)}): {', '.join(far) or 'none'}"
    )


def machine() -> str:
    """The processor, and how many of it."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores, {lines[0] if lines else platform.processor()}"


if __name__ == "__main__":
    main()
