"""Checkpoints of one worker, in this process: all that moves in training goes on, and what is refused."""

from __future__ import annotations

import errno
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import STEPS, TRAIN, run, world_of_one
from case_runs import captured
from safetensors.torch import load_file, save_file

from helpers.checkpoints import describe, write_index
from helpers.torch_versions import widens_gradients
from spindle_cli.checkpoint.files import checkpoint_folder, find_checkpoint
from spindle_cli.checkpoint.index import read_index
from spindle_cli.checkpoint.tensors import write_tensors
from spindle_cli.errors import InputError, StoppedError
from spindle_cli.files.request import stop_path
from spindle_cli.files.run_files import model_path, read_metrics
from spindle_cli.runtime.saving import checkpoint_writer


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not disturbed, with the last three checkpoints."""
    folder = tmp_path_factory.mktemp("alone") / "whole"
    run(folder)
    return folder


def test_chance_buffers_schedule_and_optimizer_go_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    run(folder, steps=3)
    run(folder, resume=True)
    expected = load_file(checkpoint_folder(whole, STEPS) / "rank-00000.safetensors")
    found = load_file(checkpoint_folder(folder, STEPS) / "rank-00000.safetensors")
    assert {key.split(".")[0] for key in expected} == {"model", "optimizer", "buffers", "random"}
    assert {key for key in expected if not torch.equal(expected[key], found[key])} == set()
    assert expected.keys() == found.keys()
    before, after = (find_checkpoint(each).checkpoint for each in (whole, folder))
    assert (before.hyperparameters, before.schedule) == (after.hyperparameters, after.schedule)


def test_what_is_saved_in_the_background_is_what_the_step_left(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing takes longer than a step here, so that a save sees later values if it can see any."""

    def slowly(*arguments: Any) -> int:
        time.sleep(0.3)
        return write_tensors(*arguments)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", slowly)
    run(tmp_path / "run", async_checkpoints=True)
    for step in (STEPS - 2, STEPS - 1, STEPS):
        expected, found = (
            load_file(checkpoint_folder(folder, step) / "rank-00000.safetensors")
            for folder in (whole, tmp_path / "run")
        )
        assert {key for key in expected if not torch.equal(expected[key], found[key])} == set()
    assert model_path(tmp_path / "run", STEPS).exists()


