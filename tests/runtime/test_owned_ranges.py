"""Parameters that several ranks step in ranges: how they are cut, and their state put together again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from case_runs import captured, marked
from runtime_cases import EXACT_ON_FOUR, SAVED, SAVED_WHOLE
from torch import Tensor, nn

from spindle_cli.checkpoint.files import find_checkpoint
from spindle_cli.runtime.assembling import stepped_whole
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.update.owned_ranges import FlatLayout
from spindle_cli.training.optimizing.groups import optimizer_groups
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


@pytest.mark.parametrize(("shards", "whole"), [(True, ["t.weight"]), (False, ["t.weight", "t.bias"])])
def test_what_a_matrix_optimizer_steps_is_not_cut(shards: bool, whole: list[str]) -> None:
    root = nn.Linear(4, 6)
    groups = [{"name": "m", "kinds": ["matrices"], "optimizer": "Muon"}, "rest"]
    train = TrainSettings.model_validate({"shard_optimizer": shards, "groups": groups})
    trained = {f"t.{name}": parameter for name, parameter in root.named_parameters()}
    model = SimpleNamespace(train=train, trained=trained, groups=optimizer_groups(train, {"t": root}))
    assert list(stepped_whole(cast("LocalModel", model))) == whole


@pytest.mark.processes
@pytest.mark.parametrize("case", marked(EXACT_ON_FOUR))
def test_all_copies_of_a_parameter_end_bit_for_bit_the_same(case, four_workers: Path) -> None:
    first: dict[str, Tensor] = {}
    for tensors in captured(four_workers / case.name, "final", 4):
        for name, tensor in tensors.items():
            assert torch.equal(first.setdefault(name, tensor), tensor), name


@pytest.mark.processes
def test_state_is_saved_once_in_parts_where_it_is_shared(four_workers: Path) -> None:
    """The checkpoints of both runs have the same tensors; cut in one run, whole in the other."""
    cut, whole = (find_checkpoint(four_workers / case.name).checkpoint for case in (SAVED, SAVED_WHOLE))
    assert cut.tensors == whole.tensors
    assert any("exp_avg[" in key for shard in cut.shards for key in shard.keys)
    assert not any("exp_avg[" in key for shard in whole.shards for key in shard.keys)
