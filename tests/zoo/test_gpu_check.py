"""`make gpu-check` without a GPU: what it says, inside its time, and what is left when it is cut short."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gpu_check
import psutil
import pytest
import yaml
from gpu_bench.commands import CommandFailedError, Commands, NotReachedError, run_until
from gpu_bench.record import Line, Status, document, memory_line, passed, share_of_peak, table, time_line
from gpu_bench.steps import (
    ONE_RANK,
    SECTIONS,
    TWO_RANKS,
    Machine,
    Step,
    Subject,
    flops_of,
    gpu_tests,
    guarded,
    memory,
    probe,
    resumed,
    steps_of,
    taken,
    timed,
    verified,
)

from helpers.plans import metaop_of
from spindle_cli.files.cluster import Cluster
from spindle_cli.workload.building.load import load

H200 = "h200-141gb"
HERE = Machine("cuda", H200, 2**31, "NVIDIA H200")


def ended(out: str = "", code: int = 0, err: str = "") -> Any:
    return lambda command, **_: subprocess.CompletedProcess(command, code, out, err)


def too_slow(out: str = "") -> Any:
    def run(command: list[str], *, timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout, out)

    return run


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks a process of its own, which would import torch, what this machine is."""
    said = {"kind": "cpu", "name": "cpu", "memory_bytes": 2**30, "said": "a CPU"}
    ask = Commands.python

    def python(self: Commands, *words: str) -> str:
        return json.dumps(said) if "gpu_bench.machine" in words else ask(self, *words)

    monkeypatch.setattr(Commands, "python", python)


def test_without_a_gpu_it_says_so_and_ends_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_check.main(["-o", str(tmp_path / "found")]) == 3
    assert "there is no GPU here" in capsys.readouterr().out
    assert not (tmp_path / "found").exists()


@pytest.mark.parametrize(
    ("predicted_s", "status"), [(1.25, "ok"), (1.26, "off"), (0.75, "ok"), (0.74, "off")]
)
def test_a_time_that_is_a_quarter_off_is_off(predicted_s: float, status: str) -> None:
    assert time_line("w", predicted_s, 1.0).status == status


@pytest.mark.parametrize(("measured", "status"), [(1019, "ok"), (1021, "failed"), (701, "ok"), (699, "off")])
def test_memory_beyond_the_prediction_fails_and_far_below_is_off(measured: int, status: str) -> None:
    assert memory_line("w", 1000, measured).status == status


def test_the_share_of_the_peak_counts_three_passes_of_each_device() -> None:
    """989 TFLOP/s in bfloat16: 3 x 989e12 operations over 2 devices in 3 s are half of it."""
    metaop = metaop_of("a/m", 1, {1: 3.0}, flops_per_op=989 * 10**12)
    assert share_of_peak(H200, "bfloat16", metaop, 2, 3.0) == pytest.approx(0.5, rel=0.01)
    assert share_of_peak("own", "bfloat16", metaop, 2, 3.0) is None
    assert share_of_peak(H200, "bfloat16", metaop_of("a/m", 1, {1: 3.0}), 1, 3.0) is None


def test_commands_end_with_the_budget() -> None:
    now = [0.0]
    commands = Commands(100.0, run=ended("said"), clock=lambda: now[0])
    assert commands.spindle("plan") == "said"
    now[0] = 86.0
    with pytest.raises(NotReachedError, match="no time was left"):
        commands.spindle("plan")
    with pytest.raises(NotReachedError, match="did not end in 100 s") as stopped:
        Commands(100.0, run=too_slow("half"), clock=lambda: 0.0).spindle("plan")
    assert stopped.value.out == "half"


def test_commands_end_with_their_step_and_what_follows_has_its_own_time() -> None:
    now, had = [0.0], list[float]()

    def run(command: list[str], *, timeout: float, **_: Any) -> Any:
        had.append(timeout)
        return subprocess.CompletedProcess(command, 0, "", "")

    commands = Commands(100.0, run=run, clock=lambda: now[0])
    with commands.step("one", 40.0):
        commands.python("-V")
        now[0] = 30.0
        with pytest.raises(NotReachedError):
            commands.python("-V")
    with commands.step("other", 90.0), commands.beside("part") as part:
        part.python("-V")
    commands.python("-V")
    assert had == [40.0, 70.0, 70.0]


