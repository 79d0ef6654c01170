"""Measure the link between two hosts, as `spindle profile` measures that of one: `... STORE OUT.json` on
each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from spindle_cli.files.artifact import write_json
from spindle_cli.profile.machine.link_speed import as_link, measure_link


def main() -> None:
    """Entry point on one of the hosts."""
    store, out = (Path(argument) for argument in sys.argv[1:])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    link = as_link(measure_link(rank, store, torch.device("cpu")))
    if rank == 0:
        write_json(out, link)


if __name__ == "__main__":
    main()
