"""Writing a plan as YAML that a person can open: one slice a line. Same plan, same bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spindle_cli.artifact import write_text
from spindle_cli.plan.types import Plan, PlanMetaOp, Slice

# What YAML 1.1 reads as a string without quotes, also inside [] and {}.
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*|[0-9]+-[0-9]+")
_NOT_STRINGS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


def read_plan(path: Path) -> Plan:
    """Read and validate a plan file.

    Raises:
        InputError: missing, malformed, or of another kind or version.
    """
    return Plan.read(path)


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
    if plan.threads_per_process is not None:
        yield f"threads_per_process: {plan.threads_per_process}"
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
