"""torchrun with three additions: `python -m spindle_cli.launch.torchrun EXITS.json <torchrun's arguments>`.

* `--rdzv-backend=spindle`: the store that all processes meet at listens on the address it is given alone, not
  on every interface of the machine as torch's own does; port 0 takes a free one.
* Which workers died, and how, is written to EXITS.json instead of being printed over a page.
* SIGTERM asks the workers to save and end, as it does of the launcher: schedulers send it to every process.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from spindle_cli.parent_death import die_with_parent


def main(arguments: Sequence[str]) -> int:
    """Start the workers and wait for them; 0 if all ended well, 1 if one did not, 128 + n after signal n."""
    die_with_parent()
    exits_file, *torchrun_arguments = arguments
    signal.signal(signal.SIGTERM, partial(_ask_workers_to_stop, Path(exits_file)))
    return run(Path(exits_file), torchrun_arguments)


def _ask_workers_to_stop(exits_file: Path, _number: int, _frame: FrameType | None) -> None:
    from spindle_cli.request import STOP_FILE

    exits_file.with_name(STOP_FILE).touch()


def run(exits_file: Path, torchrun_arguments: Sequence[str]) -> int:
    """What `main` does once it is sure to end with its parent: importing torch takes seconds."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from spindle_cli.artifact import write_json
    from spindle_cli.launch.rendezvous import MeetingError, create_rendezvous
    from spindle_cli.launch.types import WorkerExit, WorkerExits

    meeting_file = exits_file.with_name(exits_file.name.replace(".exits.json", ".meeting"))
    rendezvous_handler_registry.register("spindle", partial(create_rendezvous, meeting_file))
    try:
        _run_torchrun(torchrun_arguments)
    except ChildFailedError as failed:
        exits = tuple(
            WorkerExit(rank=rank, exit_code=failure.exitcode, time_s=failure.timestamp)
            for rank, failure in sorted(failed.failures.items())
        )
        write_json(exits_file, WorkerExits(exits=exits))
        return 1
    except MeetingError as failed:
        write_json(exits_file, WorkerExits(exits=(), problem=str(failed)))
        return 1
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


def _run_torchrun(arguments: Sequence[str]) -> None:
    from torch.distributed import run as torchrun

    parse: Any = torchrun.parse_args
    run_parsed: Any = torchrun.run
    parsed = parse(arguments)
    if hasattr(parsed, "signals_to_handle"):  # since torch 2.9; before, SIGTERM ends the workers at once
        parsed.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"
    run_parsed(parsed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
