"""Tensor-parallel plans of layer classes: the workload's own, or those that Hugging Face's models bring.

A plan says of some of a layer's submodules how they are split. It may be written in our words, in
Hugging Face's, or with torch's `ColwiseParallel()` and `RowwiseParallel()`. A plan of a whole model, with
"layers.*." before its names as Hugging Face's configurations have it, is taken as it is: what in it is of
other layers does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Workload

Way = Literal["colwise", "rowwise", "partial", "expertwise"]

# What plans may say -> what it means here. "partial": all devices hold the parameters whole, but use them for
# their own part of the layer, so that gradients are to be summed (norms of single heads). None: what goes in
# and comes out is whole on every device, so that the map may stay whole, too: it computes the same.
WAYS: Mapping[str, Way | None] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "expertwise": "expertwise",
    "replicated_with_grad_allreduce": "partial",
    "colwise_gather_output": None,
    "colwise_rep": None,
    "rowwise_split_input": None,
    "rowwise_rep": None,
    "ColwiseParallel()": "colwise",
    "RowwiseParallel()": "rowwise",
}


def plan_of(workload: Workload, layer: nn.Module) -> dict[str, Way] | None:
    """A layer's plan, submodule -> way; None where it has none, or one of Hugging Face's that we cannot do.

    Raises:
        WorkloadError: the workload's plan names a submodule that is no linear map of the layer, or an unknown
            way.
    """
    given = _given(workload, layer)
    if given is None:
        return None
    matched = _matched(layer, given)
    exact = _exact(layer, given)
    if any(_spoken(way) not in WAYS for way in matched.values()):
        return None
    spoken = exact | {path: WAYS[_spoken(way)] for path, way in matched.items()}
    plan = {path: way for path, way in spoken.items() if way is not None}
    if any(_misfit(layer, path, way) for path, way in plan.items()):
        return None
    if by_experts(plan) and (others := sorted(path for path, way in plan.items() if way != "expertwise")):
        raise WorkloadError(
            f"tp_plans: {type(layer).__name__}: {others[0]} is {plan[others[0]]} beside experts, expected "
            "expertwise alone",
            hint="Devices that share out experts have samples of their own in the rest of the layer.",
        )
    return plan or None


def _exact(layer: nn.Module, given: Mapping[str, Any]) -> dict[str, Way | None]:
    """What a plan says of submodules that it names without a pattern. Raises what `plan_of` raises."""
    ways = {path: _known_way(layer, path, way) for path, way in given.items() if "*" not in path}
    for path, way in ways.items():
        _require_fitting(layer, path, way)
    return ways


def by_experts(plan: Mapping[str, Way]) -> bool:
    """Whether a plan shares out experts."""
    return "expertwise" in plan.values()


def experts_of(module: nn.Module) -> int:
    """How many experts a module's parameters are stacked of; 0: they are not."""
    counts = {parameter.shape[:1] for parameter in module.parameters()}
    return counts.pop()[0] if len(counts) == 1 and () not in counts else 0


def unknown_ways(workload: Workload, layer: nn.Module) -> dict[str, str]:
    """What a plan of a whole model says of the layer that cannot be done here, submodule -> way; such a layer
    stays whole.
    """
    matched = _matched(layer, _given(workload, layer) or {})
    return {path: _spoken(way) for path, way in matched.items() if _spoken(way) not in WAYS}


def adapted(workload: Workload, layer: nn.Module) -> tuple[str, ...]:
    """What a plan of a whole model would split of the layer, but what PEFT has put adapters on."""
    modules = dict(layer.named_modules())
    wanted = (path for path, way in _matched(layer, _given(workload, layer) or {}).items() if _splits(way))
    return tuple(path for path in wanted if hasattr(modules.get(path), "base_layer"))


def _splits(way: object) -> bool:
    return WAYS.get(_spoken(way)) in ("colwise", "rowwise")


def _given(workload: Workload, layer: nn.Module) -> Mapping[str, Any] | None:
    """The plan that the workload has for the layer's class, or its model's configuration."""
    given = workload.tp_plans.get(type(layer))
    return _of_config(layer) if given is None else given


def _of_config(layer: nn.Module) -> Mapping[str, Any] | None:
    """The plan that Hugging Face's configuration of the layer's model has."""
    for module in layer.modules():
        plan = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if isinstance(plan, Mapping):
            return plan
    return None


def _matched(layer: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan of a whole model says of this layer's submodules and parameters."""
    patterns = {path.rpartition("*.")[2]: (path, way) for path, way in given.items() if "*." in path}
    matched: dict[str, Any] = {}
    for name in (*dict(layer.named_modules()), *dict(layer.named_parameters())):
        generic = re.sub(r"\b\d+\b", "*", name)
        path, way = patterns.get(generic.rpartition("*.")[2], ("", None))
        if path.endswith(f"*.{generic}"):
            matched[name] = way
    return matched


def _spoken(way: object) -> str:
    """A way as plans write it; of torch's parallel styles, those without settings."""
    kind = type(way)
    if kind.__module__.startswith("torch.distributed.tensor.parallel"):
        is_plain = vars(way) == vars(kind())
        return f"{kind.__name__}()" if is_plain else f"{kind.__name__}(...)"
    return str(way)


def _known_way(layer: nn.Module, path: str, way: object) -> Way | None:
    spoken = _spoken(way)
    if spoken not in WAYS:
        raise WorkloadError(
            f"tp_plans: {type(layer).__name__}: {path}: found {spoken!r}, expected one of {', '.join(WAYS)}"
        )
    return WAYS[spoken]


def _require_fitting(layer: nn.Module, path: str, way: Way | None) -> None:
    misfit = _misfit(layer, path, way)
    if misfit is not None:
        expected = "a module of stacked experts" if way == "expertwise" else "an nn.Linear"
        raise WorkloadError(
            f"tp_plans: {type(layer).__name__}: {path} is {misfit}, expected {expected} of the layer"
        )


def _misfit(layer: nn.Module, path: str, way: Way | None) -> str | None:
    """What a plan's name stands for, where it cannot be split in this way."""
    module = dict(layer.named_modules()).get(path)
    if module is None:
        return "nothing"
    if way == "expertwise":
        return (
            None
            if experts_of(module)
            else f"a {type(module).__name__} without one entry for each expert in all its parameters"
        )
    if way != "partial" and not isinstance(module, nn.Linear):
        return f"a {type(module).__name__}"
    return None
