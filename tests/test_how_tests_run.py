"""How `make test` runs tests; Pythons that tests fork are as those that are started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import in_parts
import psutil
import pytest
import run_tests

from helpers.ready_python import ReadyPython

SETTINGS = """[pytest]
addopts = -q -p no:cacheprovider
markers =
    processes: starts workers
    alone: beside no other
    long: takes long
"""
# Each test leaves a file with when it began and ended, how nice it is, and its process.
BEGINNING = """import os, pathlib, subprocess, sys, time
import pytest

@pytest.fixture(autouse=True)
def noted(request):
    began = time.monotonic()
    yield
    said = f"{began} {time.monotonic()} {os.nice(0)} {os.getpid()}"
    pathlib.Path("of_" + request.node.name).write_text(said)
"""
MARKS = {
    "beside": "",
    "pair": "@pytest.mark.processes\n",
    "alone": "@pytest.mark.processes\n@pytest.mark.alone\n",
    "long": "@pytest.mark.long\n",
}
RUN = [sys.executable, run_tests.__file__]
# A suite of these tests is run without what is installed beside pytest.
PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": ""}


def write_suite(folder: Path, **bodies: str) -> None:
    """A file for each body, named as the file; up to '_', it says the tests' marks."""
    (folder / "pytest.ini").write_text(SETTINGS)
    for name, body in bodies.items():
        marks = MARKS[name.split("_")[0]]
        (folder / f"test_{name}.py").write_text(f"{BEGINNING}\n{marks}def test_{name}():\n    {body}\n")


def run_suite(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **PLAIN}
    return subprocess.run([*RUN, *arguments], cwd=folder, env=environment, text=True, capture_output=True)


def notes_in(folder: Path) -> dict[str, list[float]]:
    """What the tests of a suite have left, by name."""
    found = sorted(folder.glob("of_*"))
    return {path.name.removeprefix("of_test_"): [*map(float, path.read_text().split())] for path in found}


@pytest.mark.parametrize("failing", [None, "beside", "pair", "alone"])
def test_the_suite_fails_where_any_of_its_parts_does(failing: str | None, tmp_path: Path) -> None:
    """Each test runs, whatever the others do."""
    write_suite(tmp_path, **{name: f"assert {name!r} != {failing!r}" for name in MARKS})
    ended = run_suite(tmp_path)
    assert ended.returncode == (0 if failing is None else 1), ended.stdout
    assert f"{2 if failing else 3} passed" in ended.stdout
    assert (f"FAILED test_{failing}.py::test_{failing}" in ended.stdout) == (failing is not None)
    assert list(notes_in(tmp_path)) == ["alone", "beside", "pair"]


def test_a_process_that_ends_has_failed_its_test_and_another_runs_what_is_left(tmp_path: Path) -> None:
    write_suite(tmp_path, alone_dies="os._exit(0)", alone_later="pass")
    with (tmp_path / "test_alone_dies.py").open("a") as more:
        more.write(f"\n{MARKS['alone']}def test_alone_left():\n    pass\n")
    ended = run_suite(tmp_path)
    assert ended.returncode == 1
    assert "FAILED test_alone_dies.py::test_alone_dies - its process has ended" in ended.stdout
    assert "1 failed, 2 passed" in ended.stdout
    assert list(notes_in(tmp_path)) == ["alone_later", "alone_left"]


def test_tests_run_in_pairs_then_one_by_one_and_others_beside_them_in_what_is_left(tmp_path: Path) -> None:
    def meets(other: str) -> str:
        sees = f"(pathlib.Path('is_{other}').exists() or time.sleep(0.01) for _ in range(3000))"
        here = "sys._getframe().f_code.co_name.replace('test', 'is')"
        return f"pathlib.Path({here}).touch(); assert any({sees})"

    pairs = {"pair_1": meets("pair_2"), "pair_2": meets("pair_1")}
    write_suite(tmp_path, **pairs, alone_1="time.sleep(0.2)", alone_2="pass", beside=meets("pair_1"))
    ended = run_suite(tmp_path)
    assert ended.returncode == 0, ended.stdout
    notes = notes_in(tmp_path)
    (first, last) = sorted(notes[name] for name in ("alone_1", "alone_2"))
    assert max(notes["pair_1"][1], notes["pair_2"][1]) <= first[0] < first[1] <= last[0]
    assert {name: note[2] - os.nice(0) for name, note in notes.items() if name != "beside"} == dict.fromkeys(
        ("pair_1", "pair_2", "alone_1", "alone_2"), 0
    )
    assert notes["beside"][2] == min(19, os.nice(0) + in_parts.YIELDING)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_ends_what_it_has_started(number: int, tmp_path: Path) -> None:
    starts = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    waits = "pathlib.Path('{0}.new').write_text(f'{{os.getpid()}} {{started.pid}}'); "
    waits += "os.rename('{0}.new', '{0}.told'); time.sleep(600)"
    names = ("beside", "pair")
    write_suite(tmp_path, **{name: f"started = {starts}; {waits.format(name)}" for name in names})
    run = subprocess.Popen(RUN, cwd=tmp_path, env={**os.environ, **PLAIN}, stdout=subprocess.DEVNULL)
    told = [tmp_path / f"{name}.told" for name in names]
    while not all(path.exists() for path in told):
        assert run.poll() is None
        time.sleep(0.01)
    run.send_signal(number)
    assert run.wait(120) == (2 if number == signal.SIGINT else 128 + number)
    for pid in (int(pid) for path in told for pid in path.read_text().split()):
        until = time.monotonic() + 60  # whoever takes them in from their parents must do so
        while is_alive(pid):
            assert time.monotonic() < until
            time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("arguments", "given"),
    [(["-k", "a"], ["-m", "not long", "-k", "a"]), (["--all", "-k", "a"], ["-k", "a"])],
)
def test_all_tests_are_run_but_for_long_ones(arguments: list[str], given: list[str]) -> None:
    assert run_tests.chosen(arguments) == given


@pytest.mark.processes
def test_a_forked_python_is_as_one_of_its_own(forker: socket.socket, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": "/some/where", "PYTHONUSERBASE": "/some/one"}
    said = []
    for start in (partial(ReadyPython, forker), subprocess.Popen):
        with tempfile.TemporaryFile("w+") as out:
            process = start([sys.executable, "-m", "site"], env=environment, cwd=tmp_path, stdout=out)
            assert process.wait(120) == 0
            out.seek(0)
            said.append([line for line in out if "/some/" in line or str(tmp_path) in line])
    assert said[0] == said[1]
    assert len(said[0]) == 4, said[0]


@pytest.mark.processes
def test_how_a_forked_python_ends_is_told(forker: socket.socket, tmp_path: Path) -> None:
    failing = [sys.executable, "-m", "json.tool", str(tmp_path / "missing.json")]
    with tempfile.TemporaryFile() as errors:
        assert ReadyPython(forker, failing, stdout=errors, stderr=subprocess.STDOUT).wait(120) != 0
    waiting = ReadyPython(forker, [sys.executable, "-m", "json.tool"], stdin=subprocess.PIPE)
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.1)
    waiting.kill()
    assert waiting.wait(120) == -9
    assert waiting.stdin is not None
    waiting.stdin.close()
