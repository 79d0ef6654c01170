"""How a run stands, and the server: who may ask, what there is, and how the command ends."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.cli import run_spindle, spindle_process
from helpers.plans import two_towers
from report.test_report_page import HOSTILE, hostile_plan
from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import workers_dir
from spindle_cli.files.runs.records import Evaluation, append_evaluation, note_ended, note_started
from spindle_cli.launch.owner import Owner, host_name, process_space, started_s
from spindle_cli.watch.server import WatchServer, is_ours
from spindle_cli.watch.session import WatchSession
from spindle_cli.watch.types import WatchData
from watch.runs import append, launched, step


def claim(run: Path, since_s: float = 1.0, *, ended: bool = False) -> None:
    """This process launches the run."""
    owner = Owner(
        run="r",
        node_rank=0,
        host=host_name(),
        pid=os.getpid(),
        space=process_space(),
        started_s=started_s(),
        since_s=since_s,
        ended=ended,
    )
    write_json(workers_dir(run) / "owner-1.json", owner)


def test_a_run_from_before_its_launch_to_its_end_and_after(tmp_path: Path) -> None:
    run = launched(tmp_path)
    session = WatchSession(run)
    assert session.look().state == "not begun"
    claim(run)
    note_started(run, 0, 100, None)
    assert session.look().state == "starting"
    append(run, step(1, iteration_s=0.5), step(2, iteration_s=0.5), rest='{"st')
    seen = session.look()
    assert (seen.state, seen.run.last_step, seen.left_s, seen.total_steps) == ("running", 2, 49.0, 100)
    note_started(run, 2, 100, "worker 1 was killed")
    seen = session.look()
    assert (seen.state, [each.cause for each in seen.run.attempts]) == (
        "starting",
        [None, "worker 1 was killed"],
    )
    note_ended(run, "failed", "worker 1 failed")
    seen = session.look()
    assert (seen.state, seen.message, seen.left_s) == ("failed", "worker 1 failed", None)
    claim(run, since_s=4e9)
    assert session.look().state == "starting"  # launched once more
    note_started(run, 1, 100, None)
    claim(run, ended=True)
    assert session.look().state == "lost"
    note_ended(run, "done", None)
    assert session.look().state == "ended"
    shutil.rmtree(run)
    gone = session.look()
    assert (gone.state, gone.run.last_step) == ("gone", 2)


def test_time_left_has_the_evaluations_to_come(tmp_path: Path) -> None:
    run = launched(tmp_path, steps=10)
    claim(run)
    append(run, *(step(number, iteration_s=1.0) for number in range(1, 5)))
    append_evaluation(run, Evaluation(step=4, task="pairs", num_samples=1, loss=1.0, seconds=2.0))
    assert WatchSession(run).look().left_s == 6 * (1.0 + 2.0 / 4)


def test_what_cannot_be_read_is_said_and_the_rest_shown(tmp_path: Path) -> None:
    run = launched(tmp_path)
    append(run, step(1), rest="nonsense\n")
    (run / "predicted.json").write_text("{}")
    (tmp_path / "plan.yaml").unlink()
    seen = WatchSession(run).look()
    assert seen.run.last_step == 1 and seen.workload is None
    assert any("plan.yaml" in problem for problem in seen.problems)
    assert any("metrics.jsonl:2" in problem for problem in seen.problems)


@pytest.mark.parametrize("what", ["nowhere", "file", "empty"])
def test_what_is_no_run_is_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    ended = run_spindle("watch", tmp_path / what)
    assert (ended.code, ended.err.count("error:")) == (3, 1)


def test_json_is_one_document_and_a_taken_port_is_wrong_use(tmp_path: Path) -> None:
    run = launched(tmp_path)
    append(run, step(1))
    ended = run_spindle("watch", run, "--json")
    printed = WatchData.from_data(json.loads(ended.out), where="stdout")
    assert printed.run.predicted_s == pytest.approx(3.8)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = run_spindle("watch", run, "--port", taken.getsockname()[1])
    assert (ended.code, "--port" in ended.err) == (2, True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    run = launched(tmp_path, hostile_plan())
    append(run, step(1))
    with WatchServer(WatchSession(run), "127.0.0.1", 0) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(
    server: WatchServer, path: str, host: str | None = None, method: str = "GET"
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=120)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


def test_there_are_two_addresses_and_only_reading(server: WatchServer) -> None:
    status, page, headers = ask(server, "/")
    assert status == 200 and HOSTILE not in page
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and headers["X-Content-Type-Options"] == "nosniff"
    status, text, headers = ask(server, "/data.json")
    assert (status, json.loads(text)["run"]["last_step"]) == (200, 1)
    assert "Access-Control-Allow-Origin" not in headers
    for path in ("/../plan.yaml", "/plan.yaml", "//etc/passwd", "/%2e%2e/plan.yaml", "/data.json/.."):
        assert ask(server, path)[0] == 404, path
    assert ask(server, "/", method="POST")[0] == 501
    assert ask(server, "/", method="HEAD")[:2] == (200, "")


def test_a_name_that_was_made_to_point_here_is_refused(server: WatchServer) -> None:
    assert ask(server, "/data.json", host="evil.example")[0] == 421
    assert ask(server, "/", host="evil.example:8421")[0] == 421
    assert ask(server, "/data.json", host="localhost:9000")[0] == 200


@pytest.mark.parametrize(
    ("header", "host", "fits"),
    [
        ("127.0.0.1:8421", "127.0.0.1", True),
        ("[::1]:8421", "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("10.0.0.5:8421", "127.0.0.1", False),
        ("10.0.0.5:8421", "0.0.0.0", True),
        ("box.lan:8421", "box.lan", True),
        ("localhost.evil.example", "0.0.0.0", False),
        ("evil@localhost", "127.0.0.1", True),  # the name is localhost all the same
        ("", "127.0.0.1", False),
        (None, "127.0.0.1", False),
        ("[::1", "127.0.0.1", False),
    ],
)
def test_the_host_that_is_asked_for(header: str | None, host: str, fits: bool) -> None:
    assert is_ours(header, host) is fits


def test_ctrl_c_ends_it_well(tmp_path: Path) -> None:
    run = launched(tmp_path, two_towers()[1])
    process = spindle_process("watch", run, "--port", 0)
    assert process.stderr is not None
    assert "http://127.0.0.1:" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "ended\n")
