"""A run goes on with the data that it was trained on; another is said, and refused unless it is allowed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.checkpoints import write_checkpoint, write_index
from helpers.cli import run_spindle
from spindle_cli.checkpoint.index import TrainedTask, read_index
from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest, SeenData
from spindle_cli.launch.start_point import StartPoint, changed_data, find_start
from spindle_cli.workload.file import TrainSettings

BEFORE = SeenData(num_samples=1000, samples={0: "a", 333: "b", 666: "c", 999: "d"})
SHORTER = SeenData(num_samples=900, samples={0: "a"})
OTHER = SeenData(num_samples=1000, samples={0: "a", 333: "x", 666: "c", 999: "y"})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three tasks, of which nobody had looked at the last one's data."""
    folder = write_checkpoint(tmp_path, 3)
    tasks = {
        name: TrainedTask(batch_size=4, weight=1.0, data=data)
        for name, data in {"audio": BEFORE, "text": BEFORE, "depth": None}.items()
    }
    write_index(folder, read_index(folder).model_copy(update={"tasks": tasks}))
    return tmp_path


def start(
    run_dir: Path, *, allows: bool = False, kept: tuple[str, ...] = (), **datasets: SeenData
) -> StartPoint | None:
    request = RunRequest(plan=Path("plan.yaml"), workload="mine.yaml", run_dir=run_dir, resume=True)
    workload = SimpleNamespace(
        graph=SimpleNamespace(fingerprint="sha256:1", kept=kept),
        train=TrainSettings(),
        groups=SimpleNamespace(names=dict),
    )
    return find_start(request, cast("Any", workload), 10, datasets, or_anew=False, allows_changed_data=allows)


def test_the_same_data_goes_on_without_a_word(run_dir: Path) -> None:
    begins = start(run_dir, audio=BEFORE, text=BEFORE, depth=BEFORE)
    assert begins is not None
    assert (begins.lines, begins.describe()) == ((), f"going on from {begins.stored.folder}")


def test_changed_data_is_refused_by_task_and_sample(run_dir: Path) -> None:
    with pytest.raises(InputError) as refused:
        start(run_dir, audio=SHORTER, text=OTHER, depth=BEFORE)
    assert refused.value.message.splitlines() == [
        f"{run_dir}/checkpoints/step-000003: the data is not what the run was trained on:",
        "  task audio: it had 1,000 samples, and has 900 now",
        "  task text: sample 333 is another than it was",
        "  task text: sample 999 is another than it was",
    ]
    assert "--allow-changed-data" in str(refused.value.hint)


def test_changed_data_is_said_where_it_is_allowed(run_dir: Path) -> None:
    begins = start(run_dir, allows=True, audio=SHORTER, text=BEFORE)
    assert begins is not None
    assert begins.describe().splitlines()[1:] == ["  task audio: it had 1,000 samples, and has 900 now"]


def test_what_no_checkpoint_has_is_named(run_dir: Path) -> None:
    begins = start(run_dir, kept=("task 'a': l keeps l.n from batch to batch",), audio=BEFORE, text=BEFORE)
    assert begins is not None
    assert begins.describe().splitlines()[1:] == ["  task 'a': l keeps l.n from batch to batch"]


def test_tasks_that_come_and_go_are_no_change(run_dir: Path) -> None:
    checkpoint = read_index(run_dir / "checkpoints" / "step-000003")
    assert changed_data(checkpoint, {"video": OTHER, "text": BEFORE}) == ()


def test_the_option_is_for_resume(tmp_path: Path) -> None:
    ended = run_spindle("launch", tmp_path / "plan.yaml", "--allow-changed-data")
    assert (ended.code, "--allow-changed-data is for --resume" in ended.err) == (2, True)
