"""Serve the live page of one run to browsers on this machine.

Two addresses exist, the page and its data; nothing is looked up in the file system by a request. A page on
another site that a browser has open can neither read nor frame them: no answer allows it, and a request that
names another host (DNS rebinding) is refused.

The live page is the report's own parts, with a head and a run that follow what happens.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import socketserver
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from spindle_cli.errors import UsageError
from spindle_cli.files.artifact import to_compact_json
from spindle_cli.launch.starting.network import is_loopback
from spindle_cli.report.page import ALL_BUT_MAIN, Page, make_page
from spindle_cli.report.types import MeasuredIteration, ReportData
from spindle_cli.watch.session import WatchSession
from spindle_cli.watch.types import WatchData

PORT = 8421
_IDLE_S = 30  # a connection that sends nothing is closed
_SAFE = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_ours(header: str | None, host: str) -> bool:
    """Whether a request's Host header names this server, which listens at `host`.

    A name that somebody else could have made to point here is refused, an address cannot be such; ports may
    differ, as behind a tunnel.
    """
    if header is None:
        return False
    try:
        name = urlsplit(f"//{header}").hostname
    except ValueError:
        return False
    if name is None:
        return False
    if name == "localhost" or name == host.lower():
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not is_loopback(host)


class WatchServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """One run's page, served until it is shut down."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, session: WatchSession, host: str, port: int) -> None:
        """Port 0 lets the kernel choose a free one.

        Raises:
            UsageError: the port is taken, or the host is not one of this machine's.
        """
        self.session = session
        self.host = host
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {host}, port {port}: {error.strerror}",
                hint="Choose another port with --port (0: any that is free), or another --host.",
            ) from error

    @property
    def url(self) -> str:
        """The address of the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version = "spindle"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def do_GET(self) -> None:
        """Answer with the page, or with its data."""
        if not is_ours(self.headers.get("Host"), self.server.host):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server is not the host that was asked for")
        elif self.path == "/":
            page = render_live_page(*self.server.session.page())
            policy = {"Content-Security-Policy": f"{page.policy}; frame-ancestors 'none'"}
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page.text, policy)
        elif self.path == "/data.json":
            self._answer(HTTPStatus.OK, "application/json", to_compact_json(self.server.session.look()))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is the page (/) and its data (/data.json)")

    def do_HEAD(self) -> None:
        """Answer as `do_GET` does, without the content."""
        self.do_GET()

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self.close_connection = True
        self._answer(status, "application/json", json.dumps({"error": reason}) + "\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str, more: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": len(body),
            **_SAFE,
            **(more or {}),
        }.items():
            self.send_header(name, str(value))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a page asks every other second."""


SCRIPTS = (*ALL_BUT_MAIN, "live.js")
# What the page's script may do beyond what is in the page: ask the server that it came from.
CONNECTS = "connect-src 'self'"

# What the scripts look for in a plan, where there is none.
_NO_PLAN: dict[str, Any] = {"metaops": [], "slices": [], "memory": [], "predicted": None, "timeline": None}


def render_live_page(data: WatchData, report: ReportData | None, timeline: MeasuredIteration | None) -> Page:
    """Return the page as it is now; it asks for the rest itself."""
    run = data.run.model_copy(update={"timeline": timeline})
    whole = _NO_PLAN if report is None else report.model_dump(mode="json", by_alias=True)
    watch = data.model_dump(mode="json", by_alias=True)
    content = {**whole, "run": run.model_dump(mode="json"), "watch": {**watch, "run": None}}
    title = f"{data.run.folder}: {data.workload or 'a run'}"
    return make_page(content, SCRIPTS, title=title, policy=CONNECTS)
