"""In which line of the user's code an operator was run that is watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from spindle_cli.analysis.rules.tape import Tape
from spindle_cli.analysis.without_data import Unread
from spindle_cli.training.precision import MadeInFloat64, WideCasts
from spindle_cli.workload.refuse import place_of


def doubled(x: Tensor) -> None:
    torch.mul(x, 2.0)


def packed(x: Tensor) -> None:
    pack_padded_sequence(x, torch.ones(2))


@pytest.mark.parametrize(
    ("run", "modes"),
    [
        (doubled, ()),
        (doubled, (WideCasts,)),
        (doubled, (lambda: MadeInFloat64(lambda: False),)),
        (doubled, (Unread, WideCasts)),
        (packed, (Unread,)),
    ],
)
def test_the_place_of_an_operator_is_the_user_s_line_whatever_changes_calls_in_between(
    run: Callable[[Tensor], None], modes: tuple[Callable[[], torch.overrides.TorchFunctionMode], ...]
) -> None:
    x = torch.empty(2, 4, 3, device="meta")
    with Tape() as tape, contextlib.ExitStack() as inside:
        for mode in modes:
            inside.enter_context(mode())
        run(x)
    line = run.__code__.co_firstlineno + 1
    assert {entry.place for entry in tape.entries} == {place_of(__file__, line)}
