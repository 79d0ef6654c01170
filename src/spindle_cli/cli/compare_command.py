"""`spindle compare`."""

from __future__ import annotations

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
    from spindle_cli.questions.answers import Question

    read, goal = read_profile_and_cluster(profile, cluster, assume_same_device=assume_same_device)
    output.answer(as_json, Question(read, goal, without or (), batch or (), add or ()).compare())
