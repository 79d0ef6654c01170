"""Parameters that several ranks step in pieces: how they are cut, and their state put together again."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from case_runs import captured
from runtime_cases import EXACT_ON_FOUR, SAVED, SAVED_WHOLE
from safetensors.torch import save_file
from torch import Tensor

from spindle_cli.checkpoint_files import Checkpoint, Shard, find_checkpoint, state_key, state_of
from spindle_cli.errors import InputError
from spindle_cli.runtime.pieces import FlatLayout
from spindle_cli.saved_tensors import SavedTensors
from spindle_cli.workload.file import TrainSettings


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_ranges_are_equal_and_cover_every_element_once(count: int) -> None:
    sizes = {"a": 100, "b": 1, "empty": 0, "c": 1000, "d": 17}
    layout = FlatLayout.of(sizes, 4, count)
    assert layout.size == count * layout.range_size
    seen: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for position in range(count):
        for name, first, last in layout.owned(position):
            seen[name].append((first, last))
    for name, size in sizes.items():
        edges = [0, *(last for _, last in seen[name])]
        assert [first for first, _ in seen[name]] == edges[:-1], name
        assert edges[-1] == size, name


def test_every_parameter_starts_where_vector_instructions_like_it() -> None:
    layout = FlatLayout.of({"a": 3, "b": 40, "c": 1}, 8, 3)
    assert [first * 8 % 64 for first, _ in layout.spans.values()] == [0, 0, 0]
    assert layout.range_size * 8 % 64 == 0


def test_keys_of_states_are_read_as_they_are_written() -> None:
    assert state_of(state_key("exp_avg", "t.a:b.weight")) == ("exp_avg", "t.a:b.weight", None)
    assert state_of(state_key("exp_avg", "t.a:b.weight", (3, 9))) == ("exp_avg", "t.a:b.weight", (3, 9))
    assert state_of("parameter:state") is None


def saved(folder: Path, stack: ExitStack, *shards: dict[str, Tensor]) -> SavedTensors:
    """A checkpoint with these shards."""
    for rank, tensors in enumerate(shards):
        save_file(tensors, folder / f"rank-{rank:05d}.safetensors")
    checkpoint = Checkpoint(
        step=1,
        plan_sha256="",
        workload="",
        train=TrainSettings(),
        shards=tuple(
            Shard(file=f"rank-{rank:05d}.safetensors", num_bytes=0, keys=tuple(tensors))
            for rank, tensors in enumerate(shards)
        ),
    )
    return SavedTensors(folder, checkpoint, stack)


def test_any_part_of_a_state_is_put_together_from_pieces_or_cut_from_the_whole(tmp_path: Path) -> None:
    values = torch.arange(12.0)
    first = {state_key("m", "w", (0, 5)): values[:5].clone(), state_key("n", "w", (0, 5)): torch.tensor(3.0)}
    second = {
        state_key("m", "w", (5, 12)): values[5:].clone(),
        state_key("n", "w", (5, 12)): torch.tensor(3.0),
    }
    other = {state_key("m", "v"): values.view(3, 4), state_key("n", "v"): torch.tensor(3.0)}
    with ExitStack() as stack:
        found = saved(tmp_path, stack, first, {**second, **other})
        assert found.optimizer_keys("w") == ("m", "n")
        assert found.optimizer_keys("unknown") == ()
        for part in ((0, 12), (2, 4), (4, 9), (5, 6), (11, 12)):
            assert torch.equal(found.state("m", "w", part), values[slice(*part)])
            assert torch.equal(found.state("m", "v", part), values[slice(*part)])
            assert found.state("n", "w", part) == found.state("n", "v", part) == 3
        assert torch.equal(found.state("m", "w", None), values)
        assert torch.equal(found.state("m", "v", None), values.view(3, 4))


def test_a_piece_that_is_missing_is_named(tmp_path: Path) -> None:
    parts = {state_key("m", "w", (0, 5)): torch.zeros(5), state_key("m", "w", (8, 12)): torch.zeros(4)}
    with ExitStack() as stack:
        found = saved(tmp_path, stack, parts)
        with pytest.raises(InputError, match="the optimizer's m of w lacks elements 5 to 8"):
            found.state("m", "w", (2, 9))


@pytest.mark.processes
@pytest.mark.parametrize("case", EXACT_ON_FOUR, ids=lambda case: case.name)
def test_all_copies_of_a_parameter_end_bit_for_bit_the_same(case, four_workers: Path) -> None:
    first: dict[str, Tensor] = {}
    for tensors in captured(four_workers / case.name, "final", 4):
        for name, tensor in tensors.items():
            assert torch.equal(first.setdefault(name, tensor), tensor), name


@pytest.mark.processes
def test_state_is_saved_once_in_pieces_where_it_is_shared(four_workers: Path) -> None:
    """The checkpoints of both runs hold the same elements of state; cut in one run, whole in the other."""
    cut, whole = (find_checkpoint(four_workers / case.name).checkpoint for case in (SAVED, SAVED_WHOLE))
    parts = [state_of(key) for shard in cut.shards for key in shard.keys]
    assert len(set(parts) - {None}) == sum(part is not None for part in parts)
    assert any(part is not None and part[2] is not None for part in parts)
    assert not any(key.startswith("piece:") for shard in whole.shards for key in shard.keys)
