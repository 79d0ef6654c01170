"""A run goes on with the train settings that it began with; others are refused before workers are started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.checkpoints import write_checkpoint, write_index
from spindle_cli.checkpoint.index import SavedGroup, read_index
from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest
from spindle_cli.launch.start_point import find_start
from spindle_cli.workload.file import TrainSettings

BEGUN: dict[str, Any] = {"lr": 0.001, "steps": 6, "sampling": {"every": {"a": 2}}}
GROUPS = {"biases": ("a.b",), "rest": ("a.w",)}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three steps, with two optimizer groups."""
    folder = write_checkpoint(tmp_path, 3)
    saved = {
        "train": TrainSettings.model_validate(BEGUN),
        "groups": {name: SavedGroup(parameters=names) for name, names in GROUPS.items()},
    }
    write_index(folder, read_index(folder).model_copy(update=saved))
    return tmp_path


def goes_on(
    run_dir: Path, *, groups: dict[str, tuple[str, ...]] = GROUPS, dtype: Any = None, **now: Any
) -> bool:
    request = RunRequest(plan=Path("p.yaml"), workload="mine.yaml", run_dir=run_dir, resume=True, dtype=dtype)
    workload = SimpleNamespace(
        graph=SimpleNamespace(fingerprint="sha256:1", kept=()),
        train=TrainSettings.model_validate({**BEGUN, **now}),
        groups=SimpleNamespace(names=lambda: groups),
    )
    begins = find_start(request, cast("Any", workload), 10, {}, or_anew=False, allows_changed_data=False)
    return begins is not None and begins.is_own


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (
            {"sampling": {"every": {"a": 3}}},
            r"train\.sampling = .*'every': 2.* says .*'every': 3",
        ),
        ({"sampling": {"every": {"a": {"every": 2, "offset": 1}}}}, r"train\.sampling = .*'offset': 1"),
        ({"sampling": None}, r"train\.sampling = .* but the workload now says None"),
        ({"accumulate": 2}, r"train\.accumulate = 1, but the workload now says 2"),
        ({"task_weights": {"a": [[0, 2.0]]}}, r"train\.task_weights = None"),
        ({"dtype": "float64"}, r"train\.dtype = None, but the workload now says 'float64'"),
        (
            {"groups": {"rest": ("a.b", "a.w")}},
            "a.b was trained in optimizer group 'biases'",
        ),
    ],
    ids=str,
)
def test_another_setting_is_refused_with_both_values(run_dir: Path, now: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        goes_on(run_dir, **now)
    assert "step-000003: " in refused.value.message
    assert "--from" in str(refused.value.hint)


def test_what_trains_nothing_else_may_change(run_dir: Path) -> None:
    assert goes_on(run_dir)
    assert goes_on(run_dir, steps=9, eval_every=2, loader={"workers": 1}, shard_optimizer=False)


def test_a_dtype_of_the_run_is_that_of_all_arithmetic(run_dir: Path) -> None:
    """`verify` asks for float64 where the workload says bf16: what is trained is the same in both."""
    folder = run_dir / "checkpoints" / "step-000003"
    write_index(folder, read_index(folder).model_copy(update={"dtype": "float64"}))
    assert goes_on(run_dir, dtype="float64", precision="bf16", reduce="float32")
