"""Measure the link between two hosts, as `spindle profile` measures that of one: `... STORE OUT.json` on
each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from spindle_cli.files.artifact import write_json
from spindle_cli.files.cluster import Link
from spindle_cli.profile.machine.link_speed import as_link, measure_link


def main() -> None:
    """Entry point on one of the hosts."""
    store, out = (Path(argument) for argument in sys.argv[1:])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    link = as_link(measure_link(rank, store, torch.device("cpu")))
    if rank == 0:
        write_json(out, _sustained(link))


def _sustained(link: Link) -> Link:
    """Return a link without sizes that seem faster than the largest: after a pause the shaper lets some
    messages through at once, but not in the midst of others.
    """
    curve = tuple(point for point in link.curve or () if point[1] <= link.bandwidth_gb_per_s)
    return link.model_copy(update={"curve": curve})


if __name__ == "__main__":
    main()
