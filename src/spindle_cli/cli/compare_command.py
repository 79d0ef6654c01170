"""`spindle compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spindle_cli.cli import output
from spindle_cli.cli.inputs import read_profile_and_cluster
from spindle_cli.cli.options import (
    AddOption,
    AssumeSameDeviceOption,
    BatchOption,
    ClusterOption,
    JsonOption,
    ProfileArgument,
    WithoutOption,
)

if TYPE_CHECKING:
    from spindle_cli.files.cluster import Cluster
    from spindle_cli.profile.types import Profile


def compare(
    profile: ProfileArgument,
    cluster: ClusterOption,
    add: AddOption = None,
    without: WithoutOption = None,
    batch: BatchOption = None,
    assume_same_device: AssumeSameDeviceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare all strategies on a profile and a cluster.

    What an iteration costs, and the energy that it draws with its CO2, are told where the cluster file says
    prices, or watts are known of its types.

    What if: leave a task out with --without, change a task's batch size with --batch, or give another
    cluster. With --add, every strategy on the cluster as it is and with each addition, as whole nodes of that
    type's group; it says which addition is best by time, by money and by energy, if any is.
    """
    from spindle_cli.questions.compare import compare as ask
    from spindle_cli.questions.compare import comparison_table, spending_table
    from spindle_cli.questions.edit import edited
    from spindle_cli.questions.spending import unknown

    read, goal = read_profile_and_cluster(profile, cluster, assume_same_device=assume_same_device)
    read = edited(read, without or [], batch or [])
    if add:
        _tell_additions(read, goal, add, as_json=as_json)
        return
    comparison = ask(read, goal)
    spending = spending_table(comparison)
    tables = (comparison_table(comparison), *([] if spending is None else [spending]))
    output.report(as_json, comparison, *tables)
    for row in comparison.strategies:
        for note in (*row.notes, *([row.failure] if row.failure else [])):
            output.note(f"{row.strategy}: {note}")
    for note in unknown(goal):
        output.note(note)


def _tell_additions(profile: Profile, cluster: Cluster, texts: list[str], *, as_json: bool) -> None:
    from spindle_cli.questions.additions import parse_additions
    from spindle_cli.questions.compare_additions import (
        best_lines,
        compare_additions,
        compared_tables,
        no_plan_lines,
    )
    from spindle_cli.questions.spending import unknown

    result = compare_additions(profile, cluster, parse_additions(texts, profile, cluster))
    output.report(as_json, result, *compared_tables(result), best_lines(result))
    for note in (*no_plan_lines(result), *unknown(cluster, wanted=True)):
        output.note(note)
