"""What ranks have of parameters that they share out, before and when buckets take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from alone import world_of_one
from case_runs import Case, prepare
from safetensors.torch import save_file
from shard_cases import ON_SOME, SPLIT
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import RunFailedError
from spindle_cli.files.request import RunRequest
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.types import Plan
from spindle_cli.runtime.communication.collectives import Members
from spindle_cli.runtime.communication.pass_bucket import PassBucket
from spindle_cli.runtime.memory.given_up import give_up_memory
from spindle_cli.runtime.part import replicas
from spindle_cli.runtime.part.localise import LocalModel, localise
from spindle_cli.runtime.part.own_ranges import leaf_without_memory, with_memory
from spindle_cli.runtime.part.replicas import check_replicas
from spindle_cli.runtime.update.owned_ranges import FlatLayout
from spindle_cli.workload.building import partial as building
from spindle_cli.workload.building.load import load
from spindle_cli.workload.building.memory import swap, to_meta
from spindle_cli.workload.building.ranged import Ranged
from spindle_cli.workload.graph import ParameterTable
from spindle_cli.workload.initial.types import OwnPart, OwnValues

CPU = torch.device("cpu")
WHOLE = Case("whole", ON_SOME, apart=3, sharding=Sharding.PARAMETERS, dtype=None)
CASES = [WHOLE, replace(WHOLE, name="double", dtype="float64"), replace(SPLIT, dtype="float64")]
WHOLE_STATE = replace(WHOLE, name="whole-state", train={"shard_optimizer": False})


def models(case: Case, folder: Path) -> tuple[RunRequest, list[LocalModel]]:
    """What each of four ranks has."""
    request = prepare(case, 4, folder / case.name)
    plan = Plan.read(request.plan)
    return request, [localise(request, plan, rank, CPU) for rank in range(4)]


def initial(request: RunRequest) -> dict[str, Tensor]:
    dtype = None if request.dtype is None else getattr(torch, request.dtype)
    found = ParameterTable.of(analysed(load(request.workload).workload)).parameters
    return {name: parameter.detach().to(dtype) for name, parameter in found.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_ranges_of_all_ranks_are_the_initial_values_each_once(case: Case, tmp_path: Path) -> None:
    request, ranks = models(case, tmp_path)
    expected = initial(request)
    covered: dict[str, list[tuple[int, int]]] = {}
    assert all(model.shards for model in ranks)
    for model in ranks:
        for key, own in model.shards.items():
            leaf = model.parameters[key]
            assert leaf.untyped_storage().nbytes() == 0
            cut = next(cut for cut in model.cuts.by_name.values() if key.startswith(cut.name))
            whole = own.part.box_in(expected[cut.name])
            assert leaf.shape == whole.shape
            first, last = own.part.elements
            assert torch.equal(own.values, whole.reshape(-1)[first:last])
            assert own.values.dtype == leaf.dtype == whole.dtype
            covered.setdefault(key, []).append((first, last))
        for key, leaf in model.parameters.items():
            if key not in model.shards and key in expected:
                assert torch.equal(leaf, expected[key])
    for key, ranges in covered.items():
        held = sorted(each for each in ranges if each[0] < each[1])
        size = next(model.parameters[key].numel() for model in ranks if key in model.shards)
        assert held[0][0] == 0 and held[-1][1] == size
        assert all(one[1] == other[0] for one, other in pairwise(held)), key


def test_a_start_has_the_ranges_and_two_whole_parameters_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Ranged] = []

    def noted(wanted: dict[int, tuple[OwnPart, ...]]) -> Ranged:
        made.append(Ranged(wanted))
        return made[-1]

    monkeypatch.setattr(building, "Ranged", noted)
    request, ranks = models(WHOLE, tmp_path)
    sizes = {name: value.nbytes for name, value in initial(request).items()}
    for model, ranged in zip(ranks, made, strict=True):
        shared_out = {key: own.values.nbytes for key, own in model.shards.items()}
        assert sum(shared_out.values()) < 0.6 * sum(sizes[key] for key in shared_out)
        assert ranged.most_bytes <= 2 * max(sizes[key] for key in shared_out)


def test_ranges_are_those_that_buckets_of_the_runs_numbers_give(tmp_path: Path) -> None:
    """Parameters begin at multiples of 64 bytes, of twice as many numbers where these are half as wide."""
    _, ranks = models(CASES[1], tmp_path)
    for rank, model in enumerate(ranks):
        for group in model.cuts.of_leaves(model.sums):
            if group.sharding is Sharding.PARAMETERS and rank in group.devices:
                sizes = {key: model.parameters[key].numel() for key, _ in group.blocks}
                layout = FlatLayout.of(sizes, 8, len(group.devices))
                owned = {key: (a, b) for key, a, b in layout.owned(group.devices.index(rank))}
                for key in sizes:
                    assert model.shards[key].part.elements == owned.get(key, (0, 0))


def test_what_every_rank_steps_whole_is_there_whole_and_what_none_does_is_not(tmp_path: Path) -> None:
    _, ranks = models(WHOLE_STATE, tmp_path)
    frozen = {"pairs.text.embed.weight"}  # on the last two
    assert [set(model.shards) for model in ranks] == [set(), set(), frozen, frozen]
    for model in ranks:
        for name, leaf in model.parameters.items():
            assert bool(leaf.untyped_storage().nbytes()) == (name not in model.shards)


def test_ranges_are_taken_from_files_of_initial_values(tmp_path: Path) -> None:
    request = prepare(WHOLE, 4, tmp_path / "run")
    before = initial(request)
    names = [name for name in before if "vision" in name]
    other = {name: torch.randn(before[name].shape) for name in names}
    save_file(other, tmp_path / "other.safetensors")
    source = Path(request.workload)
    content = yaml.safe_load(source.read_text())
    content["init_from"] = [{"path": str(tmp_path / "other.safetensors"), "missing": ["*"]}]
    source.write_text(yaml.safe_dump(content))
    plan = Plan.read(request.plan)
    prints: dict[str, set[int | None]] = {}
    for rank in range(4):
        model = localise(request, plan, rank, CPU)
        for key, own in model.shards.items():
            whole = other.get(key, before[key])
            assert torch.equal(own.values, own.part.of(whole))
            prints.setdefault(key, set()).add(own.fingerprint)
    assert prints.keys() >= set(names)
    assert all(len(found) == 1 for found in prints.values())


@pytest.fixture
def world() -> Iterator[None]:
    with world_of_one():
        yield


def own_of(key: str, elements: tuple[int, int], values: list[float], seen: int | None = None) -> OwnValues:
    return OwnValues(OwnPart(key, None, elements), torch.tensor(values), seen)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_bucket_takes_a_range_as_it_would_of_whole_parameters(world: None, position: int) -> None:
    """40 and 9 elements over three ranks of 32, as each begins at a multiple of 16."""
    values = {"a": torch.arange(40.0), "b": torch.arange(100.0, 109.0)}
    members = Members(3, position, None)

    def bucket(*, whole: bool) -> PassBucket:
        parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        own = {"a": [(0, 32), (32, 40), (0, 0)], "b": [(0, 0), (0, 9), (0, 0)]}
        if whole:
            return PassBucket(parameters, members, Sharding.PARAMETERS, None)
        for parameter in parameters.values():
            give_up_memory(parameter.detach())
        there = {
            name: OwnValues(
                OwnPart(name, None, ranges[position]), values[name][slice(*ranges[position])], None
            )
            for name, ranges in own.items()
        }
        made = PassBucket(parameters, members, Sharding.PARAMETERS, None, there)
        assert not there, "what a bucket has taken is held by nobody else"
        return made

    one, other = bucket(whole=True), bucket(whole=False)
    assert len(one.owned_ranges) == len(other.owned_ranges) == [1, 2, 0][position]
    for mine, theirs in zip(one.owned_ranges, other.owned_ranges, strict=True):
        assert (mine.name, mine.part) == (theirs.name, theirs.part)
        assert torch.equal(mine.tensor, theirs.tensor)
    assert torch.equal(one._shard, other._shard)


def test_a_leaf_is_the_parameter_itself_unless_it_is_a_part_of_it() -> None:
    parameter = nn.Parameter(torch.empty(6, 2, device="meta"), requires_grad=False)
    parameter.marked = True  # type: ignore[attr-defined]
    place = torch.zeros(0, dtype=torch.float64)
    piece = leaf_without_memory(parameter, OwnPart("p[1:3]", ((1, 3), (0, 2)), (0, 1)), place)
    assert (piece.shape, piece.dtype, piece.requires_grad) == ((2, 2), torch.float64, False)
    assert parameter.is_meta
    leaf = leaf_without_memory(parameter, OwnPart("p", None, (0, 1)), place)
    assert leaf is parameter
    assert (leaf.shape, leaf.dtype, leaf.requires_grad) == ((6, 2), torch.float64, False)
    assert leaf.marked
    assert leaf.untyped_storage().nbytes() == 0
    with with_memory([leaf]):
        assert leaf.tolist() == [[0.0, 0.0]] * 6
    assert leaf.untyped_storage().nbytes() == 0


def test_what_is_noted_at_a_parameter_moves_with_its_values_weak_references_or_not() -> None:
    """As torch itself exchanges two tensors."""
    for layer in (nn.Linear(2, 2), nn.GRU(2, 2)):
        first, second = next(layer.parameters()), nn.Parameter(torch.zeros(1))
        first.noted = 1  # type: ignore[attr-defined]  # as users' code does
        swap(first, second)
        assert first.shape == (1,)
        assert (hasattr(first, "noted"), hasattr(second, "noted")) == (False, True)


def test_a_layer_with_weak_references_to_its_weights_computes_with_their_leaves() -> None:
    gru = nn.GRU(3, 2)
    for parameter in gru.parameters():
        to_meta(parameter)
    leaves = [leaf_without_memory(p, OwnPart("p", None, (0, 1)), torch.zeros(0)) for p in gru.parameters()]
    assert [id(leaf) for leaf in leaves] == [id(weight) for weight in gru.parameters()]
    with with_memory(leaves):
        assert gru(torch.ones(4, 1, 3))[0].count_nonzero() == 0
        for leaf in leaves:
            leaf.data.fill_(0.5)
        assert gru(torch.ones(4, 1, 3))[0].count_nonzero() == 8


def test_ranks_that_saw_other_values_of_a_shared_out_parameter_are_refused(
    world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = nn.Parameter(torch.empty(3))
    give_up_memory(empty.detach())
    seen = {"w": own_of("w", (0, 1), [1.0], 7)}
    check_replicas(["w"], {"w": empty}, seen)

    def other_rank(checksums: Tensor, **_: object) -> None:
        checksums.copy_(torch.maximum(checksums, torch.tensor([[8, -8]])))

    monkeypatch.setattr(replicas.dist, "all_reduce", other_rank)
    check_replicas(["w"], {"w": empty}, {"w": own_of("w", (0, 1), [1.0])})
    with pytest.raises(RunFailedError, match="'w' does not start with the same values"):
        check_replicas(["w"], {"w": empty}, seen)
