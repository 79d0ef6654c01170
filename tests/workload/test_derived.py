"""What is computed from parameters while a workload is built, and parameters that autograd has saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spindle_cli.workload.building.load import Derivations
from spindle_cli.workload.building.memory import swap


def test_a_parameter_made_of_another_is_followed_together_with_it() -> None:
    found = Derivations()
    first = torch.ones(3)
    found.note(first, [0])
    with found:
        second = first * 2
        found.note(second, [1])
        third, other = second.view(3, 1) + 1, torch.ones(3) * 2
    assert found.of(second) == found.of(third) == {0, 1}
    assert found.of(other) == frozenset()


def test_what_comes_to_lie_where_something_was_is_not_computed_from_its_parameters() -> None:
    found = Derivations()
    gone = torch.ones(3)
    found.note(gone, [0])
    (entry,) = found._sources.values()
    del gone
    new = torch.ones(3)
    found._sources[new.untyped_storage()._cdata] = entry
    assert found.of(new) == frozenset()


def test_parameters_that_autograd_has_saved_are_exchanged() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    computed = one * one
    with pytest.raises(RuntimeError, match="use_count"):
        torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]  # torch gives it no types
    swap(one, other)
    assert one.tolist() == [0, 0]
    assert other.tolist() == [1, 1]
    assert computed.tolist() == [1, 1]
