"""Nothing of a checkpoint is taken that is not what was written, and nothing that does not fit together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import SHARDS, TENSORS, describe, write_checkpoint, write_index, write_shard
from spindle_cli.checkpoint.files import damage, find_checkpoint
from spindle_cli.checkpoint.index import INDEX_FILE, SUMS_FILE, SavedTensor, read_index
from spindle_cli.errors import InputError

FILES = (INDEX_FILE, SUMS_FILE, "rank-00000.safetensors", "rank-00001.safetensors")


def test_a_checkpoint_as_it_was_written_is_whole(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 3)
    found = find_checkpoint(tmp_path, reads_all=True)
    assert (found.folder, found.checkpoint.step, found.skipped) == (folder, 3, ())
    assert found.checkpoint.hyperparameters["lr"] == 0.0009


@pytest.mark.parametrize("name", FILES)
def test_any_byte_changed_is_noticed(name: str, tmp_path: Path) -> None:
    """Every byte once by one bit, and every digit to another: those read as well as before."""
    folder = write_checkpoint(tmp_path, 3)
    path = folder / name
    content = path.read_bytes()
    for at, byte in enumerate(content):
        changed = [byte ^ 1] if not chr(byte).isdigit() else [byte ^ 1, ord("0") + (byte - ord("0") + 3) % 10]
        for other in changed:
            path.write_bytes(content[:at] + bytes([other]) + content[at + 1 :])
            with pytest.raises(InputError, match="no checkpoint to go on from"):
                find_checkpoint(tmp_path, reads_all=True)
    path.write_bytes(content)
    assert find_checkpoint(tmp_path, reads_all=True).checkpoint.step == 3


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_cut_short_is_noticed_by_all(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 3)
    os.truncate(folder / name, (folder / name).stat().st_size - 1)
    with pytest.raises(InputError, match="no checkpoint to go on from"):
        find_checkpoint(tmp_path)
    (folder / name).unlink()
    with pytest.raises(InputError, match=f"{name}.* (is missing|no such file)"):
        find_checkpoint(tmp_path)


def test_the_whole_one_before_is_taken_and_what_is_wrong_is_said(tmp_path: Path) -> None:
    """Also where a digit of a learning rate has changed, which reads as well as before; by number, 9 < 10."""
    for step in (8, 9, 10):
        write_checkpoint(tmp_path, step)
    index = tmp_path / "checkpoints" / "step-000010" / INDEX_FILE
    index.write_text(index.read_text().replace('"lr":0.0009', '"lr":8.0009'))
    found = find_checkpoint(tmp_path)
    assert found.checkpoint.step == 9
    (line,) = found.skipped
    assert line.startswith("step-000010 cannot be used: ")
    assert line.endswith("not what was written: its checksum in SHA256SUMS differs")


def test_an_index_of_another_step_is_not_taken(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3).rename(tmp_path / "checkpoints" / "step-000007")
    with pytest.raises(InputError, match="step-000007 cannot be used: its index is of step 3"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["../../x", "/etc/passwd", "rank-00001.safetensors/../x", "..", ""])
def test_a_shard_elsewhere_is_not_read(file: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 3)
    checkpoint = read_index(folder)
    shard = checkpoint.shards[0].model_copy(update={"file": file})
    write_index(folder, checkpoint.model_copy(update={"shards": (shard, checkpoint.shards[1])}))
    with pytest.raises(InputError, match=r"shards\[0\].file"):
        find_checkpoint(tmp_path)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 3)
    shard = folder / "rank-00001.safetensors"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is a link out of the checkpoint's folder"):
        find_checkpoint(tmp_path)
    shard.unlink()
    shard.symlink_to(shard)
    with pytest.raises(InputError, match=r"rank-00001.safetensors (is missing|cannot be read)"):
        find_checkpoint(tmp_path)
    shard.unlink()
    shutil.move(tmp_path / "elsewhere", shard)
    (tmp_path / "other").symlink_to(tmp_path, target_is_directory=True)  # the run itself may lie elsewhere
    assert find_checkpoint(tmp_path / "other").checkpoint.step == 3


def changed_shards(folder: Path, header: dict[str, Any]) -> None:
    """Let the first shard say something else of its tensors, with checksums that are right."""
    checkpoint = read_index(folder)
    write_shard(folder / "rank-00000.safetensors", header)
    first = describe(folder / "rank-00000.safetensors", checkpoint.shards[0].keys)
    write_index(folder, checkpoint.model_copy(update={"shards": (first, checkpoint.shards[1])}))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({**SHARDS[0], "model.a.w[0:2,0:2]": ("F32", [4])}, "'shape': [2, 2]"),
        ({**SHARDS[0], "random.cpu.0": ("F32", [1])}, "'dtype': 'U8'"),
        ({"random.cpu.0": ("U8", [4])}, "does not have the tensors"),
        ({**SHARDS[0], "more": ("U8", [1])}, "does not have the tensors"),
    ],
)
def test_what_a_shard_says_of_its_tensors_is_what_the_index_says(
    header: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, 3)
    changed_shards(folder, header)
    assert said in str(damage(folder, read_index(folder), reads_all=True))


def test_a_shard_is_as_long_as_its_tensors(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 3)
    checkpoint = read_index(folder)
    path = folder / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    longer = describe(path, checkpoint.shards[0].keys)
    write_index(folder, checkpoint.model_copy(update={"shards": (longer, checkpoint.shards[1])}))
    assert f"its tensors take {longer.num_bytes - 1}" in str(
        damage(folder, read_index(folder), reads_all=True)
    )


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 20, (2**40).to_bytes(8, "little"), b"\2" + b"\0" * 7 + b"[]"]
)
def test_a_shard_that_is_no_safetensors_file_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 3)
    checkpoint = read_index(folder)
    path = folder / "rank-00000.safetensors"
    path.write_bytes(content)
    shards = (describe(path, checkpoint.shards[0].keys), checkpoint.shards[1])
    write_index(folder, checkpoint.model_copy(update={"shards": shards}))
    assert "rank-00000.safetensors is no safetensors file" in str(
        damage(folder, read_index(folder), reads_all=True)
    )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("model.a.w[0:2,0:4]", "random.cpu.0"), "'model.a.w[0:2,0:4]', which is no part of a tensor"),
        (("model.a.w[0:2,2:4]", "random.cpu.0"), "which is no part of a tensor"),
        (("model.a.w[0:6]", "random.cpu.0"), "which is no part of a tensor"),
        (("model.b.w", "random.cpu.0"), "which is no part of a tensor"),
        (("model.a.w[0:2,2:3]", "random.cpu.0"), "'model.a.w[0:2,2:3]' a second time"),
        (("model.a.w[0:2,1:2]", "random.cpu.0"), "have 4 elements of 'model.a.w', which has 6"),
        (("model.a.w[0:2,0:2]",), "have 0 elements of 'random.cpu.0', which has 4"),
    ],
)
def test_shards_have_every_element_of_every_tensor_once(
    keys: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, 3)
    checkpoint = read_index(folder)
    first = checkpoint.shards[0].model_copy(update={"keys": keys})
    write_index(folder, checkpoint.model_copy(update={"shards": (first, checkpoint.shards[1])}))
    assert said in str(damage(folder, read_index(folder), reads_all=False))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "load"}, "dtype: expected one of float64"),
        ({"shape": (2**60,)}, "shape"),
        ({"shape": (-1,)}, "shape"),
    ],
)
def test_a_tensor_of_impossible_kind_or_size_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, 3)
    wrong = SavedTensor.model_construct(**{**TENSORS["random.cpu.0"].model_dump(), **changes})
    checkpoint = read_index(folder)
    write_index(folder, checkpoint.model_copy(update={"tensors": {**TENSORS, "random.cpu.0": wrong}}))
    with pytest.raises(InputError, match=said):
        read_index(folder)


def test_a_checkpoint_of_an_earlier_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for version in (1, 2):
        folder = tmp_path / "checkpoints" / f"step-{version:06d}"
        folder.mkdir(parents=True)
        text = json.dumps({"schema": f"spindle.checkpoint/{version}", "step": version})
        (folder / INDEX_FILE).write_text(text)
        with pytest.raises(InputError, match=r"earlier version of Spindle wrote it .*end the run with that"):
            read_index(folder)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="it is a program of GNU's")
def test_other_programs_can_check_the_sums(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 3)
    asked = ["sha256sum", "--check", "--strict", SUMS_FILE]
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.count(": OK\n") == 3
