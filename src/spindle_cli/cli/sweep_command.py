"""`spindle sweep`."""

from __future__ import annotations

from spindle_cli.cli import output
from spindle_cli.cli.inputs import read_profile_and_cluster
from spindle_cli.cli.options import (
    AddOption,
    AssumeSameDeviceOption,
    BatchOption,
    ClusterOption,
    DevicesOption,
    JsonOption,
    PriceOption,
    ProfileArgument,
    StrategyOption,
    WithoutOption,
)
from spindle_cli.errors import UsageError


def sweep(
    profile: ProfileArgument,
    cluster: ClusterOption,
    devices: DevicesOption = None,
    add: AddOption = None,
    price: PriceOption = None,
    strategy: StrategyOption = "spindle",
    without: WithoutOption = None,
    batch: BatchOption = None,
    assume_same_device: AssumeSameDeviceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan for several numbers of devices, or with more of one type.

    The first devices of the cluster are taken, node by node; beyond its size, devices are added to its last
    node. The knee is the last number of devices up to which each added device brings at least half the speed
    per device before it.

    With --add, which kind of device to add: each addition is planned by itself, as whole nodes of that type's
    group, and the best by time, by money and by energy are marked.
    """
    from spindle_cli.questions.answers import Question

    if add and devices is not None:
        raise UsageError(
            "--add and --devices: they are two questions; expected one of them",
            hint="--add plans for the cluster as it is and with more of it, --devices for parts of it.",
        )
    read, goal = read_profile_and_cluster(profile, cluster, assume_same_device=assume_same_device)
    question = Question(read, goal, without or (), batch or (), add or ())
    output.answer(as_json, question.sweep(devices, strategy, price))
