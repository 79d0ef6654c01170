"""No command writes over a file that it reads, or one of ours of another kind: exit code 2; it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.cli import run_spindle

EXAMPLE = Path(__file__).parents[2] / "examples" / "ci"


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "profile.json", "--cluster", "cluster.yaml", "-o", "profile.json"),
        ("plan", "profile.json", "--cluster", "cluster.yaml", "-o", "cluster.yaml"),
        ("check", "plan.yaml", "--profile", "profile.json", "-o", "plan.yaml"),
        ("report", "plan.yaml", "-o", "plan.yaml"),
        ("report", "plan.yaml", "--profile", "profile.json", "-o", "profile.json"),
        ("simulate", "plan.yaml", "--trace", "plan.yaml"),
        ("profile", "work.py:build", "-o", "work.py"),
        ("profile", "work.py:build", "--cluster", "cluster.yaml", "-o", "cluster.yaml"),
        ("profile", "work.py:build", "-o", "x.json", "--write-cluster", "work.py"),
        ("launch", "plan.yaml", "--trace", "plan.yaml"),
        # Of another kind than what is written, though this command reads nothing of it.
        ("plan", "profile.json", "--cluster", "cluster.yaml", "-o", "work.yaml"),
        ("profile", "work.py:build", "-o", "plan.yaml"),
        ("report", "plan.yaml", "-o", "work.yaml"),
    ],
)
def test_a_file_that_is_read_is_not_written(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("profile.json", "cluster.yaml", "plan.yaml"):
        (tmp_path / name).write_bytes((EXAMPLE / name).read_bytes())
    (tmp_path / "work.py").write_text("def build(): ...\n")
    (tmp_path / "work.yaml").write_text("schema: spindle.workload/1\nmodel: work.py:build\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ended = run_spindle(*words)
    assert ended.code == 2
    assert "would write over it" in ended.err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
