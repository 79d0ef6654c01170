"""The memory that parameters are gathered into: lent and taken back, never to two at once."""

from __future__ import annotations

import pytest
import torch

from helpers.torch_versions import exchanges_storages
from spindle_cli.account.types import ParameterGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.runtime.communication.bucket_maker import lay_out
from spindle_cli.runtime.communication.collectives import Members
from spindle_cli.runtime.communication.flat_bucket import FrozenBucket
from spindle_cli.runtime.memory.gather_memory import GatherMemory
from spindle_cli.runtime.memory.given_up import give_up_memory, take_back_memory

pytestmark = exchanges_storages


def given_up(num_elements: int) -> torch.Tensor:
    flat = torch.empty(num_elements)
    give_up_memory(flat)
    return flat


def memory(num_elements: int) -> GatherMemory:
    made = GatherMemory(4 * num_elements, torch.device("cpu"))
    made.flat.zero_()
    return made


def test_a_tensor_and_its_views_have_their_place_until_it_is_taken_back() -> None:
    piece, flat = memory(8), torch.empty(3)
    view = flat[1:]
    give_up_memory(flat)
    assert piece.lend(flat, 8)
    flat.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert piece.flat.view(torch.float32).tolist() == [0, 0, 1, 2, 3, 0, 0, 0]
    assert view.tolist() == [2.0, 3.0]
    piece.take_back(flat, 8)
    assert flat.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0


def test_what_was_saved_of_it_is_there_again_when_it_is_filled_again() -> None:
    piece, flat, other = memory(4), torch.empty(4), given_up(4)
    saved = flat.view(2, 2).t()
    give_up_memory(flat)
    for values in ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]):
        assert piece.lend(flat, 0)
        flat.copy_(torch.tensor(values))
        assert saved.reshape(-1).tolist() == [values[0], values[2], values[1], values[3]]
        piece.take_back(flat, 0)
        assert piece.lend(other, 0)
        other.fill_(float("nan"))
        piece.take_back(other, 0)


@pytest.mark.parametrize(("begin", "is_free"), [(0, True), (4, False), (8, False), (12, False), (16, True)])
def test_nothing_is_lent_of_which_somebody_has_a_byte(begin: int, is_free: bool) -> None:
    """Bytes 8 to 16 are lent; asked for are two elements."""
    piece, first, second = memory(8), given_up(2), given_up(2)
    assert piece.lend(first, 8)
    first.fill_(7.0)
    assert piece.lend(second, begin) == is_free
    assert (second.untyped_storage().nbytes() == 8) == is_free
    assert first.tolist() == [7.0, 7.0]


def test_what_has_no_place_gets_memory_of_its_own_as_before() -> None:
    piece, first, second = memory(2), given_up(2), given_up(2)
    assert piece.lend(first, 0)
    assert not piece.lend(second, 0)
    take_back_memory(second)
    second.fill_(1.0)
    first.fill_(2.0)
    assert second.tolist() == [1.0, 1.0]
    piece.take_back(first, 0)
    assert piece.lend(given_up(2), 0)


def test_places_outside_of_the_memory_are_refused() -> None:
    with pytest.raises(AssertionError):
        memory(2).lend(given_up(2), 4)
    with pytest.raises(AssertionError):
        memory(2).take_back(torch.zeros(2), 0)


@pytest.mark.parametrize(("runs", "num_bytes"), [({0, 2}, 4096), ({0, 1, 2}, 8192), (None, 8192)])
def test_places_are_apart_for_slices_that_the_rank_runs(runs: set[int] | None, num_bytes: int) -> None:
    """Two nets of 4 KiB, which slice 1, of another replica group, uses one behind the other."""
    uses = {"a": ((0, 1), (0, 0)), "b": ((1, 2), (1, 0))}  # slices, and the op of each
    groups, buckets = [], {}
    for index, (name, (slices, ops)) in enumerate(uses.items()):
        group = ParameterGroup(
            index=index,
            devices=(0, 1),
            blocks=((name, 0),),
            num_bytes=0,
            parameter_bytes=4096,
            slices=slices,
            first_ops=ops,
            fragment=(0, 1),
            last_ops=ops,
            sharding=Sharding.PARAMETERS,
            is_trained=False,
        )
        groups.append(group)
        parameter = torch.nn.Parameter(torch.zeros(1024), requires_grad=False)
        buckets[index] = (FrozenBucket({name: parameter}, Members(2, 0, None), group.sharding),)
    made = lay_out(groups, buckets, runs)
    assert made is not None and made.flat.nbytes == num_bytes
