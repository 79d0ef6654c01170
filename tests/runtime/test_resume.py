"""A run that goes on from a checkpoint trains what it would have trained without the break."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from case_runs import STEPS, captured, marked
from plain_loop import train_plainly
from runtime_cases import GONE_ON, GONE_ON_ELSEWHERE, SAVED
from test_training_is_exact import close

from spindle_cli.checkpoint.files import checkpoint_folder, find_checkpoint
from spindle_cli.checkpoint.index import INDEX_FILE
from spindle_cli.errors import InputError
from spindle_cli.files.run_files import read_metrics

pytestmark = pytest.mark.processes


def test_by_the_same_plan_it_goes_on_bit_for_bit(four_workers: Path) -> None:
    undisturbed = captured(four_workers / "frozen-tower", "final", 4)
    for expected, found in zip(undisturbed, captured(four_workers / GONE_ON.name, "final", 4), strict=True):
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", marked(GONE_ON_ELSEWHERE))
def test_by_another_plan_it_goes_on_to_float_tolerance(case, four_workers: Path) -> None:
    plain = train_plainly(str(four_workers / case.name / "workload.yaml"), STEPS, torch.float64)
    for tensors in captured(four_workers / case.name, "final", 4):
        for name, tensor in tensors.items():
            assert close(tensor, plain.final[name], 1e-10), name


def test_metrics_go_on_where_the_checkpoint_was(four_workers: Path) -> None:
    """Several cases have gone on from step 2; the lines of the one before were replaced."""
    assert [line.step for line in read_metrics(four_workers / SAVED.name)] == [1, 2, 3]


def test_no_shard_has_what_another_has(four_workers: Path) -> None:
    found = find_checkpoint(four_workers / SAVED.name)
    assert found.checkpoint.step == 2
    keys = [key for shard in found.checkpoint.shards for key in shard.keys]
    assert len(keys) == len(set(keys))
    assert sum(1 for shard in found.checkpoint.shards if len(shard.keys) > 1) > 1


def test_a_checkpoint_knows_every_name_of_what_tasks_share(four_workers: Path) -> None:
    checkpoint = find_checkpoint(four_workers / SAVED.name).checkpoint
    position = checkpoint.aliases["pairs.vision.position"]
    assert position == ("classify.vision.position", "caption.vision.position")
    assert checkpoint.aliases["pairs.text.embed.weight"] == ("classify.text.embed.weight",)
    assert "caption.embed.weight" not in checkpoint.aliases
    assert {name: task.batch_size for name, task in checkpoint.tasks.items()} == {
        "pairs": 8,
        "classify": 12,
        "caption": 4,
    }


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: truncate(folder / "rank-00001.safetensors"), "rank-00001.safetensors has"),
        (lambda folder: (folder / "rank-00002.safetensors").unlink(), "rank-00002.safetensors is missing"),
        (lambda folder: truncate(folder / INDEX_FILE), "not valid JSON"),
        (lambda folder: shutil.rmtree(folder), None),
    ],
)
def test_of_a_damaged_checkpoint_the_one_before_is_taken(
    damage: Callable[[Path], None], said: str | None, four_workers: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(four_workers / SAVED.name / "checkpoints", run_dir / "checkpoints")
    shutil.rmtree(checkpoint_folder(run_dir, 3), ignore_errors=True)
    damage(checkpoint_folder(run_dir, 2))
    found = find_checkpoint(run_dir)
    assert found.checkpoint.step == 1
    assert len(found.skipped) == (0 if said is None else 1)
    assert all("step-000002 cannot be used" in line and str(said) in line for line in found.skipped)
    shutil.rmtree(found.folder)
    with pytest.raises(InputError, match="no checkpoint to go on from"):
        find_checkpoint(run_dir)


def test_a_flipped_bit_is_noticed_by_the_checksum(four_workers: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(four_workers / SAVED.name / "checkpoints", run_dir / "checkpoints")
    shutil.rmtree(checkpoint_folder(run_dir, 3), ignore_errors=True)
    path = checkpoint_folder(run_dir, 2) / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert find_checkpoint(run_dir).checkpoint.step == 2
    found = find_checkpoint(run_dir, reads_all=True)
    assert found.checkpoint.step == 1
    assert "rank-00001.safetensors is not what was written" in found.skipped[0]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])
