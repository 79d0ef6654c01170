"""metrics.jsonl with lines that cannot be read: they are named, and do not keep a run from going on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spindle_cli.errors import InputError
from spindle_cli.files.run_files import (
    DAMAGED_METRICS_FILE,
    METRICS_FILE,
    MODEL_FILE,
    StepMetrics,
    forget_metrics_after,
    last_step,
    newest_model,
    read_metrics,
)


def line(step: int) -> bytes:
    return StepMetrics(step=step, loss=0.5, iteration_s=0.1).to_line().encode()


BROKEN = [
    b"\xff\xfe\n",
    b'{"step": 1e999, "loss": 1, "iteration_s": 1}\n',
    b"{oops\n",
    b"[" * 100_000 + b"\n",
]


@pytest.mark.parametrize("broken", BROKEN, ids=["bytes", "1e999", "no-json", "deep"])
def test_a_line_that_cannot_be_read_is_left_out_and_named(broken: bytes, tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    content = line(1) + broken + line(2) + line(3) + line(4)[:-1]
    path.write_bytes(content)
    problem, kept = forget_metrics_after(tmp_path, 2)
    assert problem.startswith(f"{path}:2")
    assert kept == f"left out; as it was it is in {tmp_path / DAMAGED_METRICS_FILE}"
    assert path.read_bytes() == line(1) + line(2)
    assert (tmp_path / DAMAGED_METRICS_FILE).read_bytes() == content
    assert [metrics.step for metrics in read_metrics(tmp_path)] == [1, 2]


def test_of_many_such_lines_the_first_are_named(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_bytes(b"{oops\n" * 9 + line(1))
    said = forget_metrics_after(tmp_path, 5)
    assert [text.partition(":")[0] for text in said[:3]] == [str(tmp_path / METRICS_FILE)] * 3
    assert said[3] == "and 6 lines more that cannot be read"
    assert len(said) == 5


def test_whole_lines_up_to_the_step_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    assert forget_metrics_after(tmp_path, 3) == ()
    path.write_bytes(line(1) + line(2))
    before = path.stat()
    assert forget_metrics_after(tmp_path, 2) == ()
    assert path.stat().st_ino == before.st_ino  # not even written
    assert forget_metrics_after(tmp_path, 1) == ()
    assert path.read_bytes() == line(1)
    assert not (tmp_path / DAMAGED_METRICS_FILE).exists()


def test_a_reader_names_the_line(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_bytes(line(1) + b"\xff\n")
    with pytest.raises(InputError, match=r"metrics.jsonl:2: not a text in UTF-8"):
        list(read_metrics(tmp_path))


def test_the_last_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    assert last_step(tmp_path) is None
    (tmp_path / METRICS_FILE).write_bytes(line(1)[:-1])
    assert last_step(tmp_path) is None
    (tmp_path / METRICS_FILE).write_bytes(line(1) + line(2) + line(3)[:-1])
    assert last_step(tmp_path) == 2


@given(st.binary())
def test_any_bytes_are_a_line_or_an_input_error(content: bytes) -> None:
    try:
        StepMetrics.from_line(content, where="here")
    except InputError as error:
        assert error.message.startswith("here")


def test_the_newest_model_is_that_of_the_largest_step(tmp_path: Path) -> None:
    """Not of the last name: a million steps have a digit more."""
    for step in ("step-999999", "step-1000000", "step-000002", "step-new"):
        folder = tmp_path / "checkpoints" / step
        folder.mkdir(parents=True)
        (folder / MODEL_FILE).touch()
    assert newest_model(tmp_path).parent.name == "step-1000000"
