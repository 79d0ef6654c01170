"""A plugin of pytest for the suite: tests run in processes that are forked from the one that collects them.

To import all tests takes as long as to run hundreds of them, so that one process does. Tests that start
workers leave half of two cores idle: they wait for messages, for processes that start, for what has to be
found hanging. Those that start none run beside them, where they get what is left: workers that shared their
cores with others by halves would wait for each message ten times as long. Tests whose workers send each other
many messages run one by one, the others two at a time, file by file.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from traceback import print_exc
from types import SimpleNamespace
from typing import Any

import pytest

PROCESSES, ALONE = "processes", "alone"  # marks
YIELDING = 10  # nice: a tenth of a core where others want all of it
AUTOGROUP = Path("/proc/self/autogroup")  # Linux: each session has a share of its own, whatever is nice in it
# Of tests that others go before: one that hangs is found, but only late, as it may have waited for its turn.
BESIDE_TIMEOUT_S = 1200

File = Sequence[int]  # the places of its tests among all
Sent = tuple[str, Any]


def yield_to_others() -> None:
    """Let this process, and what it starts, give way to others."""
    os.nice(YIELDING)
    with suppress(OSError):  # not everywhere; without it tests take longer
        AUTOGROUP.write_text(str(YIELDING), encoding="ascii")


@dataclass
class Part:
    """Tests that are run in the same way.

    Attributes:
        at_once: How many processes run them.
        gives_way: They get what others leave of the cores.
        behind: None of them begins before all of that part have ended.
        files: Those that nobody has begun.
    """

    name: str
    at_once: int
    gives_way: bool = False
    behind: Part | None = None
    files: deque[File] = field(default_factory=deque)


@dataclass(eq=False)
class Runner:
    """A process that runs tests of a part.

    Attributes:
        given: Places of tests that it was given and has not begun.
        runs: The place of the one that it runs, if it does.
    """

    part: Part
    number: int
    pid: int
    connection: Connection[Any, Any]
    given: list[int] = field(default_factory=list)
    runs: int | None = None

    def end(self) -> None:
        """End it and what it has started, if it has not ended yet."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        with suppress(ProcessLookupError):  # it may have no session of its own yet
            os.killpg(self.pid, signal.SIGTERM)


def parts_of(items: Sequence[pytest.Item]) -> list[Part]:
    """All tests, each in one part, by their marks; those of a file follow each other."""
    in_pairs = Part("two", 2)
    alone = Part("alone", 1, behind=in_pairs)
    beside = Part("beside", 2, gives_way=True)
    files: dict[tuple[str, Path], list[int]] = {}
    parts = {part.name: part for part in (in_pairs, alone, beside)}
    for place, item in enumerate(items):
        part = beside
        if item.get_closest_marker(PROCESSES):
            part = alone if item.get_closest_marker(ALONE) else in_pairs
        elif not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(BESIDE_TIMEOUT_S))
        files.setdefault((part.name, item.path), []).append(place)
    for (name, _), places in files.items():
        parts[name].files.append(places)
    return list(parts.values())


