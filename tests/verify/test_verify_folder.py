"""Where a verification's files go, and when they stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers.plans import two_towers
from spindle_cli.analysis.analyse import analyse
from spindle_cli.errors import RunFailedError, UsageError
from spindle_cli.verify.run import buffer_bytes, captured_bytes, verify_folder
from spindle_cli.workload.types import Task, Workload


def test_a_temporary_folder_goes_with_success_and_with_ctrl_c() -> None:
    with verify_folder(None) as folder:
        (folder / "log").write_text("")
    assert not folder.exists()
    with pytest.raises(KeyboardInterrupt), verify_folder(None) as folder:
        raise KeyboardInterrupt
    assert not folder.exists()


def test_a_temporary_folder_stays_when_its_logs_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RunFailedError), verify_folder(None) as folder:
        raise RunFailedError("the disk is full")
    assert not folder.exists()  # nothing in it
    with pytest.raises(RunFailedError), verify_folder(None) as folder:
        (folder / "log").write_text("")
        raise RunFailedError("see the log")
    assert folder.exists()


def test_a_chosen_folder_must_be_empty_and_stays(tmp_path: Path) -> None:
    with verify_folder(tmp_path / "mine") as folder:
        folder.mkdir()
        (folder / "log").write_text("")
    assert folder == tmp_path / "mine"
    with pytest.raises(UsageError, match="not an empty folder"), verify_folder(folder):
        pass


def test_room_is_asked_for_every_copy_of_three_stages() -> None:
    _, plan = two_towers()
    once = 4 + 3  # MiB: ops of vision and text
    held = 3 * 2 + 3 * 2 + 1 * 4  # ops of a slice x its devices
    assert captured_bytes(plan, 0) == 3 * (once + held) * 2**20
    # buffers before and after, of the plain process and of all devices
    assert captured_bytes(plan, 10) == 3 * (once + held) * 2**20 + 2 * 10 * (1 + plan.cluster.num_devices)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(3, 4))
        self.register_buffer("counts", torch.ones(5, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale.sum(0)).square().mean() + 0 * self.counts.sum()


def test_buffers_are_counted_in_their_own_dtypes() -> None:
    items = [{"x": torch.ones(4)}] * 4
    assert (
        buffer_bytes(analyse(Workload("w", [Task("t", Scaled(), 2, items)], (nn.Linear,)))) == 12 * 4 + 5 * 8
    )
