"""The cluster file of two hosts, with the link that is measured between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runtime_bench.hosts import Host, python, run_on_both
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup

_SCRIPTS = Path(__file__).parent.parent


def measured_cluster(hosts: Sequence[Host], mbit_per_s: int, folder: Path) -> Cluster:
    """The hosts with a CPU each, and the link as it is now.

    Args:
        mbit_per_s: to which the link was shaped; for the name alone.
        folder: for what the measurement writes.
    """
    store, out = folder / "link.store", folder / "link.json"
    store.unlink(missing_ok=True)
    command = python("-m", "runtime_bench.link_between", store, out)
    run_on_both(hosts, [command, command], timeout_s=120, folder=_SCRIPTS)
    link = Link.model_validate_json(out.read_text(encoding="utf-8"))
    return Cluster(
        name=f"two-hosts-{mbit_per_s}",
        nodes=(NodeGroup(count=len(hosts), devices=1, device="cpu", memory_gib=4),),
        links=Links(intra_node=link, inter_node=link),
    )
