"""How `make test` runs tests; Pythons that tests fork are as those that are started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import run_tests

from helpers.ready_python import ADDRESS, ReadyPython


def ending_with(code: int, says: str = "") -> list[str]:
    return [sys.executable, "-c", f"print({says!r}); raise SystemExit({code})"]


@pytest.mark.parametrize(
    ("beside", "in_turn", "code"),
    [(0, (0, 0), 0), (5, (0, 5), 0), (1, (0, 0), 1), (0, (2, 0), 2), (0, (0, 3), 3), (4, (2, 3), 2)],
)
def test_the_suite_fails_where_any_of_its_parts_does(
    beside: int, in_turn: tuple[int, ...], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """5 is pytest's "no such tests"; each part runs, and what the one beside the others says comes last."""
    others = [ending_with(each, f"part {number}") for number, each in enumerate(in_turn)]
    assert run_tests.run_all(ending_with(beside, "beside"), others) == code
    assert capfd.readouterr().out.split("\n") == ["part 0", "part 1", "beside", ""]


def test_what_runs_beside_the_others_gives_way_and_ends_with_them(tmp_path: Path) -> None:
    told = tmp_path / "told"
    tells = (
        f"open('{told}.new', 'w').write(f'{{os.nice(0)}} {{os.getpid()}}'); os.rename('{told}.new', '{told}')"
    )
    waiting = [sys.executable, "-c", f"import os, time; {tells}; time.sleep(600)"]
    look = [sys.executable, "-c", f"import os, time\nwhile not os.path.exists('{told}'): time.sleep(0.01)"]
    with pytest.raises(FileNotFoundError):
        run_tests.run_all(waiting, [look, ["/no/such/command"]])
    nice, pid = told.read_text().split()
    assert int(nice) == min(19, os.nice(0) + run_tests.YIELDING)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_all_parts_ask_one_forker(capfd: pytest.CaptureFixture[str]) -> None:
    tells = [sys.executable, "-c", f"import os; print(os.environ[{ADDRESS!r}])"]
    assert run_tests.run_all(tells, [tells]) == 0
    address, again = capfd.readouterr().out.split()
    assert address == again


@pytest.mark.parametrize(("arguments", "but"), [(["-k", "a"], " and not long"), (["--all", "-k", "a"], "")])
def test_the_parts_are_all_tests_each_once_but_for_long_ones(arguments: list[str], but: str) -> None:
    beside, in_turn = run_tests.chosen(arguments)
    marks = [command[command.index("-m", 3) + 1] for command in (beside, *in_turn)]
    parts = ("not processes", "processes and not alone", "processes and alone")
    assert marks == [part + but for part in parts]
    assert all(command[-2:] == ["-k", "a"] and "--all" not in command for command in (beside, *in_turn))


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
