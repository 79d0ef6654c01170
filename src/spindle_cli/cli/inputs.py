"""Input files that belong together, read together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spindle_cli.files.cluster import Cluster
    from spindle_cli.profile.types import Profile


def read_profile_and_cluster(
    profile: Path, cluster: Path, *, assume_same_device: bool
) -> tuple[Profile, Cluster]:
    """A profile and the cluster to plan it for.

    Raises:
        InputError: one of them is missing or malformed, or they are of different types of devices and
            nobody has said to assume otherwise.
    """
    from spindle_cli.errors import InputError
    from spindle_cli.files.cluster import Cluster
    from spindle_cli.profile.metagraph import require_equal_batches
    from spindle_cli.profile.mixed.seen import require_same_device
    from spindle_cli.profile.types import Profile

    read, goal = Profile.read(profile), Cluster.read(cluster)
    require_equal_batches(read.metaops, profile)
    if not assume_same_device or goal.is_mixed or read.devices:
        try:
            require_same_device(read, goal)
        except InputError as error:
            raise InputError(f"{profile}: {error.message}", hint=error.hint) from None
    return read, goal