def test_every_command_is_in_the_packed_logs_at_once(tmp_path: Path) -> None:
    commands = Commands(100.0, tmp_path, ended("said", 1, "why"))
    with commands.step("tests/gpu", 50.0):
        with pytest.raises(CommandFailedError):
            commands.spindle("plan")
        with commands.beside("a part") as part, pytest.raises(CommandFailedError):
            part.spindle("verify")
        with tarfile.open(tmp_path / "logs.tar.gz") as archive:
            assert archive.getnames() == ["logs/00-tests-gpu.log", "logs/01-a-part.log"]
            texts = [archive.extractfile(name).read().decode() for name in archive.getnames()]  # type: ignore[union-attr]
    assert [word in texts[0] for word in ("spindle_cli plan", "said", "why", "exit code 1")] == [True] * 4
    assert "spindle_cli verify" in texts[1]


def test_a_command_whose_time_is_up_ends_with_all_it_has_started(tmp_path: Path) -> None:
    files = tmp_path / "running.out", tmp_path / "running.err"
    child = "import os, sys, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
    run = f"subprocess.run([sys.executable, '-c', {child!r}])"
    parent = f"import subprocess, sys; print('begun', flush=True); {run}"
    with pytest.raises(subprocess.TimeoutExpired) as stopped:
        run_until([sys.executable, "-c", parent], cwd=tmp_path, timeout=3, env={}, files=files)
    begun, number = stopped.value.output.split()
    assert begun == "begun"
    assert files[0].read_text() == stopped.value.output
    for _ in range(100):
        if not psutil.pid_exists(int(number)) or psutil.Process(int(number)).status() == "zombie":
            return
        time.sleep(0.1)
    pytest.fail("a session of its own was left running")


def test_a_failed_command_is_a_failed_line_and_what_is_not_reached_is_none() -> None:
    commands = Commands(100.0, run=ended(code=4, err="\nno plan\nhint\n"))
    with pytest.raises(CommandFailedError, match="exit code 4: no plan / hint"):
        commands.spindle("plan")
    (line,) = guarded("tests", "tests/gpu", lambda: gpu_tests(commands))
    assert (line.status, passed([line])) == ("failed", False)
    late = Commands(0.0, run=too_slow())
    (line,) = guarded("tests", "tests/gpu", lambda: gpu_tests(late))
    assert (line.status, passed([line])) == ("not reached", True)


ONE, OTHER, THIRD = (f"tests/gpu/test_{name}.py::test_{name}" for name in ("one", "other[a-1]", "third"))


@pytest.mark.parametrize(
    ("out", "status", "said"),
    [
        (f"{ONE} SKIPPED (no GPU) [ 50%]\n{OTHER} SKIPPED [100%]", "skipped", "2 skipped"),
        (f"{ONE} PASSED [ 50%]\n{OTHER} PASSED [100%]\n2 passed in 9s", "ok", "2 passed"),
        ("", "skipped", "none was run"),
    ],
)
def test_tests_that_are_skipped_show_nothing(out: str, status: str, said: str) -> None:
    (line,) = gpu_tests(Commands(100.0, run=ended(out)))
    assert (line.status, line.said) == (status, said)


def test_the_tests_that_failed_are_named_and_those_that_passed_count_however_it_ends() -> None:
    out = f"{ONE} PASSED [ 30%]\n{OTHER} FAILED [ 60%]\n{THIRD} ERROR [100%]\nFAILED {OTHER} - AssertionError"
    (line,) = gpu_tests(Commands(100.0, run=ended(out, code=1)))
    assert (line.status, line.said) == ("failed", "1 passed; failed: test_other[a-1], test_third")

    def statuses(run: Any) -> list[tuple[str, str]]:
        lines = guarded("tests", "tests/gpu", lambda: gpu_tests(Commands(100.0, run=run)))
        return [(line.status, line.said[:27]) for line in lines]

    assert statuses(too_slow(f"{ONE} PASSED [ 30%]\n{OTHER} ")) == [
        ("ok", "1 passed, then it ended"),
        ("not reached", "did not end in 100 s"),
    ]
    crashed = statuses(ended(f"{ONE} PASSED [ 30%]", code=-11, err="Segmentation fault"))
    assert [status for status, _ in crashed] == ["ok", "failed"]
    assert [status for status, _ in statuses(too_slow(f"{ONE} FAILED [ 30%]"))] == ["failed"]


