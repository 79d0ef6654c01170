"""`spindle watch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption
from spindle_cli.errors import UsageError

if TYPE_CHECKING:
    from spindle_cli.watch.server import WatchServer
    from spindle_cli.watch.session import WatchSession


def watch(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, begun or not.", show_default=False)
    ],
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="N",
            min=0,
            max=65535,
            help="Where to listen; if not given, 8421 or, where that is taken, any that is free.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; by default this machine alone.")
    ] = "127.0.0.1",
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="PLAN.yaml",
            help="Where the run's plan is now, if not where it was launched from.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run as it goes on, as a web page on this machine.

    Losses, speed against the prediction, operations per second, memory, waiting for data, evaluations,
    starts, and the time left. Serves the page until Ctrl-C. With --json it prints how the run is now, and
    ends.
    """
    from spindle_cli.watch.session import WatchSession

    session = WatchSession(run, plan)
    if as_json:
        output.print_json(session.look(budget_s=None))
        return
    server = _listening(session, host, port)
    _serve(server, run)


def _listening(session: WatchSession, host: str, port: int | None) -> WatchServer:
    from spindle_cli.watch.server import PORT, WatchServer

    if port is not None:
        return WatchServer(session, host, port)
    try:
        return WatchServer(session, host, PORT)
    except UsageError:  # as a rule, another `spindle watch`; what else is wrong with the host is said again
        return WatchServer(session, host, 0)


def _serve(server: WatchServer, run: Path) -> None:
    """Until Ctrl-C, which is how this ends well."""
    from spindle_cli.launch.starting.network import is_loopback

    if not is_loopback(server.host):
        output.note(
            f"warning: listening at {server.host}: whoever reaches that sees this run (names, losses, "
            "paths); there is no password"
        )
    try:
        with server:
            output.note(f"{run}: {server.url} (Ctrl-C to end)")
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        output.note("ended")
