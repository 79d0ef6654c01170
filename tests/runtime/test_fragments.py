"""Fragments of tensors: their names, and that every rank's copy of each is compared."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file

from spindle_cli.files.request import CaptureStage, capture_path
from spindle_cli.files.tensors import Fragment, fragment_key, parse_key, parse_part_key, part_key
from spindle_cli.verify.comparing.captured import open_run

WHOLE = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize("name", ["a.b.weight", "with@sign", "x[]", "x[1]", "x[a:b]"])
def test_a_key_is_read_as_it_was_written(name: str) -> None:
    for fragment in (None, Fragment(0, 0, 1), Fragment(2, 8, 16)):
        assert parse_key(fragment_key(name, fragment)) == (name, fragment)


def test_keys_name_parts_as_slices_are_written() -> None:
    assert fragment_key("w", Fragment(0, 2, 4)) == "w[2:4]"
    assert fragment_key("w", Fragment(2, 8, 16)) == "w[:,:,8:16]"
    assert part_key("w", [(0, 4), None, (2, 5)]) == "w[0:4,:,2:5]"
    assert parse_part_key("w[0:4,:,2:5]") == ("w", ((0, 4), None, (2, 5)))
    assert parse_part_key("w[3:]") == ("w[3:]", None)  # half a range is a name


def test_verify_compares_every_ranks_copy_of_every_fragment(tmp_path: Path) -> None:
    """Rank 0 has the upper half, ranks 1 and 2 the lower one; rank 2's is another."""
    upper, lower = Fragment(0, 0, 2), Fragment(0, 2, 4)
    stages: tuple[CaptureStage, ...] = get_args(CaptureStage)
    held = [(upper, 0.0), (lower, 0.0), (lower, 1.0)]
    for rank, (fragment, off) in enumerate(held):
        for stage in stages:
            tensors = {fragment_key("w", fragment): WHOLE[fragment.first : fragment.last] + off}
            save_file(tensors, capture_path(tmp_path, stage, rank))
    with open_run(tmp_path, 3) as run:
        copies = list(run.final.copies("w"))
        assert [where for where, _ in copies] == ["ranks 0, 1", "ranks 0, 2"]
        assert [torch.equal(tensor, WHOLE) for _, tensor in copies] == [True, False]
        assert run.final.holders == {"w": (0, 1, 2)}
