"""Random numbers of generators of somebody's own, after seeds, and of Python: shares draw them otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.own_draws import OwnDraws, draw_from_the_run
from spindle_cli.errors import WorkloadError
from spindle_cli.profile.checking.task import CheckLimits, TaskChecker
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items

BATCH = 6
OF_THE_FILE = torch.Generator().manual_seed(5)
NUMPYS_OF_THE_FILE = np.random.default_rng(5)
PYTHONS = random.Random(5)
STATE = torch.Generator().manual_seed(9).get_state()


class Noisy(nn.Module):
    """Adds what `draw` draws."""

    def __init__(self, draw: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw
        self.generator = torch.Generator().manual_seed(3)
        self.in_a_list = [torch.Generator().manual_seed(4)]
        self.late: torch.Generator | None = None
        self.numpys = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.draw(self, x)


def _normal(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, dtype=x.dtype)


def _late(module: Noisy, x: Tensor) -> Tensor:
    if module.late is None:
        module.late = torch.Generator().manual_seed(3)
    return _normal(x, module.late)


def _reseeded(module: Noisy, x: Tensor) -> Tensor:
    return _normal(x, module.generator.manual_seed(3))


def _seeded(_: Noisy, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return torch.randn_like(x)


def _seeded_behind(_: Noisy, x: Tensor) -> Tensor:
    drawn = torch.randn_like(x)
    torch.manual_seed(3)
    return drawn


def _forked(_: Noisy, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.randn_like(x)


def _state_set(_: Noisy, x: Tensor) -> Tensor:
    torch.set_rng_state(STATE)
    return torch.randn_like(x)


FOLLOWING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "of the layer": lambda module, x: _normal(x, module.generator),
    "in a list": lambda module, x: _normal(x, module.in_a_list[0]),
    "in place": lambda module, x: torch.empty_like(x).normal_(generator=module.generator),
    "of the file": lambda _, x: _normal(x, OF_THE_FILE),
    "made by the first forward": _late,
    "poisson": lambda module, x: torch.poisson(x.exp(), module.generator),
}
WHOLE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "made in forward": lambda _, x: _normal(x, torch.Generator().manual_seed(3)),
    "seeded in forward": _reseeded,
    "torch seeded": _seeded,
    "torch seeded behind": _seeded_behind,
    "torch seeded in a fork": _forked,
    "torch's state set": _state_set,
}
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "numpy": (lambda _, x: torch.from_numpy(np.random.randn(*x.shape)).to(x.dtype), "numpy.random"),
    "a coin": (lambda _, x: x * float(random.random() < 0.5), "Python's random"),
    "numpy's own": (
        lambda module, x: torch.from_numpy(module.numpys.standard_normal(tuple(x.shape))).to(x.dtype),
        r"self.numpys \(Generator\)",
    ),
}


class Net(nn.Module):
    def __init__(self, draw: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.noisy, self.last = Block(), Noisy(draw), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.noisy(self.first(x))).pow(2).mean()  # type: ignore[no-any-return]


def workload(draw: Callable[[Any, Tensor], Tensor], *, is_operator: bool = True) -> Workload:
    torch.manual_seed(0)
    operators = (Block, Noisy) if is_operator else (Block,)
    return Workload("w", [Task("t", Net(draw), BATCH, Items(x=(4, WIDTH)))], operators)


@pytest.fixture(autouse=True)
def generators_kept() -> Iterator[None]:
    """No test leaves the file's generators elsewhere."""
    before = OF_THE_FILE.get_state()
    yield
    OF_THE_FILE.set_state(before)


@pytest.mark.parametrize("name", FOLLOWING)
def test_draws_of_a_generator_that_somebody_holds_come_from_the_run(name: str) -> None:
    made = workload(FOLLOWING[name])
    graph = analysed(made)
    noisy = graph.tasks["t"].ops[1]
    is_late = name == "made by the first forward"  # which makes it of numbers, once for all samples
    assert (noisy.target, noisy.coupled, noisy.draws_own) == ("noisy", is_late, True)
    assert [op.draws_own for op in graph.tasks["t"].ops] == [False, True, False]
    assert any("t/noisy draws from a torch.Generator of its own" in note for note in graph.notes)
    # No generator has moved by being looked at.
    held: Noisy = made.tasks[0].module.noisy
    assert held.late is None
    for generator, seed in ((held.generator, 3), (held.in_a_list[0], 4)):
        assert torch.equal(generator.get_state(), torch.Generator().manual_seed(seed).get_state())
    assert OF_THE_FILE.initial_seed() == 5
    module = graph.tasks["t"].op_module(noisy)
    draw_from_the_run(module)
    x = torch.ones(BATCH, 4, WIDTH)

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        result: Tensor = module(x)[0]
        return result

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_seeded_in_forward_is_never_split(name: str) -> None:
    noisy = analysed(workload(WHOLE[name])).tasks["t"].ops[1]
    assert (noisy.coupled, noisy.draws_own) == (True, False)
    assert "the same" in str(noisy.coupled_because) and "test_own_draws.py:" in str(noisy.coupled_because)


@pytest.mark.parametrize("name", REFUSED)
def test_what_python_draws_is_refused_with_its_name(name: str) -> None:
    draw, what = REFUSED[name]
    with pytest.raises(WorkloadError, match=rf"'noisy' \(Noisy\) draws random numbers by {what}") as refused:
        analysed(workload(draw))
    assert "keep = (torch.rand(len(x), 1" in str(refused.value.hint)


def test_the_way_out_for_a_coin_is_split() -> None:
    def toss(_: Noisy, x: Tensor) -> Tensor:
        keep = (torch.rand(len(x), 1, device=x.device) < 0.5).to(x.dtype)
        return keep[:, None] * x

    noisy = analysed(workload(toss)).tasks["t"].ops[1]
    assert (noisy.coupled, noisy.draws_own) == (False, False)


@pytest.mark.parametrize("name", ["torch seeded", "torch seeded in a fork", "torch's state set"])
def test_seeding_between_operators_is_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match=r"forward seeds torch's random numbers between operators"):
        analysed(workload(WHOLE[name], is_operator=False))
    before = torch.initial_seed()
    analysed(workload(lambda _, x: torch.randn_like(x), is_operator=False))
    assert torch.initial_seed() in (0, before)  # as the workload leaves it


@pytest.mark.parametrize("name", ["of the layer", "of the file", "in place", "torch seeded"])
def test_numbers_show_it_where_the_rules_do_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(draw: Callable[[Any, Tensor], Tensor]) -> dict[str, str]:
        task = analysed(workload(draw)).tasks["t"]
        names = {op.index: str(op.target) for op in task.ops}
        checked = TaskChecker(task, names, 0, CheckLimits(monotonic() + 60, 60, 2**34)).check()
        return {where: why.partition(": ")[2] for where, why in checked.whole.items()}

    draw = {**FOLLOWING, **WHOLE}[name]
    assert reason(draw) == {}
    monkeypatch.setattr(OwnDraws, "seen", lambda _: nullcontext())
    assert reason(draw) == {"noisy": "it draws the same random numbers in every share"}
    assert reason(lambda _, x: torch.nn.functional.dropout(torch.rand_like(x), 0.1)) == {}
