"""How long it takes to move a batch from one layout to another, were nothing else under way."""

from __future__ import annotations

from collections.abc import Iterable

from spindle_cli.account.activations import Layout, busiest_s, handed_over
from spindle_cli.files.cluster import Cluster


def moving_s(moves: Iterable[tuple[Layout, Layout, int]], cluster: Cluster) -> float:
    """Seconds until the busiest port is through with all moves, and all that was sent in parts is gathered.

    Args:
        moves: from, to, and the bytes of the whole batch.
    """
    over = [handed_over(source, destination, num_bytes, cluster) for source, destination, num_bytes in moves]
    return busiest_s((send for handed in over for send in handed.sends), cluster) + sum(
        handed.gather_s for handed in over
    )
