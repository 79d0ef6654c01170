"""Writing a plan as YAML that a person can open: one slice a line. Same plan, same bytes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import write_text
from spindle_cli.plan.types import Plan, PlanMetaOp, ProfileRef, Slice
from spindle_cli.profile.types import Profile

# What YAML 1.1 reads as a string without quotes, also inside [] and {}.
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*|[0-9]+-[0-9]+")
_NOT_STRINGS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


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
    return plan


def read_with_profile(path: Path, profile_path: Path | None) -> tuple[Plan, Profile | None]:
    """Read a plan, which may lack `metaops`, and the profile that it was made from.

    A plan may name its profile by the hash of its canonical JSON, as ours do, or of the file's bytes, as
    `sha256sum` prints it; the plan returned has the first.

    Raises:
        InputError: one of them is missing, malformed, or of another kind or version, or the profile is of
            another workload.
    """
    plan = Plan.read(path)
    if profile_path is None:
        return plan, None
    profile = Profile.read(profile_path)
    if plan.workload.fingerprint != profile.workload.fingerprint:
        raise InputError(
            f"{profile_path}: a profile of workload {profile.workload.name!r} "
            f"({profile.workload.fingerprint}); {path} is for {plan.workload.name!r} "
            f"({plan.workload.fingerprint})",
            hint="Give the profile that the plan was made from, or plan again with this one.",
        )
    known_as = {profile.sha256(), "sha256:" + hashlib.sha256(profile_path.read_bytes()).hexdigest()}
    if "sha256:" + plan.profile.sha256.removeprefix("sha256:") in known_as:
        plan = plan.model_copy(update={"profile": ProfileRef(sha256=profile.sha256())})
    return plan, profile


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan file, whole or not at all.

    Raises:
        InputError: it cannot be written there.
    """
    write_text(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """The plan as YAML text."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    yield f"schema: {plan.schema_}"
    yield f"strategy: {plan.strategy}"
    yield f"workload: {_flow(plan.workload.model_dump())}"
    yield f"profile: {_flow(plan.profile.model_dump())}"
    yield from _cluster_lines(plan)
    yield f"optimizer_state_per_param: {_flow(plan.optimizer_state_per_param)}"
    if plan.optimizer_state_sharded:
        yield "optimizer_state_sharded: true"
    if plan.update_bytes_per_param:
        yield f"update_bytes_per_param: {_flow(plan.update_bytes_per_param)}"
    if plan.accumulate > 1:
        yield f"accumulate: {plan.accumulate}"
    yield f"optimizer_s_per_byte: {_flow(plan.optimizer_s_per_byte)}"
    if plan.threads_per_process is not None:
        yield f"threads_per_process: {plan.threads_per_process}"
    if plan.compile is not None:
        yield f"compile: {plan.compile}"
    if plan.notes:
        yield "notes:"
        yield from (f"  - {_flow(note)}" for note in plan.notes)
    yield "predicted:"
    yield from (f"  {key}: {_flow(value)}" for key, value in plan.predicted.model_dump().items())
    yield "metaops:"
    yield from (f"  - {_flow(_metaop_data(metaop))}" for metaop in plan.metaops)
    yield "waves:"
    for wave in plan.waves:
        yield f"  - index: {wave.index}"
        yield f"    start_s: {_flow(wave.start_s)}"
        yield f"    end_s: {_flow(wave.end_s)}"
        yield "    slices:"
        yield from (f"      - {_flow(_slice_data(piece))}" for piece in wave.slices)


def _cluster_lines(plan: Plan) -> Iterator[str]:
    data = plan.cluster.model_dump(mode="json", by_alias=True, exclude_none=True)
    yield "cluster:"
    yield f"  schema: {data['schema']}"
    yield f"  name: {_flow(data['name'])}"
    yield "  nodes:"
    yield from (f"    - {_flow(group)}" for group in data["nodes"])
    yield "  links:"
    yield from (f"    {kind}: {_flow(link)}" for kind, link in data["links"].items())


def _metaop_data(metaop: PlanMetaOp) -> dict[str, Any]:
    """All that is not the default; the curve last."""
    data = metaop.model_dump(mode="json", exclude={"curve"}, exclude_defaults=True)
    data["curve"] = [
        point.model_dump(
            mode="json", include={"num_devices", "dp", "tp", "forward_s", "backward_s", "source"}
        )
        | ({"communication_s": point.communication_s} if point.communication_s else {})
        for point in metaop.curve
    ]
    return data


def _slice_data(piece: Slice) -> dict[str, Any]:
    """The contract's keys; `recompute` only where it is on."""
    data = piece.model_dump(mode="json")
    if not piece.recompute:
        del data["recompute"]
    return data


def _flow(value: Any) -> str:
    """A value in YAML's flow style; numbers round-trip exactly."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _NOT_STRINGS
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Sequence):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return str(value)


def _number(value: float) -> str:
    """YAML 1.1 reads '1e-05' as a string; it wants '1.0e-05'."""
    text = repr(value)
    mantissa, exponent_mark, exponent = text.partition("e")
    if not exponent_mark:
        return text
    mantissa = mantissa if "." in mantissa else mantissa + ".0"
    return f"{mantissa}e{exponent if exponent[0] in '+-' else '+' + exponent}"
