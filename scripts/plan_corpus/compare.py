"""Plans against those that were frozen: which tolerances are broken, and what has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from plan_corpus.rows import Row

# Of a planning time of less than this, the start of the command is most.
SHORT_S = 3.0


@dataclass(frozen=True)
class Tolerances:
    """What is allowed of a corpus.

    Attributes:
        longer: that a simulated iteration may be, over the frozen one.
        group_longer: the same of the geometric mean of a group.
        off_simulation: that a plan's iteration may be away from the simulated one, either way, except for
            one plan of twenty, or as many as in the table where these are more.
        slower: that planning may take, over the frozen time, before it is pointed out.
    """

    longer: float = 0.02
    group_longer: float = 0.005
    off_simulation: float = 0.03
    slower: float = 0.10


@dataclass(frozen=True)
class Comparison:
    """`broken`: tolerances, one line each. `pointed_out`: what is no fault: times, other plans, gains."""

    broken: tuple[str, ...]
    pointed_out: tuple[str, ...]


def compare(
    frozen: Mapping[str, Row],
    rows: Mapping[str, Row],
    groups: Mapping[str, str],
    tolerances: Tolerances = Tolerances(),
) -> Comparison:
    """Compare the problems in `rows`; the table may have more.

    Args:
        groups: of each problem.
    """
    broken: list[str] = []
    noted: list[str] = []
    ratios: dict[str, list[float]] = {}
    for name, row in rows.items():
        old = frozen.get(name)
        if old is None:
            broken.append(f"{name}: not in the table: freeze it")
            continue
        if row.inputs != old.inputs:
            broken.append(f"{name}: its files or options are not what was frozen: freeze it again")
            continue
        broken += _of_one(name, old, row, tolerances)
        if not (row.has_plan and old.has_plan):
            if row.has_plan:
                noted.append(f"{name}: a plan where there was none")
            continue
        ratio = row.simulated_s / old.simulated_s
        ratios.setdefault(groups[name], []).append(ratio)
        if ratio < 1 - tolerances.longer:
            noted.append(f"{name}: {1 - ratio:.1%} shorter than the frozen plan")
    for group, own in ratios.items():
        mean = geometric_mean(own)
        if mean > (1 + tolerances.group_longer) * (1 + 1e-9):
            broken.append(
                f"group {group}: iterations {mean - 1:.2%} longer in the geometric mean; at most "
                f"{tolerances.group_longer:.1%} is allowed"
            )
    broken += _off_simulation(frozen, rows, tolerances)
    noted += _slower(frozen, rows, tolerances)
    return Comparison(tuple(broken), tuple(noted))


def _of_one(name: str, old: Row, row: Row, tolerances: Tolerances) -> Iterator[str]:
    if row.violations:
        yield f"{name}: the plan breaks rules: {'; '.join(row.violations)}"
    elif row.exit_code is None:
        yield f"{name}: stopped after {row.planning_s:.0f} s of planning, which took {old.planning_s:.0f} s"
    elif row.exit_code not in (0, old.exit_code):
        yield f"{name}: exit code {row.exit_code}; it was {old.exit_code}"
    elif row.has_plan and old.has_plan:
        longer = row.simulated_s / old.simulated_s - 1
        if longer > tolerances.longer + 1e-9:
            yield (
                f"{name}: {row.simulated_s * 1e3:.2f} ms, {longer:.2%} longer than the frozen plan's "
                f"{old.simulated_s * 1e3:.2f}; at most {tolerances.longer:.0%} is allowed"
            )


def far_off(rows: Mapping[str, Row], share: float) -> list[str]:
    """Of which problems plan and simulation are further apart than this."""
    return [name for name, row in rows.items() if row.has_plan and abs(row.off_simulation) > share + 1e-9]


def allowed_far_off(rows: Mapping[str, Row]) -> int:
    """One plan of twenty."""
    return sum(row.has_plan for row in rows.values()) // 20


def _off_simulation(
    frozen: Mapping[str, Row], rows: Mapping[str, Row], tolerances: Tolerances
) -> Iterator[str]:
    both = {name: frozen[name] for name in rows if name in frozen}
    far, were = (far_off(each, tolerances.off_simulation) for each in (rows, both))
    allowed = max(allowed_far_off(rows), len(were))
    if len(far) > allowed:
        new = ", ".join(name for name in far if name not in were)
        yield (
            f"{len(far)} plans are more than {tolerances.off_simulation:.0%} from their simulation; at most "
            f"{allowed} may be; new: {new}"
        )


def _slower(frozen: Mapping[str, Row], rows: Mapping[str, Row], tolerances: Tolerances) -> Iterator[str]:
    ratios = {
        name: row.planning_s / frozen[name].planning_s
        for name, row in rows.items()
        if name in frozen and row.inputs == frozen[name].inputs and row.exit_code is not None
    }
    if ratios and median(ratios.values()) > 1 + tolerances.slower:
        yield f"planning takes {median(ratios.values()):.2f} times as long in the median: another machine?"
    typical = median(ratios.values()) if ratios else 1.0
    for name, ratio in ratios.items():
        if ratio > (1 + tolerances.slower) * max(1.0, typical) and rows[name].planning_s > SHORT_S:
            yield f"{name}: planned in {rows[name].planning_s:.1f} s, {ratio:.2f} times as long as it did"


def summary(rows: Mapping[str, Row], groups: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """Of each group: problems, milliseconds in the geometric mean, above the bound in the mean and at worst,
    plan and simulation apart at worst, planning in seconds together and at most.
    """
    for group in dict.fromkeys(groups[name] for name in rows):
        every = [row for name, row in rows.items() if groups[name] == group]
        planned = [row for row in every if row.has_plan]
        if not planned:
            continue
        above = [row.above_bound for row in planned]
        yield (
            group,
            str(len(every)),
            f"{geometric_mean(row.simulated_s for row in planned) * 1e3:.1f}",
            f"{sum(above) / len(above):.1%}",
            f"{max(above):.1%}",
            f"{max((row.off_simulation for row in planned), key=abs):+.1%}",
            f"{sum(row.planning_s for row in every):.0f}",
            f"{max(row.planning_s for row in every):.0f}",
        )
