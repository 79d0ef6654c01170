"""`spindle compare`."""

from __future__ import annotations

from spindle_cli.cli import output
from spindle_cli.cli.options import BatchOption, ClusterOption, JsonOption, ProfileArgument, WithoutOption


def compare(
    profile: ProfileArgument,
    cluster: ClusterOption,
    without: WithoutOption = None,
    batch: BatchOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare all strategies on a profile and a cluster.

    What if: leave a task out with --without, change a task's batch size with --batch, or give another
    cluster.
    """
    from spindle_cli.files.cluster import Cluster
    from spindle_cli.profile.types import Profile
    from spindle_cli.questions.compare import compare as ask
    from spindle_cli.questions.compare import comparison_table
    from spindle_cli.questions.edit import edited

    asked = edited(Profile.read(profile), without or [], batch or [])
    comparison = ask(asked, Cluster.read(cluster))
    output.report(as_json, comparison, comparison_table(comparison))
    for row in comparison.strategies:
        for note in (*row.notes, *([row.failure] if row.failure else [])):
            output.note(f"{row.strategy}: {note}")
