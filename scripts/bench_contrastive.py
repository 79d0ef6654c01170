"""What splitting contrastive losses gains: plans of the paper's CLIP workloads with these losses split over
the batch, and with each on one device.

    python scripts/bench_contrastive.py [--devices N ...] [--workloads NAME ...]

Estimated for A800s, 8 a node (scripts/paper_profiles.py). Prints iterations, and of them the transfers
between ops; what split losses gather inside of their passes is time of their own.
"""

from __future__ import annotations

import argparse

from bench_strategies import DEVICES
from paper_profiles import cluster_path, read_profile

from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.units import MS

WORKLOADS = ("clip-4", "clip-7", "clip-10")


def main() -> None:
    """Plan both and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", nargs="+", type=int, choices=DEVICES, default=DEVICES[-2:], metavar="N")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS, metavar="NAME")
    given = parser.parse_args()
    print(
        "| workload, devices | each loss on one device: iteration, transfers | split: iteration, transfers |"
    )
    print("|---|---:|---:|")
    for workload in given.workloads:
        for num_devices in given.devices:
            print(_row(workload, num_devices), flush=True)


def _row(workload: str, num_devices: int) -> str:
    profile, cluster = read_profile(workload, num_devices), Cluster.read(cluster_path(num_devices))
    plans = [make_plan(each, cluster, "spindle") for each in (_on_one_device(profile), profile)]
    return f"| {workload}, {num_devices:,} | {' | '.join(map(_said, plans))} |"


def _said(plan: Plan) -> str:
    predicted = plan.predicted
    return f"{predicted.iteration_s / MS:.0f} ms, {predicted.transfer_s / predicted.iteration_s:.1%}"


def _on_one_device(profile: Profile) -> Profile:
    """The profile with every op that gathers what it compares left whole."""
    return profile.model_copy(update={"metaops": tuple(map(_whole, profile.metaops))})


def _whole(metaop: MetaOpProfile) -> MetaOpProfile:
    if not any(each.kind == "gather" for each in metaop.batch_sums):
        return metaop
    alone = tuple(point for point in metaop.curve if (point.dp, point.tp) == (1, 1))
    return metaop.model_copy(update={"curve": alone, "batch_sums": (), "coupled": True, "fit": None})


if __name__ == "__main__":
    main()
