"""`spindle compare`."""

from __future__ import annotations

from spindle_cli.cli import output
from spindle_cli.cli.inputs import read_profile_and_cluster
from spindle_cli.cli.options import (
    AssumeSameDeviceOption,
    BatchOption,
    ClusterOption,
    JsonOption,
    ProfileArgument,
    WithoutOption,
)


def compare(
    profile: ProfileArgument,
    cluster: ClusterOption,
    without: WithoutOption = None,
    batch: BatchOption = None,
    assume_same_device: AssumeSameDeviceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare all strategies on a profile and a cluster.

    What an iteration costs, and the energy that it draws with its CO2, are told where the cluster file says
    prices, or watts are known of its types.

    What if: leave a task out with --without, change a task's batch size with --batch, or give another
    cluster.
    """
    from spindle_cli.questions.compare import compare as ask
    from spindle_cli.questions.compare import comparison_table, spending_table
    from spindle_cli.questions.edit import edited
    from spindle_cli.questions.spending import unknown

    read, goal = read_profile_and_cluster(profile, cluster, assume_same_device=assume_same_device)
    comparison = ask(edited(read, without or [], batch or []), goal)
    spending = spending_table(comparison)
    tables = (comparison_table(comparison), *([] if spending is None else [spending]))
    output.report(as_json, comparison, *tables)
    for row in comparison.strategies:
        for note in (*row.notes, *([row.failure] if row.failure else [])):
            output.note(f"{row.strategy}: {note}")
    for note in unknown(goal):
        output.note(note)
