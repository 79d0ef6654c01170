"""Parts of tensors, written and read through torch.distributed.checkpoint, however they are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.checkpoint.index import (
    Checkpoint,
    Region,
    buffer_key,
    model_key,
    optimizer_keys,
    parse_region,
    state_key,
)
from spindle_cli.checkpoint.tensors import (
    CheckpointReader,
    HeldTensors,
    TensorSpec,
    load_parts,
    plain_errors,
    write_tensors,
)
from spindle_cli.errors import InputError
from spindle_cli.files.tensors import Fragment
from spindle_cli.runtime.saving.checkpoint_writer import PartsSavePlanner, ShardWriter
from spindle_cli.workload.file import TrainSettings

WHOLE = torch.arange(24.0).view(4, 6)
DRAFT = Checkpoint(step=1, plan_sha256="", workload="", train=TrainSettings())


@st.composite
def shapes_and_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    first = draw(st.integers(0, prod(shape)))
    return shape, first, draw(st.integers(first, prod(shape)))


@given(shapes_and_ranges())
def test_a_range_of_elements_is_few_boxes_in_its_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, first, last = case
    numbers = torch.arange(prod(shape)).view(shape)
    boxes = list(Region.whole(shape).of_range(first, last))
    found = [element for box in boxes for element in elements_of(numbers, box)]
    assert found == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def elements_of(tensor: Tensor, box: Region) -> list[int]:
    for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, first, size)
    return tensor.reshape(-1).tolist()


def test_keys_of_parts_are_read_as_they_are_written() -> None:
    part = Region.of_fragment((4, 6), Fragment(1, 2, 5))
    assert part.key("a.w", (4, 6)) == "a.w[0:4,2:5]"
    assert parse_region("a.w[0:4,2:5]") == ("a.w", part)
    assert Region.whole((4, 6)).key("a.w", (4, 6)) == "a.w"
    assert parse_region("a.w") is None
    assert optimizer_keys([state_key("a.w", "exp_avg"), state_key("a.w", "step"), "model.a.w"]) == {
        "a.w": ["exp_avg", "step"]
    }


def test_a_file_written_tensor_by_tensor_is_that_of_the_library(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5).t(),
        "a": torch.tensor(2.0, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(7).bfloat16(),
        "count": torch.tensor(5),
    }
    write_tensors(
        tmp_path / "ours", {key: TensorSpec.of(value) for key, value in tensors.items()}, tensors.__getitem__
    )
    save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / "theirs")
    found = load_file(tmp_path / "ours")
    assert {key for key in tensors if not torch.equal(found[key], tensors[key])} == set()
    assert (tmp_path / "ours").stat().st_size == (tmp_path / "theirs").stat().st_size


def cut(dim: int, *edges: int) -> list[Fragment]:
    return [Fragment(dim, first, last) for first, last in pairwise(edges)]


@pytest.fixture
def alone() -> object:
    """A world of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save(run_dir: Path, held: HeldTensors, aliases: Mapping[str, Sequence[str]] = {}) -> Path:
    target = checkpoint_folder(run_dir, 1)
    writer = ShardWriter(target, 0, lambda: DRAFT.model_copy(update={"aliases": dict(aliases)}), 1)
    with plain_errors():
        dcp.save({}, storage_writer=writer, planner=PartsSavePlanner(held.by_name(), {}))
    return target


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("wanted", [Fragment(0, 1, 3), Fragment(1, 2, 4), Fragment(0, 0, 2), None])
def test_any_part_is_read_from_whichever_parts_were_saved(
    dim: int, wanted: Fragment | None, tmp_path: Path
) -> None:
    held = HeldTensors()
    for each in cut(dim, 0, 1, 2, 4) if dim == 0 else cut(dim, 0, 3, 6):
        region = Region.of_fragment((4, 6), each)
        held.add_part("w", (4, 6), region, WHOLE.narrow(dim, each.first, each.last - each.first))
    for first, last in ((0, 8), (8, 9), (9, 24)):
        held.add_part("m", (4, 6), Region.whole((4, 6)), WHOLE.reshape(-1)[first:last], (first, last))
    folder = save(tmp_path, held)
    region = Region.of_fragment((4, 6), wanted)
    expected = WHOLE if wanted is None else WHOLE.narrow(wanted.dim, wanted.first, wanted.last - wanted.first)
    found, vector = torch.empty(region.sizes), torch.empty(7)
    asked = HeldTensors()
    asked.add_part("w", (4, 6), region, found)
    asked.add_part("m", (4, 6), region, vector, (1, 8))
    load_parts(CheckpointReader(folder), asked.by_name(), folder)
    assert torch.equal(found, expected)
    assert torch.equal(vector, expected.reshape(-1)[1:8])


@pytest.mark.usefixtures("alone")
def test_a_tensor_of_which_nobody_has_a_part_is_not_saved(tmp_path: Path) -> None:
    held = HeldTensors()
    held.add_part("w", (4, 6), Region.of_fragment((4, 6), Fragment(0, 0, 3)), WHOLE[:3])
    other = HeldTensors()
    other.add("v", WHOLE)
    folder = save(tmp_path, other)
    with pytest.raises(InputError, match="there is no w in it"):
        load_parts(CheckpointReader(folder), held.by_name(), folder)
    held = HeldTensors()
    held.add("v", torch.empty(2, 2))
    with pytest.raises(InputError, match=r"v has shape \(4, 6\); the workload's has \(2, 2\)"):
        load_parts(CheckpointReader(folder), held.by_name(), folder)


@pytest.mark.usefixtures("alone")
def test_plain_pytorch_loads_a_module_and_its_optimizer_s_state(tmp_path: Path) -> None:
    """Two tasks share a layer; buffers are those of the first rank."""
    layer, norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
    held = HeldTensors()
    for name, parameter in (*layer.named_parameters("a.0"), *norm.named_parameters("a.1")):
        held.add(model_key(name), parameter)
        held.add(state_key(name, "exp_avg"), parameter * 2)
    for rank in (0, 1, 10):
        for name, buffer in norm.named_buffers("a.1"):
            held.add(buffer_key(name, rank), buffer + rank)
    shared = {f"a.0.{name}": (f"b.0.{name}",) for name in ("weight", "bias")}
    folder = save(tmp_path, held, shared)
    first, second = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), nn.Sequential(nn.Linear(3, 2))
    content = {
        "model": {"a": first.state_dict(), "b": second.state_dict()},
        "optimizer": {"state": {"b.0.weight": {"exp_avg": torch.zeros(2, 3)}}},
    }
    dcp.load(content, storage_reader=CheckpointReader(folder))
    for loaded in (first[0], second[0]):
        assert torch.equal(loaded.weight, layer.weight)
        assert torch.equal(loaded.bias, layer.bias)
    assert torch.equal(first[1].running_var, norm.running_var)
    assert torch.equal(content["optimizer"]["state"]["b.0.weight"]["exp_avg"], layer.weight * 2)
