"""Memory that workers take until they could train, with parameters whole on every device and shared out.

    python scripts/bench_start.py [--devices N] [--workloads NAME ...]

Starts N processes of this machine and reads how much their resident memory grows at most (Linux). Profiles
are estimated. Prints a table; the parameters' own bytes are for one device that holds all of them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench_memory import ROOT, torchrun
from memory_bench.variants import VARIANTS, Estimates, plan_variant, write_run, write_variant

from spindle_cli.costs.memory import op_param_bytes, parameter_block
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import Profile
from spindle_cli.units import MIB

MEMORY_GIB = 16
NAMES = ("as it is", "gradients shared out", "parameters shared out")

WORKLOADS = ROOT / "configs" / "workloads"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2, metavar="N")
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=("llama-laptop", "llama-300m"),
        choices=sorted(path.stem for path in WORKLOADS.glob("*.yaml")),
        metavar="NAME",
    )
    parser.add_argument("--variants", nargs="+", default=NAMES, choices=list(VARIANTS), metavar="NAME")
    asked = parser.parse_args()
    print("| workload | devices | variant | parameters, MiB | at most until a step could begin, MiB |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for workload in asked.workloads:
            for name in asked.variants:
                to = Path(folder) / f"{workload}-{name.replace(' ', '-')}"
                print(line(workload, name, asked.devices, to), flush=True)


def line(workload: str, name: str, count: int, folder: Path) -> str:
    """A row of the table: of the rank that takes most."""
    folder.mkdir()
    cluster = roomy(Cluster.read(ROOT / "configs" / "clusters" / f"cpu-{count}.yaml"))
    source = write_variant(WORKLOADS / f"{workload}.yaml", VARIANTS[name], folder)
    profile = Estimates(cluster, folder).of(source, VARIANTS[name])
    plan = plan_variant(profile, VARIANTS[name], cluster, "sequential", folder)
    assert plan is not None, "these variants can be planned for any workload"
    write_run(plan, source, folder / "runs" / "run", 1)
    torchrun(count, str(folder / "runs"), module="memory_bench.start")
    taken = max(int((folder / "runs" / "run" / f"start.{rank}").read_text()) for rank in range(count))
    whole = parameter_bytes(profile) / MIB
    return f"| {workload} | {count} | {name} | {whole:.0f} | {taken / MIB:.0f} |"


def roomy(cluster: Cluster) -> Cluster:
    """The cluster with devices that hold any of these workloads whole."""
    nodes = tuple(group.model_copy(update={"memory_gib": MEMORY_GIB}) for group in cluster.nodes)
    return cluster.changed(nodes=nodes)


def parameter_bytes(profile: Profile) -> int:
    """Of all parameters, each once."""
    found: dict[tuple[str, int], int] = {}
    for metaop in profile.metaops:
        for op in range(metaop.num_ops):
            block = parameter_block(metaop, op)
            found[block] = max(found.get(block, 0), op_param_bytes(metaop, op))
    return sum(found.values())


if __name__ == "__main__":
    main()
