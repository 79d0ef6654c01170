"""Fragments of tensors are found and put together, however they were cut when saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spindle_cli.fragments import Fragment, fragment_key, parse_key
from spindle_cli.request import CaptureStage, capture_path
from spindle_cli.saved_tensors import cut_out, refit
from spindle_cli.verify.captured import open_run

WHOLE = torch.arange(24.0).view(4, 6)
QUARTERS = [Fragment(0, first, first + 1) for first in range(4)]
HALVES = [Fragment(1, 0, 3), Fragment(1, 3, 6)]


@pytest.mark.parametrize("name", ["a.b.weight", "with@sign", "x@0:1"])
def test_a_key_is_read_as_it_was_written(name: str) -> None:
    for fragment in (None, Fragment(1, 8, 16)):
        assert parse_key(fragment_key(name, fragment)) == (name, fragment)


@pytest.mark.parametrize("saved", [[None], QUARTERS, HALVES])
@pytest.mark.parametrize("wanted", [None, Fragment(0, 1, 3), Fragment(1, 2, 4), Fragment(0, 0, 2)])
def test_any_fragment_is_put_together_from_any_other(
    wanted: Fragment | None, saved: list[Fragment | None]
) -> None:
    found = refit(wanted, saved, lambda each: WHOLE if each is None else cut_out(WHOLE, each))
    expected = WHOLE if wanted is None else cut_out(WHOLE, wanted)
    assert found is not None
    assert torch.equal(found, expected)
    assert found.is_contiguous()


def test_what_is_missing_is_seen_and_numbers_are_copied() -> None:
    assert refit(Fragment(0, 1, 3), [QUARTERS[0], QUARTERS[2]], lambda each: cut_out(WHOLE, each)) is None
    count = torch.tensor(3.0)
    found = refit(QUARTERS[0], [None], lambda _: count)
    assert found is not None
    assert found.item() == 3
    assert found.data_ptr() != count.data_ptr()


def test_verify_compares_every_ranks_copy_of_every_fragment(tmp_path: Path) -> None:
    """Rank 0 has the upper half, ranks 1 and 2 the lower one; rank 2's is another."""
    upper, lower = Fragment(0, 0, 2), Fragment(0, 2, 4)
    stages: tuple[CaptureStage, ...] = ("initial", "gradients", "final")
    held = [(upper, 0.0), (lower, 0.0), (lower, 1.0)]
    for rank, (fragment, off) in enumerate(held):
        for stage in stages:
            tensors = {fragment_key("w", fragment): (cut_out(WHOLE, fragment) + off).contiguous()}
            save_file(tensors, capture_path(tmp_path, stage, rank))
    with open_run(tmp_path, 3) as run:
        copies = list(run.final.copies("w"))
        assert [where for where, _ in copies] == ["ranks 0, 1", "ranks 0, 2"]
        assert [torch.equal(tensor, WHOLE) for _, tensor in copies] == [True, False]
        assert run.final.holders == {"w": (0, 1, 2)}
