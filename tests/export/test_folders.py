"""Exports as folders: what goes into which file, that one tensor is in memory at a time, and what is left
behind by one that fails.
"""

from __future__ import annotations

import errno
import json
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from saved_runs import doubled, save_run
from torch import Tensor

from spindle_cli.checkpoint.tensors import TensorSpec, WholeTensors
from spindle_cli.errors import InputError, UsageError
from spindle_cli.export.folder import shard_names, split
from spindle_cli.export.run import export_run
from spindle_cli.export.types import ExportOptions
from spindle_cli.units import parse_bytes
from spindle_cli.workload.building.load import load
from spindle_cli.workload.types import Task

TOYS = Path(__file__).parents[1] / "workload" / "init_toys.py"
BYTES = 4  # of a number
ALL_OF_TASK = ExportOptions(task="read", shard_bytes=200)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two tasks that share an encoder; one matrix is saved in two parts."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = tmp_path_factory.mktemp("saved")
    yield save_run(folder, f"{TOYS}:build", cut=frozenset({"read.encoder.0.up.weight"}))
    dist.destroy_process_group()


def specs(**sizes: int) -> dict[str, TensorSpec]:
    return {key: TensorSpec((size,), torch.uint8) for key, size in sizes.items()}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"a": 2, "b": 4, "c": 1}, [["a", "b"], ["c"]]),  # exactly full
        ({"a": 2, "b": 5, "c": 1}, [["a"], ["b", "c"]]),  # one byte beyond, and full again
        ({"a": 9, "b": 1, "c": 9}, [["a"], ["b"], ["c"]]),  # larger than a shard
        ({"a": 1, "b": 0}, [["a", "b"]]),
        ({"z": 6, "a": 6}, [["z"], ["a"]]),  # their order stays
    ],
)
def test_a_shard_is_filled_up_to_its_size(sizes: dict[str, int], expected: list[list[str]]) -> None:
    assert split(specs(**sizes), 6) == expected


