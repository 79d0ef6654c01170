"""How a plan file says what devices share out: a level for each key, and beside it which of the keys whose
parameters are shared out are kept between a slice's passes. Inside, both are one level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticKnownError

from spindle_cli.files.artifact import shown
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf, ShardWeights

_IN_FILES = [level.value for level in Sharding if level is not Sharding.KEPT]


def _as_in_files(level: Any) -> Any:
    """What is kept has a level of its own, which files say in another way."""
    if isinstance(level, Sharding) or level in _IN_FILES:
        return level
    expected = f"{', '.join(map(repr, _IN_FILES[:-1]))} or {_IN_FILES[-1]!r}"
    raise PydanticKnownError("enum", {"expected": expected})


SharingOut = Annotated[
    Sharding, BeforeValidator(_as_in_files), WithJsonSchema({"enum": _IN_FILES, "type": "string"})
]


def with_kept(data: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's data, not yet checked, with a level of its own for what is kept."""
    levels, kept = data.get("sharding"), data.get("sharding_kept")
    if not isinstance(levels, Mapping) or not isinstance(kept, Sequence) or isinstance(kept, str):
        return dict(data)
    merged = {
        key: Sharding.KEPT if key in kept and level == Sharding.PARAMETERS else level
        for key, level in levels.items()
    }
    return {**data, "sharding": merged}


def require_kept(kept: Sequence[str], sharding: ShardingOf) -> None:
    """What is to be kept is shared out.

    Raises:
        ValueError: it is not.
    """
    for key in kept:
        if sharding.get(key) is not Sharding.KEPT:
            raise ValueError(
                f"sharding_kept: {shown(key)}: expected a key for which sharding says "
                f"{Sharding.PARAMETERS.value!r}"
            )


def require_weights(weights: ShardWeights, cluster: Cluster, *, is_sharded: bool) -> None:
    """There is one for each device, and something to share out. `is_sharded`: optimizer state is.

    Raises:
        ValueError: there is not.
    """
    if not weights:
        return
    if len(weights) != cluster.num_devices:
        raise ValueError(
            f"shard_weights: found {len(weights)}; expected one for each of the {cluster.num_devices} "
            f"devices of cluster {cluster.name!r}"
        )
    if not is_sharded:
        raise ValueError(
            "shard_weights: expected none where the train settings do not let devices share optimizer state"
        )


def said_apart(sharding: ShardingOf) -> dict[str, Any]:
    """The keys of a plan file that say it; without those that say nothing."""
    kept = [key for key, level in sharding.items() if level is Sharding.KEPT]
    levels = {
        key: Sharding.PARAMETERS.value if key in kept else level.value for key, level in sharding.items()
    }
    return {"sharding": levels, "sharding_kept": kept} if kept else {"sharding": levels}