def test_a_save_that_fails_in_the_background_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def full(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_tensors(*arguments)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", full)
    with pytest.raises(InputError, match=r"the checkpoint cannot be saved: .*No space left on device"):
        run(tmp_path / "run", async_checkpoints=True)
    assert find_checkpoint(tmp_path / "run").checkpoint.step == 1


@widens_gradients
def test_masters_go_on_bit_for_bit(tmp_path: Path) -> None:
    """The parameters are in bfloat16, and the rounded masters."""
    train = {**TRAIN, "precision": "bf16"}
    run(tmp_path / "whole", train=train, dtype=None)
    run(tmp_path / "parts", steps=3, train=train, dtype=None)
    run(tmp_path / "parts", resume=True, dtype=None)
    expected, found = (
        load_file(checkpoint_folder(tmp_path / name, STEPS) / "rank-00000.safetensors")
        for name in ("whole", "parts")
    )
    assert {key for key in expected if not torch.equal(expected[key], found[key])} == set()
    masters = {key: tensor for key, tensor in expected.items() if key.endswith(".master")}
    assert len(masters) > 4
    for key, master in masters.items():
        name = key.removeprefix("optimizer.state.").removesuffix(".master")
        parameter = expected[f"model.{name}"]
        assert (parameter.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(parameter, master.bfloat16())
        assert not torch.equal(parameter.float(), master)


def test_state_that_is_not_the_same_for_each_parameter_goes_on(tmp_path: Path) -> None:
    """Adafactor keeps of a matrix what it does not keep of a vector."""
    train = {"optimizer": "Adafactor", "lr": 1e-2}
    run(tmp_path / "whole", train=train)
    run(tmp_path / "parts", steps=3, train=train)
    run(tmp_path / "parts", resume=True)
    expected, found = (
        load_file(checkpoint_folder(tmp_path / name, STEPS) / "rank-00000.safetensors")
        for name in ("whole", "parts")
    )
    assert {"variance", "row_var"} <= {key.rsplit(".", 1)[1] for key in expected}
    assert {key for key in expected if not torch.equal(expected[key], found[key])} == set()


def test_state_that_is_no_longer_needed_is_left_out(tmp_path: Path) -> None:
    run(
        tmp_path / "before",
        steps=2,
        train={"optimizer": "SGD", "lr": 0.1, "optimizer_args": {"momentum": 0.9}},
    )
    run(tmp_path / "after", steps=4, train={"optimizer": "SGD", "lr": 0.1}, begin_from=tmp_path / "before")
    states = [
        {key for key in find_checkpoint(tmp_path / name).checkpoint.tensors if key.startswith("optimizer")}
        for name in ("before", "after")
    ]
    assert states[0] and not states[1]


@widens_gradients
def test_another_precision_goes_on_from_the_masters_and_to_them(tmp_path: Path) -> None:
    """A run begun from one in another precision: from what its masters had, or to masters of what it had."""
    run(tmp_path / "rounded", steps=3, train={**TRAIN, "precision": "bf16"}, dtype=None)
    run(tmp_path / "full", steps=4, dtype=None, begin_from=tmp_path / "rounded")
    saved = load_file(checkpoint_folder(tmp_path / "rounded", 3) / "rank-00000.safetensors")
    begun = captured(tmp_path / "full", "initial", 1)[0]
    for name, parameter in begun.items():
        assert torch.equal(parameter, saved[f"optimizer.state.{name}.master"]), name
    again = {**TRAIN, "precision": "bf16"}
    run(tmp_path / "again", steps=5, train=again, dtype=None, begin_from=tmp_path / "full")
    saved = load_file(checkpoint_folder(tmp_path / "full", 4) / "rank-00000.safetensors")
    for name, parameter in captured(tmp_path / "again", "initial", 1)[0].items():
        assert torch.equal(parameter, saved[f"model.{name}"].bfloat16()), name


def test_only_the_last_checkpoints_are_kept(whole: Path) -> None:
    kept = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert kept == ["step-000004", "step-000005", "step-000006"]


def test_a_run_asked_to_stop_saves_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    stop_path(tmp_path / "elsewhere").parent.mkdir(parents=True)
    stop_path(tmp_path / "elsewhere").touch()
    with pytest.raises(StoppedError, match="after step 1; a checkpoint is saved"):
        run(folder, run_dir=tmp_path / "elsewhere")
    assert find_checkpoint(tmp_path / "elsewhere").checkpoint.step == 1


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with pytest.raises(InputError, match=r"the checkpoint cannot be saved: .*checkpoints"):
        run(tmp_path / "settings", run_dir=tmp_path / "run")


def test_going_on_with_other_settings_or_no_steps_left_is_refused(whole: Path) -> None:
    with pytest.raises(InputError, match="has done 6 steps already"):
        run(whole, resume=True)
    source = whole / "workload.yaml"
    before = source.read_text()
    source.write_text(before.replace("clip_norm: 1.0", "clip_norm: 2.0"))
    with pytest.raises(InputError, match=r"train.clip_norm = 1.0, but the workload now says 2.0"):
        run(whole, steps=8, resume=True)
    source.write_text(before)


@pytest.mark.parametrize(
    ("key", "shape"), [("exp_avg", (1, 2)), ("exp_avg_sq", (2, 1)), ("random.cpu.0", (17,))]
)
def test_state_of_another_shape_than_the_parameter_is_refused_before_a_kernel_reads_it(
    key: str, shape: tuple[int, ...], whole: Path, tmp_path: Path
) -> None:
    """In a checkpoint whose files fit together and have their checksums."""
    shutil.copytree(whole, tmp_path / "run")
    folder = checkpoint_folder(tmp_path / "run", STEPS)
    shard = folder / "rank-00000.safetensors"
    tensors = load_file(shard)
    name = next(name for name in sorted(tensors) if name.endswith(key))
    tensors[name] = torch.zeros(shape, dtype=tensors[name].dtype)
    save_file(tensors, shard)
    checkpoint = read_index(folder)
    specs = {**checkpoint.tensors, name: checkpoint.tensors[name].model_copy(update={"shape": shape})}
    written = describe(shard, checkpoint.shards[0].keys)
    write_index(folder, checkpoint.model_copy(update={"tensors": specs, "shards": (written,)}))
    with pytest.raises(InputError, match=f"{re.escape(name)} has shape {re.escape(str(shape))}"):
        run(whole, steps=STEPS + 1, resume=True, run_dir=tmp_path / "run")


def test_a_captured_run_leaves_its_model(whole: Path) -> None:
    final = captured(whole, "final", 1)[0]
    saved = load_file(model_path(whole, STEPS))
    assert saved.keys() == final.keys()


def test_the_loss_scale_goes_on_and_is_dropped_where_the_setting_is_another(tmp_path: Path) -> None:
    """Three steps are skipped, and after two without an overflow the scale has grown."""
    scaling = {"init_scale": 2.0**40, "backoff_factor": 2.0**-10, "growth_interval": 2}
    train = {**TRAIN, "precision": "fp16-autocast", "loss_scale": scaling}
    run(tmp_path / "whole", train=train, dtype=None)
    run(tmp_path / "parts", steps=3, train=train, dtype=None)
    run(tmp_path / "parts", resume=True, dtype=None)
    whole, parts = (list(read_metrics(tmp_path / name)) for name in ("whole", "parts"))
    assert [(line.loss_scale, line.skipped, line.loss) for line in whole] == [
        (line.loss_scale, line.skipped, line.loss) for line in parts
    ]
    skipped = [line.skipped for line in whole]
    assert skipped[:2] == [True, True] and skipped[-1] is False
    expected, found = (
        load_file(checkpoint_folder(tmp_path / name, STEPS) / "rank-00000.safetensors")
        for name in ("whole", "parts")
    )
    assert {key for key in expected if not torch.equal(expected[key], found[key])} == set()
    saved = find_checkpoint(tmp_path / "parts").checkpoint.loss_scale
    assert saved is not None and saved.scale < 2.0**40
    # Another run begins from it: with the scale as it was, and with the first one of its own setting.
    for name, settings, first in (("same", scaling, saved.scale), ("other", 64, 64.0)):
        again = {**train, "loss_scale": settings}
        run(tmp_path / name, steps=STEPS + 1, train=again, dtype=None, begin_from=tmp_path / "whole")
        assert next(iter(read_metrics(tmp_path / name))).loss_scale == first
