"""What a plan is asked to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import ShardingOf
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
