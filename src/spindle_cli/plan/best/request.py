"""What a plan is asked to be, and what texts on a command line ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.errors import UsageError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import LARGEST_WEIGHT, Sharding, ShardingOf
from spindle_cli.plan.types import StrategyName, Sums
from spindle_cli.plan.weights.choose import ShardBy

DEFAULT_EFFORT = 1


@dataclass(frozen=True)
class PlanRequest:
    """What a user asks of a plan.

    Attributes:
        strategy: how the devices are shared out.
        effort: 0 or more; more of it searches longer, and on one type of device never gives a worse plan.
        micro_batches: into how many each task's batch is cut, 1 where nothing is said; None: as many as
            memory asks for.
        sharding: by key of parameters, what the devices that hold them share out, optimizer state where
            nothing is said; None: as memory asks for.
        equal_shares: of whole batches take no number of devices that does not divide them.
        offload: whether activations may be moved to host memory where devices are short of their own; None:
            where the cluster says how fast they get there.
        sums: of gradients that may be gathered as rows or factors, which are.
        shard_by: which part of what devices share out each has; None: an equal one, unless memory asks for
            others on devices of several types.
        gives_up: whether batches may be cut and parameters shared out where memory asks for it; not in a plan
            of one set of tasks, which has to say of them what the others say.
    """

    strategy: StrategyName = "spindle"
    effort: int = DEFAULT_EFFORT
    micro_batches: Mapping[str, int] | None = None
    sharding: ShardingOf | None = None
    equal_shares: bool = False
    offload: bool | None = None
    sums: Sums = "auto"
    shard_by: ShardBy | None = None
    gives_up: bool = True

    def allowed(self, cluster: Cluster) -> Cluster:
        """A cluster without the links to its nodes' memory, if nothing may be moved there."""
        return cluster.without_host_link() if self.offload is False else cluster

    @property
    def shares_out_more(self) -> bool:
        """Whether any parameters are to be shared out beyond their optimizer state."""
        return gives_up_memory(self.sharding or {})


def gives_up_memory(sharding: ShardingOf) -> bool:
    """Whether gradients or parameters are shared out, for which memory alone is a reason."""
    return any(level.is_by_pass for level in sharding.values())


def parse_counts(texts: Sequence[str]) -> dict[str, int]:
    """Read how many micro-batches each task has from 'task=count' texts.

    Raises:
        UsageError: one is no such text, or a task is named twice.
    """
    counts: dict[str, int] = {}
    for text in texts:
        task, _, count = text.rpartition("=")
        if not (task and count.isascii() and count.isdigit() and 0 < int(count) < 2**31):
            raise UsageError(
                f"--micro-batches {text}: expected TASK=COUNT, for example --micro-batches image_text=4"
            )
        if task in counts:
            raise UsageError(f"--micro-batches {text}: task {task!r} is named twice")
        counts[task] = int(count)
    return counts


def parse_levels(texts: Sequence[str]) -> dict[str, Sharding]:
    """Read what is sharded of which parameters from 'key=level' texts.

    Raises:
        UsageError: one is no such text, or a key is named twice.
    """
    levels: dict[str, str] = {}
    for text in texts:
        key, _, level = text.rpartition("=")
        if not key or level not in tuple(Sharding):
            raise UsageError(
                f"--shard {text}: expected KEY=LEVEL with a level of {', '.join(Sharding)}, for example "
                "--shard vision.blocks=parameters"
            )
        if key in levels:
            raise UsageError(f"--shard {text}: {key!r} is named twice")
        levels[key] = level
    return levels_of(levels)


def levels_of(sharding: Mapping[str, str]) -> dict[str, Sharding]:
    """By key, levels that are named.

    Raises:
        UsageError: there is no such level.
    """
    for key, level in sharding.items():
        if level not in tuple(Sharding):
            raise UsageError(
                f"sharding of {key!r}: found {level!r}, expected one of {', '.join(Sharding)}",
            )
    return {key: Sharding(level) for key, level in sharding.items()}


def parse_shard_by(text: str) -> ShardBy:
    """What is asked for on a command line.

    Raises:
        UsageError: it is neither 'even' nor 'memory' nor 'speed', nor says a whole number for each type.
    """
    match text:
        case "even" | "memory" | "speed":
            return text
    weights: dict[str, int] = {}
    for part in text.split(","):
        kind, _, number = part.strip().rpartition("=")
        if not kind or not number.isdecimal() or not 1 <= int(number) <= LARGEST_WEIGHT:
            raise UsageError(
                f"--shard-by {text}: found {part!r}; expected even, memory, speed, or TYPE=WEIGHT for each "
                f"type of device, whole numbers from 1 to {LARGEST_WEIGHT}",
                hint="For example `--shard-by a100-80gb=5,v100-32gb=2`.",
            )
        if kind in weights:
            raise UsageError(f"--shard-by {text}: {kind!r} is named twice", hint="Name each type once.")
        weights[kind] = int(number)
    return weights
