"""`spindle sweep`."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from spindle_cli.files.cluster import Cluster
    from spindle_cli.plan.types import StrategyName
    from spindle_cli.profile.types import Profile


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
    from spindle_cli.questions.edit import edited
    from spindle_cli.questions.spending import unknown
    from spindle_cli.questions.sweep import default_counts, parse_counts, sweep_table
    from spindle_cli.questions.sweep import sweep as ask

    if add and devices is not None:
        raise UsageError(
            "--add and --devices: they are two questions; expected one of them",
            hint="--add plans for the cluster as it is and with more of it, --devices for parts of it.",
        )
    read, goal = read_profile_and_cluster(profile, cluster, assume_same_device=assume_same_device)
    read = edited(read, without or [], batch or [])
    if add:
        _tell_additions(read, goal, add, strategy, price, as_json=as_json)
        return
    counts = default_counts(goal) if devices is None else parse_counts(devices)
    result = ask(read, goal, counts, strategy, price)
    output.report(as_json, result, sweep_table(result))
    for note in unknown(goal, price):
        output.note(note)


def _tell_additions(
    profile: Profile,
    cluster: Cluster,
    texts: list[str],
    strategy: StrategyName,
    price: float | None,
    *,
    as_json: bool,
) -> None:
    from spindle_cli.questions.additions import added, additions, additions_table, best_lines, parse_additions
    from spindle_cli.questions.spending import unknown

    result = additions(profile, cluster, parse_additions(texts, profile, cluster), strategy, price)
    output.report(as_json, result, additions_table(result), best_lines(result))
    for row in (result.as_it_is, *result.additions):
        if row.failure is not None:
            output.note(f"no plan with {added(row)} added: {row.failure}")
    for note in unknown(cluster, price, wanted=True):
        output.note(note)
