"""What a plan can say, each with each: a case for every pair, whose plan says both."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import combinations

from case_runs import ADAMW, Case
from hand_plans import Placement
from routed_toys import EXPERTS

from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.types import Plan

WORKERS = 4
TASKS = ("a", "b")
OPS = 4
TYPES = ("cpu-new", "cpu-old")


@dataclass(frozen=True)
class Feature:
    """Something that plans can say.

    Attributes:
        says: Whether a plan says it.
        axis: Features of one axis say otherwise of the same thing, so no part of a plan has two of them.
    """

    says: Callable[[Plan], bool]
    axis: str | None = None


def _homes(plan: Plan) -> bool:
    """Whether the same op of the tower runs on other devices for one task than for the other."""
    devices = {piece.devices for piece in plan.slices if piece.metaop.endswith("tower") and piece.ops[0] == 0}
    return len(devices) > 1


def _pipeline(plan: Plan) -> bool:
    """Whether the tower's layers are on several groups of devices, each with the same for all that it runs."""
    groups = {
        (piece.ops, frozenset(piece.devices)) for piece in plan.slices if piece.metaop.endswith("tower")
    }
    return len({ops for ops, _ in groups}) > 1 and len({devices for _, devices in groups}) > 1


def _shards(level: Sharding) -> Callable[[Plan], bool]:
    return lambda plan: level in plan.sharding.values()


FEATURES = {
    "micro-batches": Feature(lambda plan: bool(plan.micro_batches)),
    "pipeline": Feature(_pipeline),
    "homes": Feature(_homes),
    "gradients": Feature(_shards(Sharding.GRADIENTS), "level"),
    "parameters-kept": Feature(_shards(Sharding.KEPT), "level"),
    "parameters": Feature(_shards(Sharding.PARAMETERS), "level"),
    "rows": Feature(lambda plan: any(piece.rows is not None for piece in plan.slices)),
    "shard-weights": Feature(lambda plan: bool(plan.shard_weights)),
    "tensor-parallelism": Feature(lambda plan: any(piece.tp > 1 for piece in plan.slices)),
    "recompute": Feature(
        lambda plan: any(piece.recompute and not piece.selective for piece in plan.slices), "recompute"
    ),
    "selective": Feature(lambda plan: any(piece.selective for piece in plan.slices), "recompute"),
    "offload": Feature(lambda plan: any(piece.offload for piece in plan.slices)),
    "gathered": Feature(lambda plan: any(metaop.gathered for metaop in plan.metaops)),
    "task-sets": Feature(lambda plan: bool(plan.task_sets)),
    "types": Feature(lambda plan: plan.cluster.is_mixed),
    "idle": Feature(lambda plan: len({d for piece in plan.slices for d in piece.devices}) < WORKERS),
    "experts": Feature(
        lambda plan: any(piece.tp > 1 and plan.by_name[piece.metaop].num_experts for piece in plan.slices)
    ),
}
LEVELS = {
    "gradients": Sharding.GRADIENTS,
    "parameters-kept": Sharding.KEPT,
    "parameters": Sharding.PARAMETERS,
}
@dataclass(frozen=True)
class Refusal:
    """Which rule of `check` refuses a plan that says both, and why no plan can."""

    rule: str
    why: str


NOT_TOGETHER = {
    frozenset({"selective", "tensor-parallelism"}): Refusal(
        "selective", "what is kept is found op by op as the model is written, and split layers run as others"
    ),
    frozenset({"selective", "experts"}): Refusal(
        "selective", "what is kept is found op by op as the model is written, and split layers run as others"
    ),
    frozenset({"gathered", "task-sets"}): Refusal(
        "gathered", "in steps that do not run a task, those who hold its matrix hear of no rows"
    ),
}
PAIRS = tuple(
    (first, second)
    for first, second in combinations(FEATURES, 2)
    if FEATURES[first].axis is None or FEATURES[first].axis != FEATURES[second].axis
)


def case_of(features: Collection[str]) -> Case:
    """A case whose plan says all of these."""
    asked = set(features)
    everything: dict[str, object] = {}
    if asked & {"recompute", "selective"}:
        everything |= {"recompute": ("a/tower", "b/tower"), "selective": "selective" in asked}
    if "micro-batches" in asked:
        everything["micro_batches"] = {"a": 2, "b": 2}
    if "task-sets" in asked:
        everything |= {"sets": {"a": None, "b": None}}
    level = next((LEVELS[name] for name in LEVELS if name in asked), None)
    train = {**ADAMW, "sampling": {"every": {"a": 2, "b": {"every": 2, "offset": 1}}}}
    return Case(
        "+".join(features),
        placements(asked),
        toys="pair_toys",
        args={"experts": "experts" in asked},
        train=train if "task-sets" in asked else ADAMW,
        apart=1,
        offload="offload" in asked,
        uneven="rows" in asked,
        sharding=level,
        weights=(1, 3, 2, 5) if "shard-weights" in asked else (),
        gathers="gathered" in asked,
        experts=EXPERTS if "experts" in asked else 0,
        types=TYPES if "types" in asked else (),
        steps=2,
        **everything,
    )


def placements(asked: Collection[str]) -> tuple[Placement, ...]:
    """Both tasks on the same devices or each on its half (`homes`), their layers on all of these or one half
    behind the other (`pipeline`), split in two where that is asked for.
    """
    devices = tuple(range(WORKERS // 2 if "idle" in asked else WORKERS))
    of_task = dict(zip(TASKS, _halves(devices), strict=True)) if "homes" in asked else {}
    made: list[Placement] = []
    for task in TASKS:
        own = of_task.get(task, devices)
        sections = _halves(own) if "pipeline" in asked else (own,)
        made.append((f"{task}/embed", (0, 1), sections[0]))
        for number, group in enumerate(sections):
            ops = (number * OPS // len(sections), (number + 1) * OPS // len(sections))
            splits = asked & {"tensor-parallelism", "experts"}
            made.append((f"{task}/tower", ops, group, 2) if splits else (f"{task}/tower", ops, group))
    return tuple(made)


def _halves(devices: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return devices[: len(devices) // 2], devices[len(devices) // 2 :]
