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
from spindle_cli.profile.types import LocalSgd

WORKERS = 4
TASKS = ("a", "b")
OPS = 4
TYPES = ("cpu-new", "cpu-old")
ISLANDS = LocalSgd(islands=2, every=2)


@dataclass(frozen=True)
class Feature:
    """Something that plans can say.

    Attributes:
        is_there: What it is, in a sentence for the page of documentation.
        says: Whether a plan says it.
        axis: Features of one axis say otherwise of the same thing, so no part of a plan has two of them.
    """

    is_there: str
    says: Callable[[Plan], bool]
    axis: str | None = None


def _homes(plan: Plan) -> bool:
    """Whether the same op of the tower runs on other devices for one task than for the other."""
    devices = {piece.devices for piece in plan.slices if piece.metaop.endswith("tower") and piece.ops[0] == 0}
    return len(devices) > 1


def _pipeline(plan: Plan) -> bool:
    """Whether the tower's layers are on several groups of devices, one behind the other."""
    groups = {
        (piece.ops, frozenset(piece.devices)) for piece in plan.slices if piece.metaop.endswith("tower")
    }
    return len({ops for ops, _ in groups}) > 1 and len({devices for _, devices in groups}) > 1


def _shards(level: Sharding) -> Callable[[Plan], bool]:
    return lambda plan: level in plan.sharding.values()


FEATURES = {
    "micro-batches": Feature("a batch is cut into micro-batches", lambda plan: bool(plan.micro_batches)),
    "pipeline": Feature("layers are on groups of devices one behind the other", _pipeline),
    "homes": Feature("a component runs on other devices for one task than for another", _homes),
    "gradients": Feature("gradients are sharded (ZeRO-2)", _shards(Sharding.GRADIENTS), "level"),
    "parameters-kept": Feature(
        "parameters are sharded, and gathered once for both passes", _shards(Sharding.KEPT), "level"
    ),
    "parameters": Feature(
        "parameters are sharded, and gathered for each pass (ZeRO-3)", _shards(Sharding.PARAMETERS), "level"
    ),
    "rows": Feature(
        "shares of unequal size", lambda plan: any(piece.rows is not None for piece in plan.slices)
    ),
    "shard-weights": Feature("shards of unequal size", lambda plan: bool(plan.shard_weights)),
    "tensor-parallelism": Feature(
        "layers are split", lambda plan: any(piece.tp > 1 for piece in plan.slices)
    ),
    "recompute": Feature(
        "ops are recomputed whole",
        lambda plan: any(piece.recompute and not piece.selective for piece in plan.slices),
        "recompute",
    ),
    "selective": Feature(
        "ops are recomputed, except for their products",
        lambda plan: any(piece.selective for piece in plan.slices),
        "recompute",
    ),
    "offload": Feature(
        "activations are in host memory between the passes",
        lambda plan: any(piece.offload for piece in plan.slices),
    ),
    "gathered": Feature(
        "a gradient is gathered by rows", lambda plan: any(metaop.gathered for metaop in plan.metaops)
    ),
    "task-sets": Feature("steps run some of the tasks", lambda plan: bool(plan.task_sets)),
    "types": Feature("devices of two types", lambda plan: plan.cluster.is_mixed),
    "idle": Feature(
        "half of the devices run nothing",
        lambda plan: len({d for piece in plan.slices for d in piece.devices}) < plan.cluster.num_devices,
    ),
    "experts": Feature(
        "experts are split",
        lambda plan: any(piece.tp > 1 and plan.by_name[piece.metaop].num_experts for piece in plan.slices),
    ),
    "islands": Feature(
        "islands average their parameters now and then", lambda plan: plan.islands is not None
    ),
}
LEVELS = {
    "gradients": Sharding.GRADIENTS,
    "parameters-kept": Sharding.KEPT,
    "parameters": Sharding.PARAMETERS,
}


@dataclass(frozen=True)
class Refusal:
    """Which rule of `check` refuses a plan that says both, and why; None: the workload file is refused."""

    rule: str | None
    why: str


NOT_TOGETHER = {
    frozenset({"homes", "gradients"}): Refusal(
        "sharding",
        "whoever sums gradients inside of passes runs every pass that adds to them; parameters are gathered "
        "by replica groups, gradients alone are not",
    ),
    frozenset({"selective", "tensor-parallelism"}): Refusal(
        "selective",
        "a product that is kept is summed over the group in place, and would be summed once more when the "
        "rest is recomputed",
    ),
    frozenset({"task-sets", "islands"}): Refusal(
        None, "islands average parameters by a count of steps, and some would not have been trained in it"
    ),
    frozenset({"selective", "experts"}): Refusal(
        "selective", "profiles measure what is kept of whole layers alone"
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
        everything |= {"sets": {"a": None, "a+b": None}}
    if "islands" in asked:
        everything["islands"] = ISLANDS
    level = next((LEVELS[name] for name in LEVELS if name in asked), None)
    train = dict(ADAMW)
    if "task-sets" in asked:
        train["sampling"] = {"every": {"b": 2}}
    if "islands" in asked:
        train["local_sgd"] = ISLANDS.model_dump(mode="json")
    return Case(
        "+".join(features),
        placements(asked),
        toys="pair_toys",
        args={"experts": "experts" in asked},
        train=train,
        apart=1,
        offload="offload" in asked,
        uneven="rows" in asked,
        sharding=level,
        shards_everywhere=asked == {"homes", "gradients"},
        weights=(1, 3, 2, 5)[: num_devices(asked)] if "shard-weights" in asked else (),
        gathers="gathered" in asked,
        experts=EXPERTS if "experts" in asked else 0,
        types=TYPES if "types" in asked else (),
        steps=2,
        **everything,
    )


def num_devices(asked: Collection[str]) -> int:
    """How many devices a plan has; one of islands: each of them."""
    return WORKERS // ISLANDS.islands if "islands" in asked else WORKERS


def placements(asked: Collection[str]) -> tuple[Placement, ...]:
    """Both tasks on the same devices or each on its half (`homes`), their layers on all of these or one half
    behind the other (`pipeline`), split in two where that is asked for.
    """
    count = num_devices(asked)
    devices = tuple(range(count // 2 if "idle" in asked else count))
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