def test_files_are_named_as_hugging_face_names_them() -> None:
    assert shard_names("model", 1) == ["model.safetensors"]
    assert shard_names("model", 2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("5GB", 5 * 10**9),
        ("500 MB", 500 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("2kb", 2000),
        ("2KiB", 2048),
        ("4096", 4096),
        ("7B", 7),
        ("0", None),
        ("0.5B", None),
        ("-1GB", None),
        ("5XB", None),
        ("GB", None),
        ("", None),
        ("5GBs", None),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, count: int | None) -> None:
    assert parse_bytes(text) == count


def expected_of(run: Path, task: int) -> dict[str, Tensor]:
    module = load(str(run.parent / "workload.yaml")).workload.tasks[task].module
    return {key: doubled(key, value) for key, value in module.state_dict().items()}


def all_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_tasks_tensors_are_in_shards_with_their_index(run: Path, tmp_path: Path) -> None:
    exported = export_run(run, tmp_path / "out", ALL_OF_TASK)
    expected = expected_of(run, 0)
    assert same(all_of(tmp_path / "out"), expected)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    for key, name in index["weight_map"].items():
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            assert key in file.keys()  # noqa: SIM118 - no mapping
            assert file.metadata() == {"format": "pt"}
    numbers = sum(value.numel() for value in expected.values())
    assert index["metadata"] == {"total_parameters": numbers, "total_size": numbers * BYTES + 4}  # an int64
    assert exported.tensors == len(expected)
    assert list(exported.files) == sorted(set(index["weight_map"].values()))
    assert exported.num_bytes == sum((tmp_path / "out" / name).stat().st_size for name in exported.files)
    assert all(path.name.startswith("model") for path in (tmp_path / "out").iterdir())


def test_what_fits_into_one_file_needs_no_index(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()  # an empty folder will do
    export_run(run, tmp_path / "out", ExportOptions(shard_bytes=10**6))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    tasks = ((name, expected_of(run, number)) for number, name in enumerate(("read", "judge")))
    assert same(
        load_file(tmp_path / "out" / "model.safetensors"),
        {f"{name}.{key}": value for name, state in tasks for key, value in state.items()},
    )


def test_a_module_of_a_task_is_exported_by_its_own_names(run: Path, tmp_path: Path) -> None:
    export_run(run, tmp_path / "norm.safetensors", ExportOptions(task="read", module="norm"))
    expected = {
        key.removeprefix("norm."): value for key, value in expected_of(run, 0).items() if key[:4] == "norm"
    }
    assert same(load_file(tmp_path / "norm.safetensors"), expected)


@pytest.mark.parametrize("options", [ALL_OF_TASK, ExportOptions()])
def test_one_tensor_is_in_memory_at_a_time(
    options: ExportOptions, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, most = WholeTensors.read, 0
    alive: dict[int, int] = {}

    def counting(self: WholeTensors, key: str) -> Tensor:
        nonlocal most
        found = read(self, key)
        number = len(seen)
        seen.append(key)
        alive[number] = found.nbytes
        weakref.finalize(found, alive.pop, number)
        most = max(most, sum(alive.values()))
        return found

    seen: list[str] = []
    monkeypatch.setattr(WholeTensors, "read", counting)
    export_run(run, tmp_path / "out", options)
    assert len(seen) >= 13
    assert most == 32 * BYTES  # of the largest


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (KeyboardInterrupt("by hand"), KeyboardInterrupt, "by hand"),
        (OSError(errno.ENOSPC, "No space left on device"), InputError, "cannot be written: No space left"),
    ],
)
@pytest.mark.parametrize("options", [ALL_OF_TASK, ExportOptions()])
def test_an_export_that_is_cut_short_leaves_nothing(
    error: BaseException,
    raised: type[BaseException],
    said: str,
    options: ExportOptions,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, calls = WholeTensors.read, 0

    def failing(self: WholeTensors, key: str) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise error
        return read(self, key)

    monkeypatch.setattr(WholeTensors, "read", failing)
    with pytest.raises(raised, match=said):
        export_run(run, tmp_path / "out", options)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for name in ("out", "file"):
        with pytest.raises(UsageError, match="there is something already"):
            export_run(run, tmp_path / name, ALL_OF_TASK)
    assert (tmp_path / "out" / "mine").read_text() == (tmp_path / "file").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_what_a_killed_export_has_left_is_in_nobodys_way(run: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.export.tmp").mkdir()
    (tmp_path / ".out.export.tmp" / "model-00001-of-00009.safetensors").touch()
    export_run(run, tmp_path / "out", ALL_OF_TASK)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "model-00001-of-00009.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ExportOptions(task="none"), "--task none: the tasks are read, judge"),
        (ExportOptions(module="norm"), "give --task, too"),
        (ExportOptions(task="read", module="nrom"), "has no such module; its own are encoder, norm"),
        (ExportOptions(peft="merged"), "--peft is of one task's model"),
        (ExportOptions(task="read", peft="merged"), r"is no PEFT model \(a Read\); nor has task 'read' any"),
        (ExportOptions(like="base"), "no path of the workload's init_from; they are none"),
        (ExportOptions(like="base", task="read"), "leave out --task"),
        (ExportOptions(like="base", peft="adapters"), "--peft merged, or none"),
    ],
)
def test_options_that_do_not_fit_are_named(
    options: ExportOptions, said: str, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        export_run(run, tmp_path / "out", options)
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_is_only_evaluated_is_exported_as_it_was_trained_and_built(
    run: Path, tmp_path: Path
) -> None:
    """`run` begins a world of one. What others train is the checkpoint's, the rest the build's."""
    assert run.exists()
    folder = tmp_path / "evaluated"
    folder.mkdir()
    run_dir = save_run(folder, f"{TOYS}:build_evaluated")
    exported = export_run(run_dir, tmp_path / "probe.safetensors", ExportOptions(task="probe"))
    built = load(str(folder / "workload.yaml")).workload
    (task,) = built.evaluated
    assert isinstance(task, Task)
    found = load_file(exported.file)
    assert found.keys() == task.module.state_dict().keys()
    for name, value in task.module.state_dict().items():
        expected = value if name.startswith("head") else doubled(name, value)
        assert torch.equal(found[name], expected), name
    whole = export_run(run_dir, tmp_path / "all.safetensors")
    assert whole.tasks == ("read", "judge")
    assert not any(name.startswith("probe") for name in load_file(whole.file))
