"""A launch as a shell script: what `--dry-run` prints. Running the script does what `launch` would start."""

from __future__ import annotations

import shlex

from spindle_cli.files.artifact import to_json
from spindle_cli.launch.types import Launch


def shell_script(launch: Launch) -> str:
    """The folder, the request file and the command of one node, ready to paste."""
    request = launch.request
    where = f"node {launch.node_rank} of {launch.num_nodes}: " if launch.num_nodes > 1 else ""
    workers = "1 worker" if launch.processes == 1 else f"{launch.processes} workers"
    variables = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    return "\n".join(
        [
            f"# {where}{workers} on {request.device_type}, {request.backend}",
            f"mkdir -p {shlex.quote(str(launch.request_file.parent))}",
            f"cat > {shlex.quote(str(launch.request_file))} <<'END'",
            to_json(request) + "END",
            " ".join(["env", *variables, "\\"]),
            f"  {shlex.join(launch.argv)} \\",
            f"  > {shlex.quote(str(launch.log))} 2>&1",
        ]
    )
