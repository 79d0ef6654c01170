"""How the workloads of the memory benchmark are trained and planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from rich.console import Console

from memory_bench.replica_groups import by_two_replica_groups
from memory_bench.stages import in_two_stages
from spindle_cli.analysis.analyse import analyse_for_others
from spindle_cli.errors import NoPlanError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.request import RunRequest
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, StrategyName
from spindle_cli.profile.profiling import Audience, estimate_profile
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.workload.building.load import load_abstract

# Rooms that are tried, as shares of what a plan needs that has all it wants.
_ROOMS = (0.6, 0.7, 0.8, 0.9, 0.5, 0.4)


@dataclass(frozen=True)
class Variant:
    """What is not as in the workload file and as the planner would have it.

    `train`: train settings. `tp`: MetaOps that can be split so many ways are. `recompute`, `in_groups`:
    devices have less memory than the plan would take, so that ops are recomputed, or tasks run forward and
    backward in groups. `sharding`: what devices share out of all parameters. `by_replica_groups`: two replica
    groups share out all of them, by one plan whatever the strategy. `in_stages`: each task runs in two
    stages.
    """

    name: str
    train: Mapping[str, object] = field(default_factory=dict)
    tp: int = 1
    recompute: bool = False
    in_groups: bool = False
    sharding: Sharding | None = None
    by_replica_groups: bool = False
    in_stages: bool = False
    unequally: bool = False

    def is_of(self, plan: Plan) -> bool:
        """Whether a plan is what a lack of memory should make of it."""
        recomputes = any(piece.recompute for piece in plan.slices)
        in_groups = any(piece.backward_s is not None for piece in plan.slices)
        return (recomputes or not self.recompute) and (in_groups or not self.in_groups)


_BF16, _AUTOCAST = {"precision": "bf16"}, {"precision": "bf16-autocast"}
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("as it is"),
        Variant("accumulate 2", {"accumulate": 2}),
        Variant("whole optimizer state", {"shard_optimizer": False}),
        Variant("bf16", _BF16),
        Variant("bf16-autocast", _AUTOCAST),
        Variant("recomputed", recompute=True),
        Variant("recomputed, bf16-autocast", _AUTOCAST, recompute=True),
        Variant("loss in chunks", {"loss_chunks": 8}),
        Variant("whole optimizer state, loss in chunks", {"shard_optimizer": False, "loss_chunks": 8}),
        Variant("tp 2", tp=2),
        Variant("tp 2, bf16, accumulate 2", {**_BF16, "accumulate": 2}, tp=2),
        Variant("tp 2, bf16-autocast", _AUTOCAST, tp=2),
        Variant("tp 2, recomputed", tp=2, recompute=True),
        Variant("tasks in groups", in_groups=True),
        Variant("gradients shared out", sharding=Sharding.GRADIENTS),
        Variant("parameters shared out", sharding=Sharding.PARAMETERS),
        Variant("in two stages, in micro-batches", in_stages=True),
        Variant("by two replica groups", by_replica_groups=True),
        Variant("by two replica groups, other ranges", by_replica_groups=True, unequally=True),
        Variant(
            "by two replica groups, bf16, accumulate 2", {**_BF16, "accumulate": 2}, by_replica_groups=True
        ),
        Variant(
            "parameters shared out, tp 2, bf16, accumulate 2",
            {**_BF16, "accumulate": 2},
            tp=2,
            sharding=Sharding.PARAMETERS,
        ),
        Variant("tasks in groups, bf16, accumulate 2", {**_BF16, "accumulate": 2}, in_groups=True),
    )
}


def write_variant(source: Path, variant: Variant, folder: Path) -> Path:
    """The workload file of a variant, in a folder."""
    content = yaml.safe_load(source.read_text(encoding="utf-8"))
    content["train"] = {**content.get("train", {}), **variant.train}
    path = folder / "workload.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


class Estimates:
    """Estimated profiles of one workload for a cluster: one for all variants that are trained alike."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._found: dict[str, Profile] = {}

    def of(self, workload: Path, variant: Variant) -> Profile:
        """Of a variant, in whose workload file its train settings are."""
        key = repr(variant.train)
        if key not in self._found:
            said: list[str] = []
            audience = Audience(Console(quiet=True), said.append)
            path = self._folder / f"profile-{len(self._found)}.json"
            self._found[key] = estimate_profile(str(workload), path, audience, cluster=self._cluster)
        return self._found[key]


def plan_variant(
    profile: Profile, variant: Variant, cluster: Cluster, strategy: StrategyName, folder: Path
) -> Plan | None:
    """A plan of a variant, from its profile; None where it is no other than without the variant."""
    whole = tuple(_split(metaop, variant.tp) for metaop in profile.metaops)
    split = profile.model_copy(update={"metaops": whole})
    profile = Profile.model_validate(split.model_dump(by_alias=True))
    write_json(folder / "profile.json", profile)
    if variant.by_replica_groups:
        count = cluster.num_devices
        weights = tuple(range(1, count + 1)) if variant.unequally else ()
        return by_two_replica_groups(profile, cluster, weights)
    if variant.in_stages:
        return in_two_stages(profile, cluster)
    keys = [metaop.parameters or metaop.name for metaop in profile.metaops]
    shared_out = None if variant.sharding is None else dict.fromkeys(keys, variant.sharding)
    plan = make_plan(profile, cluster, strategy, sharding=shared_out)
    if not variant.is_of(plan):
        needed = max(plan.predicted.peak_memory_bytes)
        found = _short_of_memory(variant, profile, cluster, strategy, needed)
        if found is None:
            return None
        plan = found
    if variant.tp > 1 and all(piece.tp == 1 for piece in plan.slices):
        return None
    return plan


def write_memo(workload: Path, folder: Path) -> Path:
    """What workers need not find again, as `launch` hands it on; of all variants, whose layers are alike."""
    path = folder / "memo.json"
    write_json(path, analyse_for_others(load_abstract(str(workload)).workload, evaluates=True)[1])
    return path


def write_run(plan: Plan, workload: Path, folder: Path, steps: int, memo: Path | None = None) -> None:
    """Plan and request, as workers read them."""
    (folder / "workers").mkdir(parents=True)
    write_plan(folder / "plan.yaml", plan)
    request = RunRequest(
        plan=folder / "plan.yaml", workload=str(workload), memo=memo, steps=steps, run_dir=folder
    )
    write_json(folder / "request.json", request)


def _split(metaop: MetaOpProfile, tp: int) -> MetaOpProfile:
    """The MetaOp with points of this degree alone, where it has any."""
    curve = tuple(point for point in metaop.curve if point.tp == tp)
    return metaop.model_copy(update={"curve": curve}) if curve else metaop


def _short_of_memory(
    variant: Variant, profile: Profile, cluster: Cluster, strategy: StrategyName, needed: int
) -> Plan | None:
    """A plan for devices with too little memory."""
    for room in _ROOMS:
        nodes = tuple(
            group.model_copy(update={"memory_gib": room * needed / 2**30}) for group in cluster.nodes
        )
        small = Cluster(name=cluster.name, nodes=nodes, links=cluster.links)
        try:
            plan = make_plan(profile, small, strategy)
        except NoPlanError:
            continue
        if variant.is_of(plan):
            return plan
    return None
