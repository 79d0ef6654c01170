"""The planning problems, by group: each is a profile, a cluster and options of `spindle plan`."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mixed_clusters import cluster_named

from plan_corpus.drawn import KINDS, TEN_TASKS, drawn_tasks, read_tasks
from plan_corpus.tasks import profile_of
from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.profile.types import Profile

# Profiles of the paper's workloads, estimated as scripts/paper_profiles.py and bench_mixed_plan.py do. Kept,
# because estimating takes longer than planning, and other estimates would be other problems.
PROFILES = Path(__file__).parent / "profiles"
SIZE_OF_BATCHES = 64  # on more devices, batches are as many times larger
HOST = Link(latency_us=10, bandwidth_gb_per_s=25)
CHAIN = "train 256: model 2048x512 24"
# Five fast nodes and one that is slow, over Ethernet.
SIX_NODES = {
    "schema": "spindle.cluster/1",
    "name": "six-nodes",
    "nodes": [
        {"name": "fast", "count": 5, "devices": 4, "device": "v100-32gb", "memory_gib": 32, "nics": 1},
        {"name": "slow", "count": 1, "devices": 4, "device": "p100-16gb", "memory_gib": 16, "nics": 1},
    ],
    "links": {
        "intra_node": {"latency_us": 10, "bandwidth_gb_per_s": 10},
        "inter_node": {"latency_us": 50, "bandwidth_gb_per_s": 1.3},
    },
}


@dataclass(frozen=True)
class Problem:
    """What is planned.

    Attributes:
        group: whose geometric mean is compared.
        work: tasks of a kind with their seed and number, 'graphs-3-10'; lines that say them; or the name of
            a kept profile.
        on: name of a cluster (scripts/mixed_clusters.py), or 'six-nodes'.
        memory_gib: of every device; None: as the cluster has.
        options: of `spindle plan`.
        is_sharded: whether the optimizer's state is shared out.
        task_sets, islands: what not every step runs or sums (`plan_corpus.tasks.profile_of`).
        has_host: whether activations may be moved to the host.
    """

    name: str
    group: str
    work: str
    on: str
    memory_gib: float | None = None
    options: tuple[str, ...] = ()
    is_sharded: bool = True
    task_sets: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    islands: int | None = None
    has_host: bool = False

    def cluster(self) -> Cluster:
        """Of the cluster file."""
        if self.on == "six-nodes":
            return Cluster.from_data(SIX_NODES, where=self.name)
        cluster = cluster_named(self.on, self.memory_gib)
        if self.has_host:
            cluster = cluster.changed(links=cluster.links.model_copy(update={"host": HOST}))
        return cluster

    def profile_text(self) -> str:
        """The profile file."""
        cluster = self.cluster()
        kind, *drawn = self.work.rsplit("-", 2)
        if ":" in self.work:
            tasks = read_tasks(self.work)
        elif kind in KINDS:
            scale = max(1, cluster.num_devices // SIZE_OF_BATCHES)
            seed, count = map(int, drawn)
            tasks = drawn_tasks(kind, seed, count, scale)
        else:
            return lzma.decompress((PROFILES / f"{self.work}.json.xz").read_bytes()).decode()
        profile = profile_of(
            self.name,
            tasks,
            tuple(cluster.types),
            most_devices=cluster.num_devices,
            is_sharded=self.is_sharded,
            task_sets=self.task_sets,
            islands=self.islands,
        )
        return _written(profile)

    def cluster_text(self) -> str:
        """The cluster file, as JSON, which is YAML too."""
        return _written(self.cluster())


def _written(file: Profile | Cluster) -> str:
    """Without what is as it is by default, so that a key that is new to such files changes no problem."""
    data = file.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return json.dumps({"schema": file.schema_, **data}) + "\n"


def _on(*problems: Problem, group: str) -> tuple[Problem, ...]:
    return tuple(replace(problem, group=group) for problem in problems)


def _at(work: str, on: str, memory_gib: float | None = None, *, unsharded: bool = False) -> Problem:
    """A problem called after what it is."""
    short = f"-{memory_gib:g}gib" if memory_gib else ""
    whole = "-unsharded" if unsharded else ""
    return Problem(f"{work}-on-{on}{short}{whole}", "", work, on, memory_gib, is_sharded=not unsharded)


_A8, _A16, _A32, _A64, _A256, _A1024 = (f"a800-{nodes}x8" for nodes in (1, 2, 4, 8, 32, 128))

AMPLE = _on(
    _at("graphs-0-4", _A8),
    _at("graphs-1-6", _A16),
    _at("graphs-2-8", _A32),
    _at("graphs-3-10", _A64),
    _at("contrastive-0-4", _A8),
    _at("contrastive-1-10", _A64),
    _at("encoder-decoders-0-3", _A8),
    _at("encoder-decoders-1-7", _A64),
    _at("language-0-3", _A16),
    _at("language-1-4", _A64),
    _at("experts-0-3", _A32),
    group="ample",
)
PAPER = _on(
    _at("clip-4", _A16),
    _at("clip-10", _A64),
    _at("ofasys-4", _A8),
    _at("ofasys-7", _A32),
    _at("qwen-val", _A64),
    group="paper",
)
LARGE = _on(
    _at("graphs-4-10", _A256),
    _at("contrastive-2-10", _A256),
    _at("encoder-decoders-2-7", _A256),
    _at("contrastive-3-6", _A1024),
    _at("language-3-6", _A1024),
    group="large",
)
SHORT = _on(
    Problem("ten-tasks-24gib", "", TEN_TASKS, _A64, 24),
    Problem("ten-tasks-40gib", "", TEN_TASKS, _A64, 40),
    _at("graphs-0-4", _A8, 24),
    _at("graphs-1-6", _A16, 24),
    _at("graphs-5-10", _A64, 24),
    _at("encoder-decoders-1-7", _A64, 24),
    _at("language-0-3", _A16, 24),
    _at("language-1-4", _A64, 24),
    _at("graphs-3-10", _A64, 40, unsharded=True),
    _at("language-4-4", _A32, 40, unsharded=True),
    _at("qwen-val", _A8),
    _at("qwen-val", _A16),
    group="short",
)
LINKS = _on(
    _at("graphs-6-8", f"{_A64}-free"),
    _at("contrastive-1-10", f"{_A64}-free"),
    _at("encoder-decoders-1-7", f"{_A64}-free", 24),
    _at("language-2-6", f"{_A256}-free"),
    _at("graphs-2-8", f"{_A32}-at-3"),
    _at("language-0-3", f"{_A16}-at-1.25"),
    _at("contrastive-1-10", f"{_A64}-at-3"),
    group="links",
)
TYPES = _on(
    _at("graphs-0-4", "h800-8-h20-8"),
    _at("graphs-1-6", "h800-8-h20-8", 24),
    _at("contrastive-4-6", "h800-16-h20-16"),
    _at("language-5-4", "h800-32-h20-32"),
    _at("graphs-7-6", "h800-16-a800-16-h20-32", 40),
    _at("encoder-decoders-3-4", "h800-16-a800-16-h20-32"),
    Problem("ten-tasks-40gib-on-h800-32-h20-32", "", TEN_TASKS, "h800-32-h20-32", 40),
    _at("language-6-3", "h800-8-h20-8-at-3"),
    Problem("six-nodes", "", "train 96: model 1024x512 24", "six-nodes"),
    group="types",
)
ASKED = _on(
    Problem("chain-64-micro-batches", "", CHAIN, _A16, 24, ("--micro-batches", "train=64")),
    Problem("chain-at-1.25", "", CHAIN, f"{_A16}-at-1.25", 24),
    Problem("micro-batches", "", "language-7-3", _A16, None, ("--micro-batches", "t0=4")),
    Problem("shard-all", "", "language-0-3", _A16, None, ("--shard", "language=parameters")),
    Problem("shard-kept", "", "encoder-decoders-0-3", _A16, None, ("--shard", "decoder=parameters-kept")),
    Problem("offload", "", "contrastive-0-4", _A8, 10, ("--offload",), has_host=True),
    Problem("sums-by-rows", "", "encoder-decoders-4-4", f"{_A16}-at-3", None, ("--sums", "rows")),
    Problem("shard-by-speed", "", "graphs-0-4", "h800-8-h20-8", None, ("--shard-by", "speed")),
    Problem("equal-shares", "", "graphs-0-4", "h800-8-h20-8", None, ("--equal-shares",)),
    Problem(
        "task-sets",
        "",
        "contrastive-0-4",
        _A16,
        task_sets={("t0", "t1"): 0.5, ("t2",): 0.25, ("t1", "t3"): 0.25},
    ),
    Problem("islands", "", "language-0-3", f"{_A32}-at-1.25", islands=4),
    Problem("no-plan", "", "language-0-3", _A8, 2),
    group="asked",
)

PROBLEMS = {problem.name: problem for problem in (*AMPLE, *PAPER, *LARGE, *SHORT, *LINKS, *TYPES, *ASKED)}
