"""Whether two parts of one memory meet: what a change in place must not read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spindle_cli.analysis.tracing.proxies.changes import reads_what_it_writes

Part = Callable[[Tensor], Tensor]
MEET: dict[str, tuple[Part, Part]] = {
    "rows of far ends": (lambda x: x[:6], lambda x: x[5:]),
    "the last row alone": (lambda x: x[:], lambda x: x[-1:]),
    "one entry": (lambda x: x[3], lambda x: x[:, 2]),
    "a row and its reach into the next": (lambda x: x.as_strided((4, 5), (4, 1)), lambda x: x[1:, :1]),
    "spread": (lambda x: x[:, :1].expand(-1, 4), lambda x: x),
}
APART: dict[str, tuple[Part, Part]] = {
    "rows": (lambda x: x[:5], lambda x: x[5:]),
    "columns": (lambda x: x[:, 1:], lambda x: x[:, :1]),
    "every second row": (lambda x: x[::2], lambda x: x[1::2]),
    "nothing": (lambda x: x[:0], lambda x: x),
    "other memory": (lambda x: x, lambda x: x.clone()),
    "the same entries": (lambda x: x[1:], lambda x: x[1:]),
}


@pytest.mark.parametrize("name", [*MEET, *APART])
def test_parts_meet_where_an_entry_lies_in_both(name: str) -> None:
    one, other = {**MEET, **APART}[name]
    memory = torch.zeros(12, 4)
    for written, read in ((one, other), (other, one)):
        assert reads_what_it_writes(written(memory), [read(memory)]) == (name in MEET)


def test_many_rows_are_told_by_few_of_them() -> None:
    memory = torch.empty(2**40, 4, device="meta")
    assert reads_what_it_writes(memory[:, :2], [memory[:, 1:]])
    assert not reads_what_it_writes(memory[:, :2], [memory[:, 2:]])