class InParts:
    """Plugin of pytest: tests run in processes that are forked from the one that has collected them.

    Args:
        yielding: what processes do first that give way to others.
    """

    def __init__(self, yielding: Callable[[], None] = yield_to_others) -> None:
        self._yielding = yielding
        self._runners: list[Runner] = []
        self._started = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests; pytest itself says where there is nothing to run."""
        failed = session.testsfailed and not session.config.option.continue_on_collection_errors
        if failed or session.config.option.collectonly:
            return None
        parts = parts_of(session.items)
        try:
            while self._all_at_work(session, parts):
                for ready in wait([runner.connection for runner in self._runners]):
                    self._hear(session, next(each for each in self._runners if each.connection is ready))
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for runner in self._runners:
                runner.end()
                os.waitpid(runner.pid, 0)
            self._runners.clear()
        return True

    def _all_at_work(self, session: pytest.Session, parts: Sequence[Part]) -> bool:
        """Have as many processes as may be; False: all tests have ended."""
        for part in parts:
            busy = {runner.part.name for runner in self._runners}
            if part.behind is not None and (part.behind.files or part.behind.name in busy):
                continue
            at_work = sum(runner.part is part for runner in self._runners)
            for _ in range(min(part.at_once - at_work, len(part.files))):
                self._runners.append(self._start(session, part))
        return bool(self._runners)

    def _start(self, session: pytest.Session, part: Part) -> Runner:
        self._started += 1
        number = self._started
        ours, its = Pipe()
        folder = session.config._tmp_path_factory.mktemp(part.name)  # type: ignore[attr-defined]
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            its.close()
            return Runner(part, number, pid, ours)
        code = 1
        try:
            ours.close()
            for other in self._runners:
                other.connection.close()
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if part.gives_way:
                self._yielding()
            Running(session, its, folder).run()
            code = 0
        except BaseException:  # which ends this process; the other one sees that it has
            print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)

    def _hear(self, session: pytest.Session, runner: Runner) -> None:
        try:
            kind, content = runner.connection.recv()
        except (EOFError, ConnectionError):
            self._ended(session, runner)
            return
        hook = session.config.hook
        if kind == "asks":
            file = runner.part.files.popleft() if runner.part.files else ()
            runner.given += file
            runner.connection.send(file)
        elif kind == "begins":
            runner.given.remove(content)
            runner.runs = content
            item = session.items[content]
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        elif kind == "ends":
            item = session.items[content]
            runner.runs = None
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        elif kind == "warns":
            hook.pytest_warning_recorded.call_historic(kwargs=content)
        else:
            report = hook.pytest_report_from_serializable(config=session.config, data=content)
            name = f"{runner.part.name} {runner.number}"
            # As pytest's terminal knows xdist's.
            report.node = SimpleNamespace(gateway=SimpleNamespace(id=name), _workerinfocache=f"[{name}]")
            hook.pytest_runtest_logreport(report=report)

    def _ended(self, session: pytest.Session, runner: Runner) -> None:
        """Whoever ends before all is done has failed the test that it ran; others run what is left."""
        self._runners.remove(runner)
        runner.connection.close()
        _, status = os.waitpid(runner.pid, 0)
        with suppress(ProcessLookupError):
            os.killpg(runner.pid, signal.SIGTERM)  # what it has left behind
        if os.waitstatus_to_exitcode(status) == 0 and runner.runs is None and not runner.given:
            return
        at_fault = runner.runs if runner.runs is not None else next(iter(runner.given), None)
        left = [place for place in runner.given if place != at_fault]
        if left:
            runner.part.files.appendleft(left)
        ending = f"its process has ended with exit code {os.waitstatus_to_exitcode(status)}"
        if at_fault is None:
            raise session.Failed(f"behind its last test, {ending}")
        item = session.items[at_fault]
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", ending, "call")
        session.config.hook.pytest_runtest_logreport(report=report)


class Running:
    """What a forked process does; a plugin of pytest that sends on what is reported.

    Args:
        folder: for temporary files.
    """

    def __init__(self, session: pytest.Session, connection: Connection[Any, Any], folder: Path) -> None:
        config = session.config
        self._session, self._connection, self._config = session, connection, config
        self._has_begun = False  # pytest tells new plugins of all earlier warnings
        config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        # The other process tells what was reported.
        config.get_terminal_writer()._file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - stays
        # The files into which is captured have one place for all processes that have them.
        capturing = config.pluginmanager.getplugin("capturemanager")
        if capturing is not None:
            capturing.stop_global_capturing()
            capturing.start_global_capturing()
        config.pluginmanager.register(self)

    def run(self) -> None:
        """Run the tests that it is given."""
        self._has_begun = True
        session, items = self._session, self._session.items
        while file := self._ask():
            # Fixtures of a file end with it. The next one is not asked for yet: whoever is first has it.
            for place, following in pairwise([*file, None]):
                assert place is not None, "only the last is none"
                self._send("begins", place)
                nextitem = session if following is None else items[following]
                self._config.hook.pytest_runtest_protocol(item=items[place], nextitem=nextitem)
                self._send("ends", place)
        session._setupstate.teardown_exact(None)

    def _ask(self) -> File:
        self._send("asks")
        given: File = self._connection.recv()
        return given

    def _send(self, kind: str, content: object = None) -> None:
        sent: Sent = kind, content
        self._connection.send(sent)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send it on."""
        hook = self._config.hook
        self._send("reports", hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(
        self, warning_message: object, when: str, nodeid: str, location: object
    ) -> None:
        """Send it on, if it can be sent: a category may be a class that a test has made."""
        warned = {
            "warning_message": warning_message,
            "when": when,
            "nodeid": nodeid,
            "location": location,
        }
        if self._has_begun:
            with suppress(Exception):
                self._send("warns", warned)
