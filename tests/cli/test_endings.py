"""How commands end when interrupted, when nobody reads, when the disk is full, and when we have a bug."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.cli import run_spindle, spindle_process
from helpers.plans import two_towers
from spindle_cli.cli.app import COMMANDS, load_command
from spindle_cli.errors import InputError
from spindle_cli.files.writing import write_text
from spindle_cli.plan.file import write_plan


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    write_plan(path, two_towers()[1])
    return path


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_and_its_one_line_in_the_list(name: str) -> None:
    ended = run_spindle(name, "--help")
    assert ended.code == 0
    assert COMMANDS[name] in ended.out
    assert name in run_spindle("--help").out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_option_has_help(name: str) -> None:
    for parameter in load_command(name).params:
        assert parameter.help, f"{name} {parameter.name}"


@pytest.mark.parametrize("after_s", [0.0, 0.3])
def test_an_interrupt_ends_with_one_line(tmp_path: Path, after_s: float) -> None:
    pipe = tmp_path / "plan.yaml"
    os.mkfifo(pipe)
    process = spindle_process("check", pipe)
    writer = pipe.open("w")  # returns when the command has opened its end: it is waiting for the plan now
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    writer.close()  # a read that began just as the signal came would wait for ever
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def test_a_reader_that_has_gone_is_no_error(plan: Path) -> None:
    read_end, write_end = os.pipe()
    process = spindle_process("show", plan, stdout=write_end)
    os.close(write_end)
    os.close(read_end)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, "")


@pytest.mark.parametrize("arguments", [("check",), ("check", "--json"), ("show",)])
def test_standard_output_on_a_full_disk(plan: Path, arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        process = spindle_process(*arguments, plan, stdout=full)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (1, "error: standard output: No space left on device\n")


def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "plan.yaml"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(InputError, match="No space left"):
        write_text(path, "new")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("plan.yaml", "old")]


def test_our_own_bug_says_so_and_how_to_see_more(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("spindle_cli.check.run.check_plan", broken)
    ended = run_spindle("check", plan)
    assert ended.code == 70
    assert "internal error: ZeroDivisionError" in ended.err
    assert "Traceback" not in ended.err
    assert "Traceback" in run_spindle("--debug", "check", plan).err


def test_a_mistyped_command_gets_a_suggestion() -> None:
    assert "Did you mean 'check'?" in run_spindle("chek").err


def test_json_is_one_document_and_text_is_not_mixed_in(plan: Path) -> None:
    for arguments in (["check", plan], ["show", plan], ["show", plan, "--rank", "0"]):
        ended = run_spindle(*arguments, "--json")
        assert ended.err == ""
        assert json.loads(ended.out)["schema"].startswith("spindle.")


def test_both_ways_to_start_it_are_the_same_command() -> None:
    script = Path(sys.executable).parent / "spindle"
    outputs = [
        subprocess.run(
            [*command, "--version"], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        for command in ([script], [sys.executable, "-m", "spindle_cli"])
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("spindle ")


def test_completion_knows_commands_and_their_options() -> None:
    def complete(words: str, position: int) -> str:
        environment = {**os.environ, "_SPINDLE_COMPLETE": "complete_bash", "COMP_WORDS": words}
        process = spindle_process(env=environment | {"COMP_CWORD": str(position)})
        return process.communicate(timeout=120)[0]

    assert set(COMMANDS) <= set(complete("spindle ", 1).split())
    assert "--rank" in complete("spindle show --r", 2)


def test_completion_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    ended = run_spindle("--show-completion", "bash")
    assert "spindle" in ended.out
