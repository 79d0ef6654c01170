"""Steps that run sets of tasks take what each length needs by their own programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from alone import run_case, world_of_one
from case_runs import SGD, Case, captured
from hand_plans import Placement
from mixed_cases import TOYS
from plain_loop import train_plainly
from test_training_is_exact import close
from torch import float64

from spindle_cli.files.run_files import read_metrics

WHOLE: tuple[Placement, ...] = (
    ("match/blocks", (0, 2), (0,)),
    ("write/blocks", (0, 2), (0,)),
    ("match/loss", (0, 1), (0,)),
)
# The ops of `write` in two slices, where the plan of all has one.
ALONE: list[Placement] = [("write/blocks", (0, 1), (0,)), ("write/blocks", (1, 2), (0,))]


@pytest.fixture
def world() -> Iterator[None]:
    with world_of_one():
        yield


def test_a_length_fits_every_program_that_runs_its_task(world: None, tmp_path: Path) -> None:
    train = {**SGD, "sampling": {"every": {"match": {"every": 3, "offset": 1}}}}
    sets = {"write": ALONE, "write+match": None}
    case = Case("turns", WHOLE, args={"tasks": ["write", "match"]}, train=train, sets=sets, steps=5, **TOYS)
    request = run_case(case, tmp_path / "turns")
    plain = train_plainly(str(request.run_dir / "workload.yaml"), 5, float64)
    lines = list(read_metrics(request.run_dir))
    assert [line.task_losses for line in lines] == [pytest.approx(each, rel=1e-12) for each in plain.losses]
    assert [len(line.task_losses) for line in lines] == [1, 2, 1, 1, 2]
    (final,) = captured(request.run_dir, "final", 1)
    assert all(close(tensor, plain.final[name], 1e-12) for name, tensor in final.items())
