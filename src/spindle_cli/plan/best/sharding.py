"""Components whose parameters or gradients the devices share out: all of the cluster's, so that whatever uses
them runs where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from operator import add
from typing import NamedTuple

from spindle_cli.costs.parameters import Block, blocks_of
from spindle_cli.errors import NoPlanError, UsageError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.plan.cutting.on_all import key_of, run_on_all, users_of
from spindle_cli.plan.search.memory_fallback import heaviest
from spindle_cli.profile.types import Profile

# Of all parameters, what is tried to share out alone, from the components that hold most.
HEAVIEST_SHARE = 0.6


def shardings_to_try(profile: Profile, cluster: Cluster) -> list[dict[str, Sharding]]:
    """What may help where memory is short: the parameters of the heaviest components, those of all, and the
    gradients of all.

    Of those that can run on all devices; none where the train settings do not let devices share optimizer
    state.
    """
    if not profile.optimizer_state_sharded or cluster.num_devices == 1:
        return []
    possible = [key for key, metaops in users_of(profile).items() if run_on_all(metaops, cluster, profile)]
    sizes = {key: size for key, size in _sizes(profile).items() if key in possible}
    largest = heaviest({key: size.num_bytes for key, size in sizes.items()}, HEAVIEST_SHARE)
    choices = [
        {key: Sharding.PARAMETERS for key in sizes if key in largest},
        dict.fromkeys(sizes, Sharding.PARAMETERS),
        {key: Sharding.GRADIENTS for key, size in sizes.items() if size.trained_bytes},
    ]
    return [
        sharding for number, sharding in enumerate(choices) if sharding and sharding not in choices[:number]
    ]


def keys_with_parameters(profile: Profile) -> tuple[str, ...]:
    """The keys of parameters that have any bytes."""
    return tuple(_sizes(profile))


class _Size(NamedTuple):
    """How large parameters are, all and those that are trained."""

    num_bytes: int
    trained_bytes: int


def _sizes(profile: Profile) -> dict[str, _Size]:
    """By key, of those that have any bytes; what keys are tied to counts for each of them."""
    blocks: dict[tuple[str, Block], _Size] = {}
    for metaop in profile.metaops:
        for op in range(metaop.num_ops):
            for use in blocks_of(metaop, op):
                used = _Size(ceil(use.num_bytes), ceil(use.trained_bytes))
                earlier = blocks.get((key_of(metaop), use.block), used)
                blocks[key_of(metaop), use.block] = _Size(*map(max, used, earlier))
    sizes: dict[str, _Size] = {}
    for (key, _), size in blocks.items():
        sizes[key] = _Size(*map(add, size, sizes.get(key, (0, 0))))
    return sizes


def require_sound(profile: Profile, sharding: Mapping[str, Sharding]) -> None:
    """What is asked for can be said of this workload.

    Raises:
        UsageError: no MetaOp has such parameters, or trains such as have gradients to share out.
        NoPlanError: its train settings do not let devices share anything.
    """
    sizes = _sizes(profile)
    for key, level in sorted(sharding.items()):
        if key not in sizes:
            raise UsageError(
                f"sharding of {key!r}: the profile has no such parameters",
                hint=f"It has {', '.join(sorted(sizes)) or 'none'}.",
            )
        if not (level.is_fetched or sizes[key].trained_bytes):
            raise UsageError(
                f"sharding of {key!r}: found {level}, but none of these parameters are trained",
                hint=f"Share out the parameters themselves: {key}={Sharding.PARAMETERS}.",
            )
    if not profile.optimizer_state_sharded and any(level is not Sharding.NONE for level in sharding.values()):
        raise NoPlanError(
            "sharding: the train settings do not let devices share optimizer state (shard_optimizer)",
            hint="Parameters and gradients are shared out where the optimizer's state is: set "
            "`shard_optimizer: true` under `train` and profile again.",
        )


def describe(sharding: ShardingOf) -> str:
    """What a plan says of what its devices share out because memory asks for it."""
    told = [
        f"{level} of {', '.join(keys)}"
        for level in Sharding
        if level.is_by_pass and (keys := [key for key, key_level in sharding.items() if key_level is level])
    ]
    return f"Memory asks for sharing out the {' and the '.join(told)}."
