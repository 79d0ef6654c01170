"""Names of saved tensors, what another task set takes over by them, and the boxes that parts are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from helpers.checkpoints import SHARDS, write_checkpoint, write_shard
from spindle_cli.checkpoint import files as damages
from spindle_cli.checkpoint.carry_over import CarryOver, task_of, with_aliases
from spindle_cli.checkpoint.index import (
    Region,
    every_name,
    model_names,
    optimizer_keys,
    parse_region,
    read_index,
)
from spindle_cli.files.tensors import DTYPES

NAMES = (
    "model.a.w",
    "optimizer.state.a.w.exp_avg",
    "optimizer.state.a.w.step",
    "buffers.10.b.mean",
    "buffers.2.b.mean",
    "buffers.3.c.seen",
    "model.c.seen",
    "random.cpu.0",
)


def test_every_name_leads_to_the_tensor_that_was_saved() -> None:
    """Buffers, as parts of the model, to the lowest rank's, by number; a parameter goes first."""
    found = every_name(NAMES, {"a.w": ("d.w", "e.w"), "b.mean": ("d.mean",)})
    extra = {
        "model.b.mean": "buffers.2.b.mean",
        "model.d.mean": "buffers.2.b.mean",
        "model.d.w": "model.a.w",
        "model.e.w": "model.a.w",
        "optimizer.state.d.w.exp_avg": "optimizer.state.a.w.exp_avg",
        "optimizer.state.e.w.exp_avg": "optimizer.state.a.w.exp_avg",
        "optimizer.state.d.w.step": "optimizer.state.a.w.step",
        "optimizer.state.e.w.step": "optimizer.state.a.w.step",
    }
    assert found == {name: name for name in NAMES} | extra


def test_the_model_s_names_are_those_of_parameters_and_buffers_each_once() -> None:
    assert list(model_names(NAMES)) == ["a.w", "c.seen", "b.mean"]
    assert list(model_names(("model.model.w", "model.w.model."))) == ["model.w", "w.model."]
    assert optimizer_keys(NAMES) == {"a.w": ["exp_avg", "step"]}
    assert optimizer_keys(["optimizer.state.optimizer.state.w.step"]) == {"optimizer.state.w": ["step"]}


def test_what_is_kept_new_and_left_out_is_told_by_any_name() -> None:
    """a and b share w in the checkpoint, c.v is only there; in the workload b and d share w, d.u is new."""
    saved = with_aliases(["a.w", "c.v"], {"a.w": ("b.w",)})
    wanted = with_aliases(["d.w", "d.u"], {"d.w": ("b.w",), "gone": ("x",)})
    assert wanted == {"d.w": ("d.w", "b.w"), "d.u": ("d.u",)}
    carried = CarryOver.of(saved, wanted)
    assert carried == CarryOver({"d.w": "a.w"}, ("d.u",), ("c.v",))


def test_what_was_apart_and_is_one_now_is_that_of_the_first_and_what_was_one_is_copied_to_each() -> None:
    joined = CarryOver.of({"a.w": ("a.w",), "b.w": ("b.w",)}, {"b.w": ("b.w", "a.w")})
    assert joined == CarryOver({"b.w": "b.w"}, (), ("a.w",))
    parted = CarryOver.of({"a.w": ("a.w", "b.w")}, {"a.w": ("a.w",), "b.w": ("b.w",)})
    assert parted == CarryOver({"a.w": "a.w", "b.w": "a.w"}, (), ())


def test_of_tasks_whose_names_begin_alike_the_longest_is_meant() -> None:
    assert task_of("a.b.w", ["a", "a.b", "a.b.w"]) == "a.b"
    assert task_of("ab.w", ["a"]) == "ab"


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_s_name_and_bytes_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    short, num_bytes = DTYPES[name]
    assert torch.empty(0, dtype=dtype).element_size() == num_bytes
    save_file({"x": torch.zeros(3, dtype=dtype)}, tmp_path / "x")
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.get_slice("x").get_dtype() == short


def test_a_header_may_be_as_long_as_the_library_reads_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path, 3, SHARDS)
    lengths = [
        int.from_bytes((folder / f"rank-0000{rank}.safetensors").read_bytes()[:8], "little")
        for rank in (0, 1)
    ]
    monkeypatch.setattr(damages, "MAX_HEADER_BYTES", max(lengths))
    assert damages.damage(folder, read_index(folder), reads_all=True) is None
    monkeypatch.setattr(damages, "MAX_HEADER_BYTES", max(lengths) - 1)
    found = damages.damage(folder, read_index(folder), reads_all=True)
    assert found is not None and f"a header of {max(lengths)} bytes" in found


BOX = Region((1, 10), (3, 4))  # rows 1 to 3, columns 10 to 13


@pytest.mark.parametrize(
    ("first", "last", "boxes"),
    [
        (0, 0, []),
        (5, 5, []),
        (0, 12, [BOX]),
        (0, 4, [Region((1, 10), (1, 4))]),
        (4, 12, [Region((2, 10), (2, 4))]),
        (1, 3, [Region((1, 11), (1, 2))]),
        (5, 8, [Region((2, 11), (1, 3))]),
        (3, 9, [Region((1, 13), (1, 1)), Region((2, 10), (1, 4)), Region((3, 10), (1, 1))]),
        (3, 5, [Region((1, 13), (1, 1)), Region((2, 10), (1, 1))]),
    ],
)
def test_a_range_of_a_box_is_the_rest_of_a_row_whole_rows_and_the_beginning_of_one(
    first: int, last: int, boxes: list[Region]
) -> None:
    assert list(BOX.of_range(first, last)) == boxes


def test_a_scalar_is_one_box_and_a_part_of_a_part_is_counted_from_it() -> None:
    scalar = Region.whole(())
    assert list(scalar.of_range(0, 1)) == [scalar]
    assert list(scalar.of_range(0, 0)) == []
    assert BOX.within(1, 1, 3) == Region((1, 11), (3, 2))
    assert BOX.key("w", (4, 14)) == "w[1:4,10:14]"
    assert parse_region("w[1:4,10:14]") == ("w", BOX)
    assert parse_region("w[1:4,:]") is None


def test_an_empty_shard_is_read_as_it_is(tmp_path: Path) -> None:
    write_shard(tmp_path / "x", {})
    header, begin = damages._read_header(tmp_path / "x")
    assert (header, begin) == ({}, 8 + 2)
