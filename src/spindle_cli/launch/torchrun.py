"""torchrun with two additions: `python -m spindle_cli.launch.torchrun EXITS.json <torchrun's arguments>`.

* `--rdzv-backend=spindle`: the store that all processes meet at listens on the address it is given alone, not
  on every interface of the machine as torch's own does; port 0 takes a free one.
* Which workers died, and how, is written to EXITS.json instead of being printed over a page.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from spindle_cli.artifact import write_json
from spindle_cli.launch.rendezvous import create_rendezvous
from spindle_cli.launch.types import WorkerExit, WorkerExits
from spindle_cli.worker_session import die_with_parent


def main(arguments: Sequence[str]) -> int:
    """Start the workers and wait for them; 0 if all ended well, 1 if one did not, 128 + n after signal n."""
    exits_file, *torchrun_arguments = arguments
    die_with_parent(signal.SIGTERM)
    rendezvous_handler_registry.register("spindle", create_rendezvous)
    try:
        _run_torchrun(torchrun_arguments)
    except ChildFailedError as failed:
        exits = tuple(
            WorkerExit(rank=rank, exit_code=failure.exitcode, time_s=failure.timestamp)
            for rank, failure in sorted(failed.failures.items())
        )
        write_json(Path(exits_file), WorkerExits(exits=exits))
        return 1
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


def _run_torchrun(arguments: Sequence[str]) -> None:
    parse: Any = torchrun.parse_args
    run: Any = torchrun.run
    run(parse(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
