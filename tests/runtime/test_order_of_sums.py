"""On gloo a gradient sum may start later than the program says. Whenever sums happen to be through, the pool
starts them, and the losses and flags behind them, in the program's order, so that ranks that are held back
differently never start different things on one communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers.examples import examples
from spindle_cli.account.types import ParameterGroup, Purpose
from spindle_cli.program.types import Action, Communicator, Kind
from spindle_cli.runtime.communication import gradients
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.step.executor import Executor, SumStarter

GROUPS = tuple(
    ParameterGroup(
        index, devices, ((f"p{index}", 0),), 64, 64, slices=(index,), first_ops=(0,), fragment=(0, 1)
    )
    for index, devices in enumerate([(0, 1), (0, 1, 2), (0, 1), (0, 1), (0, 1, 2), (0, 1, 2)])
)
MADE = (Communicator(0, (0, 1, 2), Purpose.EVERYONE), Communicator(1, (0, 1), Purpose.SUMS))
# As a program has them: the flags of two devices ahead of the last sum of three, the losses between sums.
PROGRAM = [0, 1, "losses", 2, 3, "flags 1", 4, 5, "flags 0"]
LOSSES = 7


class Through(dist.Work):
    """What was started, and is seen to be through only when `steps` says so."""

    def __init__(self, steps: Iterator[bool]) -> None:
        super().__init__()
        self._steps = steps

    def is_completed(self) -> bool:
        return next(self._steps)

    def wait(self, *_: Any) -> bool:
        return True


def pool_of(patch: pytest.MonkeyPatch, start: Callable[..., dist.Work], room: int) -> GradientPool:
    """Whose sums start by `start` while they take no more than `room` bytes."""
    patch.setattr(dist, "new_group", lambda *_, **__: "pair")
    patch.setattr(dist, "get_backend", lambda _: "gloo")
    patch.setattr(dist, "all_to_all_single", start)
    patch.setattr(dist, "all_reduce", start)
    patch.setattr(gradients, "SUM_BUFFER_BYTES", room)
    trained = {f"p{index}": nn.Parameter(torch.ones(96 * (index + 2))) for index in range(len(GROUPS))}
    return GradientPool(GROUPS, trained, Communicators(MADE, 10), rank=0)


@examples(50)
@given(held=st.lists(st.booleans(), min_size=40, max_size=40), room=st.integers(0, 8000))
def test_sums_losses_and_flags_start_in_the_order_of_the_program(held: list[bool], room: int) -> None:
    steps = iter([*held, *([True] * 1000)])
    started: list[tuple[str | None, torch.Size]] = []

    def start(*tensors: Any, group: Any = None, **_: Any) -> dist.Work:
        started.append((group, tensors[-1].numel()))
        return Through(steps)

    with pytest.MonkeyPatch.context() as patch:
        pool = pool_of(patch, start, room)
        for _ in range(2):
            for each in PROGRAM:
                if isinstance(each, int):
                    pool.start_sum(each)
                elif each == "losses":
                    pool.start_in_turn(lambda: start(torch.ones(LOSSES)))
                else:
                    pool.start_flags(int(each[-1]))
            pool.finish()
            pool.reset()
    names: dict[tuple[str | None, int], int | str]
    names = {("pair" if len(g.devices) == 2 else None, 96 * (g.index + 2)): g.index for g in GROUPS}
    names[None, LOSSES] = "losses"
    order = [names.get(each, f"flags {int(each[0] == 'pair')}") for each in started]
    assert order == [*PROGRAM, *PROGRAM]


def test_losses_wait_for_sums_that_wait_for_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may have started them all; there is room for one alone, which is not through."""
    started: list[int] = []

    def start(*tensors: Any, **_: Any) -> dist.Work:
        started.append(tensors[-1].numel())
        return Through(repeat(False))

    pool = pool_of(monkeypatch, start, room=1)
    executor = Executor.__new__(Executor)  # a rank with nothing but sums
    executor._pool, executor._sums = pool, SumStarter([], pool.start_sum)
    accumulator: Any = SimpleNamespace(start_sum=lambda: start(torch.ones(LOSSES)))
    executor._accumulator = accumulator
    batch: Any = None
    for action in (Action(Kind.SUM, group=0), Action(Kind.SUM, group=1), Action(Kind.LOSSES)):
        executor._run_action(action, batch)
    assert started == [192]
    for group in (1, 0):
        pool.start_flags(group)
    pool.finish()
    assert started[:3] == [192, 288, LOSSES]  # flags come behind them
    assert len(started) == 5
