"""A run's folder has one owner, whoever comes together, and a dead one's is taken over."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.plans import two_towers
from spindle_cli.errors import RunFailedError
from spindle_cli.files.artifact import to_json
from spindle_cli.launch import owner
from spindle_cli.launch.owner import (
    LOST_S,
    HeldError,
    Hold,
    Owner,
    is_running,
    living_claims,
    process_space,
    run_of,
    started_s,
)
from spindle_cli.launch.run import _held, choose_run_dir
from spindle_cli.launch.types import Address, NodeShare


def put_claim(run_dir: Path, number: int, *, quiet_s: float = 0, **changes: object) -> Path:
    """A claim of a process that runs on another host, heard of so many seconds ago."""
    folder = run_dir / "workers"
    folder.mkdir(parents=True, exist_ok=True)
    claim = Owner(
        run="other", node_rank=0, host="far", pid=4711, space="elsewhere", started_s=1e9, since_s=1.7e9
    )
    path = folder / f"owner-{number}.json"
    path.write_text(to_json(claim.model_copy(update=changes)))
    then = time.time() - quiet_s
    os.utime(path, (then, then))
    return path


def take(run_dir: Path, run: str = "mine", node_rank: int = 0) -> Hold:
    hold = Hold()
    hold.take(run_dir, run, node_rank)
    return hold


def test_whoever_comes_second_is_told_who_has_the_folder(tmp_path: Path) -> None:
    put_claim(tmp_path / "run", 1, quiet_s=3.5)  # the clock of files may be behind
    with pytest.raises(HeldError) as told:
        take(tmp_path / "run")
    assert told.value.exit_code == 2
    said = re.escape(
        f"{tmp_path / 'run'}: a run is going on in it: it is held by process 4711 on far "
        "since 2023-11-14 22:13:20 UTC, last heard of "
    )
    quiet = re.match(said + r"(\d+)", told.value.message)
    assert quiet is not None, told.value.message
    assert 3 <= int(quiet[1]) < LOST_S


@pytest.mark.parametrize(
    ("quiet_s", "changes", "is_dead"),
    [
        (LOST_S - 5, {}, False),
        (LOST_S + 5, {}, True),
        (0, {"ended": True}, True),
        (0, {"space": process_space(), "pid": 2**22 + 1}, True),
        # A process of this host is asked for, however long nothing has been heard of it ...
        (LOST_S + 5, {"space": process_space(), "pid": os.getpid(), "started_s": started_s()}, False),
        # ... and is another one where its id was given away again.
        (0, {"space": process_space(), "pid": os.getpid(), "started_s": started_s() - 60}, True),
    ],
)
def test_what_is_dead_is_taken_over(
    quiet_s: float, changes: dict[str, object], is_dead: bool, tmp_path: Path
) -> None:
    put_claim(tmp_path, 1, quiet_s=quiet_s, **changes)
    if not is_dead:
        with pytest.raises(HeldError):
            take(tmp_path)
        return
    hold = take(tmp_path)
    (claim,) = living_claims(tmp_path)
    assert (claim.number, claim.owner and claim.owner.run) == (2, "mine")
    hold.release()
    assert living_claims(tmp_path) == ()
    take(tmp_path, "next").release()


@pytest.mark.parametrize("content", ["", "{", '{"schema": "spindle.owner/9"}', "\0\xff"])
def test_a_claim_that_cannot_be_read_holds_until_it_is_silent(content: str, tmp_path: Path) -> None:
    path = put_claim(tmp_path, 3)
    path.write_text(content)
    with pytest.raises(HeldError, match="held by a launch whose claim cannot be read"):
        take(tmp_path)
    then = time.time() - LOST_S - 1
    os.utime(path, (then, then))
    take(tmp_path).release()


def test_nodes_of_one_run_share_the_folder_each_once(tmp_path: Path) -> None:
    put_claim(tmp_path, 1, run="mine", node_rank=0)
    hold = take(tmp_path, node_rank=1)
    put_claim(tmp_path, 3, run="mine", node_rank=2)
    for run, node_rank in (("mine", 0), ("mine", 2), ("other", 3)):
        with pytest.raises(HeldError):
            take(tmp_path, run, node_rank)
    hold.release()


def test_of_many_that_come_together_one_gets_the_folder(tmp_path: Path) -> None:
    """Claims of other processes of this host, each of a launch of its own."""
    begin, held, refused = threading.Barrier(8), [], []

    def come(number: int) -> None:
        hold = Hold()
        begin.wait()
        try:
            hold.take(tmp_path / "run", f"run {number}", 0)
            held.append(hold)
        except HeldError:
            refused.append(number)

    for attempt in range(5):
        threads = [threading.Thread(target=come, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(held), len(refused)) == (1, 7), attempt
        held.pop().release()
        refused.clear()


def test_two_that_come_together_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have chosen the same one; the second to claim it goes to the next."""
    monkeypatch.chdir(tmp_path)
    first = choose_run_dir("toy", None, resume=False, node_rank=0, run="a")
    second = choose_run_dir("toy", None, resume=False, node_rank=0, run="b")
    assert first == second == Path("runs/toy-1")
    put_claim(first, 1, run="a")
    with pytest.raises(HeldError):
        take(second, "b")
    assert choose_run_dir("toy", None, resume=False, node_rank=0, run="b") == Path("runs/toy-2")


def test_a_live_run_is_not_resumed_and_not_begun_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = Path("runs/toy-9")
    put_claim(run_dir, 1)
    (run_dir / "metrics.jsonl").touch()
    for wanted in (run_dir, None):
        with pytest.raises(HeldError, match="runs/toy-9: a run is going on in it"):
            choose_run_dir("toy", wanted, resume=True, node_rank=0, run="mine")
    with pytest.raises(HeldError, match="runs/toy-9: a run is going on in it"):
        choose_run_dir("toy", run_dir, resume=False, node_rank=0, run="mine")


