"""What a run has written, read back: fragments are whole tensors again, or it is said which do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spindle_cli.errors import RunFailedError
from spindle_cli.files.request import capture_path
from spindle_cli.verify.comparing.captured import open_run

STAGES = ("initial", "gradients", "final", "initial-buffers", "final-buffers")


def write(folder: Path, *ranks: dict[str, Tensor]) -> None:
    for rank, tensors in enumerate(ranks):
        for stage in STAGES:
            path = capture_path(folder, stage, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors if stage == "initial" else {}, path)


def test_fragments_of_two_ranks_are_one_tensor(tmp_path: Path) -> None:
    write(tmp_path, {"w[0:2]": torch.ones(2, 3)}, {"w[2:3]": torch.zeros(1, 3)})
    with open_run(tmp_path, 2) as run:
        ((where, whole),) = run.initial.copies("w")
    assert where == "ranks 0, 1"
    assert whole.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]


def test_fragments_that_do_not_fit_are_said(tmp_path: Path) -> None:
    write(tmp_path, {"w[0:2]": torch.ones(2, 3)}, {"w[2:3]": torch.zeros(1, 4)})
    with (
        open_run(tmp_path, 2) as run,
        pytest.raises(RunFailedError, match=r"ranks 0, 1: the parts of 'w' do not fit.*\[2, 3\], \[1, 4\]"),
    ):
        run.initial.first("w")
