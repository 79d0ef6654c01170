"""Run a script of the user's in a worker that `spindle launch` has started."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from spindle_cli.errors import RunFailedError
from spindle_cli.files.request import RunRequest
from spindle_cli.process.environment import REQUEST_VARIABLE, join_environment


def run_script(request: RunRequest, request_file: Path) -> None:
    """Run the request's script as Python runs it, with its folder in front of all that is imported from.

    Raises:
        RunFailedError: it has ended with an exit code of its own.
        Exception: what it raises.
    """
    assert request.script is not None, "there is a script"
    join_environment({REQUEST_VARIABLE: str(request_file)})
    sys.argv = [str(request.script), *request.script_args]
    sys.path.insert(0, str(request.script.parent))
    try:
        runpy.run_path(str(request.script), run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise RunFailedError(f"{request.script}: sys.exit({ended.code!r}) was called") from ended
