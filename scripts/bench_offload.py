"""What a link to host memory gains: workloads of the paper planned without one, and with some links.

    python scripts/bench_offload.py [--workloads NAME ...] [--devices N ...] [--speeds GB_PER_S ...]

Prints a row of a Markdown table for each plan. PCIe 4 x16 carries about 25 GB/s (measured on an A100:
ZaidQureshi/bam issue 54), PCIe 5 x16 55 (stas00/ml-engineering network/README.md).
"""

from __future__ import annotations

import argparse

from paper_profiles import WORKLOADS, cluster_path, profile_path

from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.plan.make import make_plan
from spindle_cli.profile.types import Profile
from spindle_cli.simulate.run import simulate

LATENCY_US = 10


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["clip-7", "clip-10"])
    parser.add_argument("--devices", nargs="+", type=int, default=[8])
    parser.add_argument("--speeds", nargs="+", type=float, default=[25, 55])
    arguments = parser.parse_args()
    heads = ("workload", "devices", "GB/s", "iteration, ms", "simulated, ms")
    print("| " + " | ".join((*heads, "compute above bound", "moved", "recomputed")) + " |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for workload in arguments.workloads:
        for num_devices in arguments.devices:
            for speed in (None, *arguments.speeds):
                print(row(workload, num_devices, speed), flush=True)


def row(workload: str, num_devices: int, speed: float | None) -> str:
    """Of one plan; `speed`: of each device's link to host memory."""
    profile, cluster = (
        Profile.read(profile_path(workload, num_devices)),
        Cluster.read(cluster_path(num_devices)),
    )
    host = None if speed is None else Link(latency_us=LATENCY_US, bandwidth_gb_per_s=speed)
    links = cluster.links.model_copy(update={"host": host})
    plan = make_plan(profile, cluster.model_copy(update={"links": links}))
    predicted = plan.predicted
    cells = (
        workload,
        num_devices,
        "none" if speed is None else f"{speed:g}",
        f"{predicted.iteration_s * 1e3:,.1f}",
        f"{simulate(plan).iteration_s * 1e3:,.1f}",
        f"{predicted.compute_s / predicted.lower_bound_s - 1:.1%}",
        sum(piece.num_offloaded for piece in plan.slices),
        sum(piece.num_recomputed for piece in plan.slices),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