def test_the_tests_need_no_plugin_of_our_own_environment() -> None:
    seen = list[str]()

    def run(command: list[str], **_: Any) -> Any:
        seen.extend(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    list(gpu_tests(Commands(100.0, run=run), "-k", "offload"))
    assert seen[1:] == ["-m", "pytest", "-v", "-rs", "-o", "addopts=", "tests/gpu", "-k", "offload"]


def test_what_several_ask_for_is_made_once() -> None:
    commands, made = Commands(100.0), list[int]()

    def make() -> str:
        made.append(1)
        time.sleep(0.1)
        return "profile"

    with ThreadPoolExecutor(4) as pool, commands.beside("part") as part:
        asked = [pool.submit(each.once, "noisy", make) for each in (commands, part, commands)]
        assert [each.result() for each in asked] == ["profile"] * 3
        assert pool.submit(part.once, "digits", make).result() == "profile"
    assert len(made) == 2


def test_what_failed_is_not_tried_again_but_what_had_no_time_is() -> None:
    commands, tried = Commands(100.0), list[str]()

    def fail(error: Exception) -> str:
        tried.append(str(error))
        raise error

    for error in (NotReachedError(), CommandFailedError("exit code 4")):
        with pytest.raises(type(error)):
            commands.once("noisy", partial(fail, error))
    with pytest.raises(CommandFailedError, match="exit code 4"):
        commands.once("noisy", partial(fail, NotReachedError()))
    assert tried == ["no time was left", "exit code 4"]


LOSSES = {1: 2.0, 2: 1.5, 3: 1.0, 4: 0.9, 5: 0.8, 6: 0.7}


@pytest.mark.parametrize(
    ("again", "status"),
    [(LOSSES, "ok"), ({**LOSSES, 6: 0.701}, "failed"), ({1: 2.0, 2: 1.5, 3: 1.0, 4: 0.9}, "failed")],
)
def test_a_run_that_goes_on_has_the_losses_of_one_without_a_break(
    again: dict[int, float], status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> Any:
        folder = Path(command[command.index("--run-dir") + 1])
        folder.mkdir(exist_ok=True)
        losses = LOSSES if folder.name == "whole" else again
        text = "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in losses.items())
        (folder / "metrics.jsonl").write_text(text)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("gpu_bench.steps.planned", lambda *_: None)
    (line,) = resumed(HERE)(Commands(100.0, run=run), tmp_path)
    assert line.status == status


@pytest.mark.parametrize(("same", "status"), [(True, "ok"), (False, "failed")])
def test_a_training_that_differs_from_plain_pytorch_is_failed(
    same: bool, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {"steps": 2, "same": same, "checks": [{"largest": {"relative": 0.5}}, {"largest": None}]}
    monkeypatch.setattr("gpu_bench.steps.planned", lambda *_: None)
    monkeypatch.setattr("gpu_bench.steps._described", lambda _: "2 devices")
    compared = Commands(100.0, run=ended(json.dumps(report), code=0 if same else 1))
    (line,) = verified(compared, tmp_path, HERE, ONE_RANK[0], "verify")
    assert (line.status, line.values) == (status, {"largest": 0.5})
    broken = Commands(100.0, run=ended(code=1, err="error: no memory"))
    with pytest.raises(CommandFailedError, match="no memory"):
        list(verified(broken, tmp_path, HERE, ONE_RANK[0], "verify"))


def test_what_a_probe_has_said_counts_however_it_ends(tmp_path: Path) -> None:
    said = json.dumps({"probe": "one", "status": "ok", "said": "well", "seconds": 1.0})
    bad = said.replace('"ok"', '"failed"')
    step = Step("kernels", "cuda", 50.0, probe("kernels", "gpu_bench.kernels"))

    def statuses(run: Any, number: int) -> list[str]:
        folder = tmp_path / str(number)
        folder.mkdir()
        return [line.status for line in taken(Commands(100.0, run=run), folder, step)]

    assert statuses(ended(f"torch says\n{said}\n"), 0) == ["ok"]
    assert statuses(ended(f"{said}\n", code=-11), 1) == ["ok", "failed"]
    assert statuses(ended(f"{said}\n{bad}\n", code=1), 2) == ["ok", "failed"]
    assert statuses(too_slow(f'{said}\n{{"probe": "oth'), 3) == ["ok", "not reached"]


def test_what_follows_a_plan_is_not_reached_without_one(tmp_path: Path) -> None:
    commands = Commands(100.0, run=ended())
    for find in (timed, memory):
        with pytest.raises(NotReachedError):
            list(find(commands, tmp_path, "digits"))


def test_table_and_document_have_every_line() -> None:
    lines = [
        time_line("one", 1.0, 1.0),
        memory_line("two", 100, 200),
        Line("verify", "three", "not reached", "no time was left", {}),
    ]
    text = table("a device", lines)
    assert [word in text for word in ("a device", "one", "two", "three")] == [True] * 4
    assert text.endswith("1 ok, 0 off, 1 failed, 1 not looked at")
    written = json.loads(json.dumps(document("a device", 2**30, 1.5, lines)))
    assert (written["passed"], written["memory_gib"], len(written["lines"])) == (False, 1.0, 3)
    assert written["lines"][1]["values"] == {"predicted_bytes": 100, "measured_bytes": 200}


@pytest.mark.usefixtures("known_machine")
def test_the_table_stands_when_it_is_stopped_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find(_: Commands, __: Path) -> Iterator[Line]:
        yield Line("a", "first", "ok", "well", {})
        raise KeyboardInterrupt

    def steps(*_: object) -> list[Step]:
        return [Step("a", "first", 9.0, find), Step("b", "second", 9.0, find)]

    monkeypatch.setattr(gpu_check, "steps_of", steps)
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main(["--device", "cpu", "-o", str(tmp_path)])
    lines = json.loads((tmp_path / "gpu-check.json").read_text())["lines"]
    assert [(line["subject"], line["status"]) for line in lines] == [
        ("first", "ok"),
        ("first", "not reached"),
        ("second", "not reached"),
    ]
    assert "2 not looked at" in (tmp_path / "gpu-check.txt").read_text()


@pytest.mark.parametrize(
    ("statuses", "code"), [(("ok", "off", "skipped", "not reached"), 0), (("ok", "failed", "ok"), 1)]
)
def test_the_exit_code_says_whether_anything_failed_and_the_files_have_every_line(
    statuses: Sequence[Status],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def find(status: Status, commands: Commands, _: Path) -> Iterator[Line]:
        commands.python("-c", f"print('said', {status!r})")
        yield Line("a", f"of {status}", status, "well", {})

    def steps(*_: object) -> list[Step]:
        return [Step("a", f"{n}", 99.0, partial(find, status)) for n, status in enumerate(statuses)]

    monkeypatch.setattr(gpu_check, "steps_of", steps)
    monkeypatch.setenv("PYTHONPATH", "")
    assert gpu_check.main(["--device", "cpu", "-o", str(tmp_path)]) == code
    written = json.loads((tmp_path / "gpu-check.json").read_text())
    assert [line["status"] for line in written["lines"]] == list(statuses)
    assert written["passed"] == (code == 0)
    for text in (capsys.readouterr().out, (tmp_path / "gpu-check.txt").read_text()):
        assert [f"of {status}" in text.partition("what was found")[2] for status in statuses] == [True] * len(
            statuses
        )
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert len(archive.getnames()) == 1 + len(statuses)


def test_what_has_no_time_for_a_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--budget", "14.5"])
    assert ended.value.code == 2
    assert "--budget 14.5: expected 15 seconds or more" in capsys.readouterr().err


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize(
    ("arguments", "taken", "budget_s"),
    [
        ([], [("ranks", 90.0), ("two ranks", 6.0), ("ranks", 45.0)], 3 * 540.0),
        (["--only", "two ranks", "stack"], [("two ranks", 6.0)], 3 * 540.0),
        (["--only", "two ranks", "--slower", "2.5"], [("two ranks", 5.0)], 2.5 * 540.0),
        (["--only", "ranks", "--budget", "99"], [("ranks", 90.0), ("ranks", 45.0)], 99.0),
    ],
)
def test_sections_may_be_chosen_and_on_a_cpu_each_step_and_all_of_it_have_three_times_as_long(
    arguments: list[str],
    taken: list[tuple[str, float]],
    budget_s: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    found, budgets = [], set()

    def find(step: Step, commands: Commands) -> Iterator[Line]:
        found.append((step.section, step.limit_s))
        budgets.add(commands.budget_s)
        yield Line(step.section, step.subject, "ok", "well", {})

    def steps(*_: object) -> list[Step]:
        limits_s = {"a": ("ranks", 30.0), "b": ("two ranks", 2.0), "c": ("ranks", 15.0)}
        return [Step(section, name, limit_s, find) for name, (section, limit_s) in limits_s.items()]

    monkeypatch.setattr(gpu_check, "steps_of", steps)
    monkeypatch.setattr(gpu_check, "taken", lambda commands, _, step: find(step, commands))
    monkeypatch.setenv("PYTHONPATH", "")
    assert gpu_check.main(["--device", "cpu", "-o", str(tmp_path), *arguments]) == 0
    assert (found, budgets) == (taken, {budget_s})
    lines = json.loads((tmp_path / "gpu-check.json").read_text())["lines"]
    assert [line["section"] for line in lines] == [section for section, _ in taken]


def test_ranks_that_share_a_device_share_its_memory(tmp_path: Path) -> None:
    cluster = Cluster.read(HERE.write_cluster(tmp_path / "c.yaml", 2))
    assert (cluster.num_devices, cluster.nodes[0].memory_gib, cluster.nodes[0].device) == (2, 1.0, H200)


def test_subjects_are_workloads_that_load(tmp_path: Path) -> None:
    seen = set()
    for variant in (*ONE_RANK, *TWO_RANKS):
        path = variant.subject.write(tmp_path / "w.yaml")
        key = path.read_text()
        if variant.subject.source != "noisy" or key in seen:
            continue
        seen.add(key)
        loaded = load(str(path))
        assert [task.name for task in loaded.workload.tasks] == ["one", "other"]
        for name, value in variant.subject.train.items():
            if name == "precision":
                assert loaded.train.precision == value
    wide = Subject("stack", {"precision": "bf16-autocast"}, {"width": 64, "layers": 2}).write(
        tmp_path / "s.yaml"
    )
    assert yaml.safe_load(wide.read_text())["args"] == {"width": 64, "layers": 2}
    (task,) = load(str(wide)).workload.tasks
    assert len(task.module.layers) == 2  # type: ignore[union-attr]
    digits = yaml.safe_load(Subject("digits", {"precision": "bf16"}).write(tmp_path / "d.yaml").read_text())
    assert (digits["train"]["precision"], digits["train"]["optimizer"]) == ("bf16", "AdamW")


def test_the_work_of_an_iteration_is_three_passes_of_every_op() -> None:
    metaops = (
        metaop_of("a/m", 3, {1: 1.0}, flops_per_op=10.0),
        metaop_of("a/n", 2, {1: 1.0}),
        metaop_of("b/m", 1, {1: 1.0}, flops_per_op=4.0),
    )
    assert flops_of(type("P", (), {"metaops": metaops})()) == 3 * (3 * 10.0 + 4.0)  # type: ignore[arg-type]


def test_each_step_has_a_name_and_a_limit_of_its_own(tmp_path: Path) -> None:
    for size in ("full", "toy"):
        steps = list(steps_of(HERE, size, tmp_path / "trace"))
        names = [(step.section, step.subject) for step in steps]
        assert len(set(names)) == len(names)
        assert {section for section, _ in names} == set(SECTIONS)
        assert all(15 < step.limit_s <= 120 for step in steps)
        assert names[0] == ("machine", "cuda")
