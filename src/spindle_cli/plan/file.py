"""Writing a plan as YAML that a person can open: one slice a line. Same plan, same bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

from spindle_cli.errors import InputError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.writing import write_text
from spindle_cli.plan.sharing_out import said_apart
from spindle_cli.plan.types import Plan, PlanMetaOp, PlannedSet, Predicted, Slice, Wave
from spindle_cli.profile.metagraph import require_equal_batches
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile

_BaseDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_ONE_LINE = 2**31 - 1  # characters: a row is never wrapped


def read_plan(path: Path) -> Plan:
    """Read and validate a plan file that says all that is needed to predict or run it.

    Raises:
        InputError: missing, malformed, of another kind or version, or without `metaops`.
    """
    plan = Plan.read(path)
    if not plan.metaops:
        raise InputError(
            f"{path}: the key 'metaops' is missing: what the slices run, which the profile says",
            hint=f"Add it with `spindle check {path} --profile PROFILE.json -o COMPLETE.yaml`, "
            "and give this command the complete plan.",
        )
    require_equal_batches(plan.metaops, path)
    return plan


def read_with_profile(path: Path, profile_path: Path | None) -> tuple[Plan, Profile | None]:
    """Read a plan, which may lack `metaops`, and the profile that it was made from.

    A plan may name its profile by the hash of its canonical JSON, as ours do, or of the file's bytes, as
    `sha256sum` prints it; the plan returned has the first.

    Raises:
        InputError: one of them is missing, malformed, or of another kind or version, or the profile is of
            another workload or has no curves of one of the plan's types of device.
    """
    plan = Plan.read(path)
    require_equal_batches(plan.metaops, path)
    if profile_path is None:
        return plan, None
    profile = Profile.read(profile_path)
    require_equal_batches(profile.metaops, profile_path)
    if plan.workload.fingerprint != profile.workload.fingerprint:
        raise InputError(
            f"{profile_path}: a profile of workload {profile.workload.name!r} "
            f"({profile.workload.fingerprint}); {path} is for {plan.workload.name!r} "
            f"({plan.workload.fingerprint})",
            hint="Give the profile that the plan was made from, or plan again with this one.",
        )
    try:
        seen_on(profile, plan.cluster)
    except InputError as error:
        raise InputError(f"{profile_path}: {error.message}", hint=error.hint) from None
    known_as = {profile.sha256(), "sha256:" + hashlib.sha256(profile_path.read_bytes()).hexdigest()}
    if "sha256:" + plan.profile.sha256.removeprefix("sha256:") in known_as:
        reference = plan.profile.model_copy(update={"sha256": profile.sha256()})
        plan = plan.model_copy(update={"profile": reference})
    return plan, profile


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan file, whole or not at all.

    Raises:
        InputError: it cannot be written there.
    """
    write_text(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """The plan as YAML text; numbers round-trip exactly."""
    return yaml.dump(
        _plan_data(plan),
        Dumper=_PlanDumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=_ONE_LINE,
    )


class _Row(dict[str, Any]):
    """A mapping that is written in one line."""


class _PlanDumper(_BaseDumper):  # type: ignore[misc]  # the base is untyped
    """Block style outside, `_Row`s and lists of numbers and names in one line each."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base's name
        """What stands in a plan twice is written twice."""
        return True


def _represent_row(dumper: yaml.SafeDumper, row: _Row) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", row.items(), flow_style=True)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    in_one_line = not any(isinstance(item, dict | str) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=in_one_line)


_PlanDumper.add_representer(_Row, _represent_row)
_PlanDumper.add_representer(list, _represent_list)


def _plan_data(plan: Plan) -> dict[str, Any]:
    """All of the plan that is not the default, in the order of its type's fields."""
    data: dict[str, Any] = plan.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if plan.sharding:
        data |= said_apart(plan.sharding)
    always = {"schema": plan.schema_, "strategy": plan.strategy}
    rows = {"workload": _Row(data["workload"]), "profile": _Row(data["profile"])}
    predicted = _predicted_data(plan.predicted)
    metaops = [_Row(_metaop_data(metaop)) for metaop in plan.metaops]
    waves = [_wave_data(wave) for wave in plan.waves]
    written = {
        "cluster": _cluster_data(plan.cluster),
        "predicted": predicted,
        "metaops": metaops,
        "waves": waves,
    }
    if plan.task_sets:
        written["task_sets"] = [_set_data(task_set) for task_set in plan.task_sets]
    if plan.local_sgd is not None:
        written["local_sgd"] = _Row(plan.local_sgd.model_dump(mode="json"))
    if plan.islands is not None:
        of_all = {"cluster": _cluster_data(plan.islands.cluster)}
        written["islands"] = plan.islands.model_dump(mode="json", exclude_none=True) | of_all
    return always | rows | data | rows | written


def _set_data(task_set: PlannedSet) -> dict[str, Any]:
    return {
        "tasks": list(task_set.tasks),
        "share": task_set.share,
        "predicted": _predicted_data(task_set.predicted),
        "waves": [_wave_data(wave) for wave in task_set.waves],
    }


def _predicted_data(predicted: Predicted) -> dict[str, Any]:
    data = predicted.model_dump(mode="json", exclude_none=True)
    if not predicted.host_memory_bytes:
        del data["host_memory_bytes"]
    return data


def _cluster_data(cluster: Cluster) -> dict[str, Any]:
    data = cluster.model_dump(mode="json", by_alias=True, exclude_none=True)
    between = [_Row(link) for link in data["links"].pop("between", ())]
    links: dict[str, Any] = {kind: _Row(link) for kind, link in data["links"].items()}
    links |= {"between": between} if between else {}
    return data | {"nodes": [_Row(group) for group in data["nodes"]], "links": links}


def _metaop_data(metaop: PlanMetaOp) -> dict[str, Any]:
    """All that is not the default; the curve last."""
    data = metaop.model_dump(mode="json", exclude={"curve", "shares"}, exclude_defaults=True)
    if metaop.shares:
        data["shares"] = [share.model_dump(mode="json", exclude_defaults=True) for share in metaop.shares]
    data["curve"] = [
        point.model_dump(
            mode="json", include={"num_devices", "dp", "tp", "forward_s", "backward_s", "source"}
        )
        | ({"device": point.device} if point.device is not None else {})
        | ({"communication_s": point.communication_s} if point.communication_s else {})
        for point in metaop.curve
    ]
    return data


def _wave_data(wave: Wave) -> dict[str, Any]:
    slices = [_Row(_slice_data(slice_)) for slice_ in wave.slices]
    return {"index": wave.index, "start_s": wave.start_s, "end_s": wave.end_s, "slices": slices}


def _slice_data(slice_: Slice) -> dict[str, Any]:
    """The contract's keys; `recompute`, `selective` and `offload` only where they are on, others that may be
    absent where they say something.
    """
    data = slice_.model_dump(mode="json")
    if not slice_.recompute:
        del data["recompute"]
    if not slice_.selective:
        del data["selective"]
    if not slice_.offload:
        del data["offload"]
    if slice_.backward_s is None:
        del data["backward_start_s"], data["backward_end_s"]
    if slice_.rows is None:
        del data["rows"]
    if slice_.micro_batches == 1:
        del data["micro_batch"]
    return data