def test_run_10_is_newer_than_run_9(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2, 9, 10):
        Path(f"runs/toy-{number}/checkpoints").mkdir(parents=True)
    for other in ("toy-11-large", "toy-x", "my-toy-99"):
        Path(f"runs/{other}/checkpoints").mkdir(parents=True)
    put_claim(Path("runs/toy-12"), 1, ended=True)  # a launch that was ended before it began
    assert choose_run_dir("toy", None, resume=True, node_rank=0, run="mine") == Path("runs/toy-10")
    assert choose_run_dir("toy", None, resume=False, node_rank=0, run="mine") == Path("runs/toy-3")


def test_a_node_goes_to_where_the_others_of_its_run_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of one node alone was in the first folder, and has no request of node 1 either."""
    monkeypatch.chdir(tmp_path)
    Path("runs/toy-1/workers").mkdir(parents=True)
    Path("runs/toy-1/workers/node-0.request.json").touch()
    Path("runs/toy-1/metrics.jsonl").touch()
    assert choose_run_dir("toy", None, resume=False, node_rank=1, run="mine") == Path("runs/toy-2")
    put_claim(Path("runs/toy-5"), 1, run="mine")
    Path("runs/toy-5/workers/node-0.request.json").touch()
    assert choose_run_dir("toy", None, resume=False, node_rank=1, run="mine") == Path("runs/toy-5")
    Path("runs/toy-5/workers/node-1.request.json").touch()  # it has been there, and starts anew
    assert choose_run_dir("toy", None, resume=False, node_rank=1, run="mine") == Path("runs/toy-2")


def test_a_deleted_folder_and_a_successor_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = take(tmp_path / "run")
    hold.require()
    for path in sorted((tmp_path / "run").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (tmp_path / "run").rmdir()
    with pytest.raises(RunFailedError, match="run: the run's folder was deleted while the run went on"):
        hold.require()
    hold.release()
    hold = take(tmp_path / "run")
    put_claim(tmp_path / "run", 2, run="mine", node_rank=1)
    hold.beat()
    hold.require()
    put_claim(tmp_path / "run", 3)
    hold.beat()
    with pytest.raises(RunFailedError, match="taken over by process 4711 on far"):
        hold.require()
    hold.release()


def test_a_hold_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 0.01)
    hold = take(tmp_path)
    path = tmp_path / "workers" / "owner-1.json"
    os.utime(path, (0, 0))
    give_up_at = time.monotonic() + 60
    while path.stat().st_mtime == 0 and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert time.time() - path.stat().st_mtime < 60
    hold.release()


def test_a_folder_in_which_nothing_has_begun_goes_and_any_other_stays(tmp_path: Path) -> None:
    take(tmp_path / "new").release()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    take(tmp_path / "old").release()
    assert (tmp_path / "old").exists()
    hold = take(tmp_path / "begun")
    (tmp_path / "begun" / "workers" / "node-0.request.json").touch()
    hold.release()
    assert Owner.read(tmp_path / "begun" / "workers" / "owner-1.json").ended


def test_nodes_of_one_launch_have_one_name_for_it_and_nobody_else(tmp_path: Path) -> None:
    _, plan = two_towers()
    first = NodeShare(0, 2, 2, Address("10.0.0.1", 29500), "eth0")
    second = replace(first, rank=1, interface="eth1")
    elsewhere = replace(first, master=Address("10.0.0.1", 29501))
    alone = NodeShare(0, 1, 2, Address("127.0.0.1", 0), "lo")
    assert run_of(plan, first) == run_of(plan, second)
    assert len({run_of(plan, share) for share in (first, elsewhere, alone)}) == 3
    assert run_of(plan, alone) == run_of(plan, alone)
    code = (
        "from helpers.plans import two_towers\nfrom spindle_cli.launch.owner import run_of\n"
        "from spindle_cli.launch.types import Address, NodeShare\n"
        "print(run_of(two_towers()[1], NodeShare(0, 1, 2, Address('127.0.0.1', 0), 'lo')))"
    )
    folder = Path(__file__).parent.parent
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() != run_of(plan, alone)


def test_a_process_is_told_from_another_with_its_id() -> None:
    assert is_running(os.getpid(), started_s())
    assert not is_running(os.getpid(), started_s() - 60)
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    assert not is_running(ended.pid, time.time())


def test_a_launch_that_comes_second_goes_to_the_next_folder_unless_it_was_named(tmp_path: Path) -> None:
    """Between its choice and its claim another launch has taken the folder, or has run in it and ended."""
    taken, used, free = (tmp_path / name for name in ("taken", "used", "free"))
    put_claim(taken, 1)
    (used / "checkpoints").mkdir(parents=True)
    left = [used, free]
    prepared = SimpleNamespace(
        launch=launch_in(taken),
        run="mine",
        share=SimpleNamespace(rank=0),
        choose=lambda: left.pop(0),
        launch_in=launch_in,
    )
    said: list[str] = []
    with Hold() as hold:
        assert _held(cast("Any", prepared), hold, said.append).run_dir == hold.run_dir == free
        assert said[-1] == f"another run has begun in the folder meanwhile; this one goes to {free}"
    resumed = SimpleNamespace(**{**vars(prepared), "launch": launch_in(taken, resume=True)})
    with Hold() as hold, pytest.raises(HeldError):
        _held(cast("Any", resumed), hold, said.append)


def launch_in(folder: Path, resume: bool = False) -> SimpleNamespace:
    return SimpleNamespace(run_dir=folder, request=SimpleNamespace(resume=resume))
