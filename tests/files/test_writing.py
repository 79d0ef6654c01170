"""Files are written whole or not at all, over nothing that is read, and whatever stands where they go."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spindle_cli.errors import InputError, UsageError
from spindle_cli.files import writing
from spindle_cli.files.writing import require_no_input, require_no_other, write_text, written_whole


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.fixture(params=["without a name", "with a name"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is written where the file system has files without names, and where it has not."""
    if request.param == "with a name":
        monkeypatch.setattr(writing, "_open_nameless", lambda folder: None)


@pytest.mark.usefixtures("_both_ways")
def test_a_file_is_replaced_at_the_end_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old")
    with written_whole(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert _names(tmp_path) == ["plan.yaml"]


@pytest.mark.usefixtures("_both_ways")
def test_what_fails_half_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), written_whole(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["plan.yaml"]


@pytest.mark.usefixtures("_both_ways")
def test_a_new_file_has_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "new", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@pytest.mark.usefixtures("_both_ways")
def test_a_link_stays_a_link_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "file")
    for text in ("first", "second"):
        write_text(link, text)
        assert link.is_symlink()
        assert (tmp_path / "there" / "file").read_text() == text
    assert _names(tmp_path / "there") == ["file"]


def test_a_device_is_written_to_and_stays_a_device() -> None:
    write_text(Path("/dev/null"), "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_pipe_gets_the_text(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(pipe, "text")
    reader.join(120)
    assert read == ["text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_places_that_cannot_be_written_to_are_said(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "file").write_text("")
    for path, reason in (
        (tmp_path, "it is a folder"),
        (tmp_path / "missing" / "x", "No such file or directory"),
        (tmp_path / "file" / "x", "Not a directory"),
        (tmp_path / "a", "circle"),
    ):
        with pytest.raises(InputError, match=f"cannot be written: .*{reason}"):
            write_text(path, "text")


def test_killed_while_it_writes_it_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from spindle_cli.files.writing import written_whole\n"
        "with written_whole(Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if _names(tmp_path):
            pytest.skip("this file system has no files without names")
        process.send_signal(signal.SIGKILL)
    assert _names(tmp_path) == []


def test_an_output_is_none_of_the_inputs_by_any_path(tmp_path: Path) -> None:
    read = tmp_path / "p.json"
    read.write_text("{}")
    (tmp_path / "link").symlink_to(read)
    (tmp_path / "hard").hardlink_to(read)
    for output in (read, tmp_path / "." / "p.json", tmp_path / "link", tmp_path / "hard"):
        with pytest.raises(UsageError, match="would write over it"):
            require_no_input("-o", output, None, tmp_path / "missing", read)
    require_no_input("-o", tmp_path / "new.json", None, read)
    require_no_input("-o", tmp_path / "missing", tmp_path / "missing")


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ('{"schema": "spindle.profile/1",\n', "profile"),
        ('{\n  "schema": "spindle.profile/1"', "profile"),
        ("# A workload that somebody has written.\nschema: spindle.workload/1\n", "workload"),
        ("schema: 'spindle.cluster/1'\n", "cluster"),
    ],
)
def test_a_file_of_ours_gives_way_to_its_own_kind_alone(tmp_path: Path, head: str, kind: str) -> None:
    there = tmp_path / "there"
    there.write_text(head)
    for other in ("plan", None):
        with pytest.raises(UsageError, match=f"a {kind} file of ours is there"):
            require_no_other("-o", there, other)
    require_no_other("-o", there, kind)


@pytest.mark.parametrize("content", [b"", b"\x00\xff tensors", b"x: 1\n# schema: spindle.plan/1\n"])
def test_what_is_no_file_of_ours_is_written_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "there").write_bytes(content)
    require_no_other("-o", tmp_path / "there")
    require_no_other("-o", tmp_path / "missing")
    require_no_other("-o", tmp_path)
