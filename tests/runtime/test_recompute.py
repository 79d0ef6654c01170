"""Recomputation: the same numbers, the same chance and the same buffers as without it, in less memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from spindle_cli.runtime.step.compute import _run_op
from spindle_cli.runtime.step.recompute import ChangedState, run_recomputed


class Chancy(nn.Module):
    """What a second forward pass could get wrong: chance, and buffers that it changes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.spectral = nn.utils.spectral_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(torch.tanh(self.spectral(self.norm(x))), 0.5)


def plainly(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def recomputed(module: nn.Module, x: Tensor) -> Tensor:
    return run_recomputed(module, [x])


def train(run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """Outputs and gradients of two steps over two layers, and the buffers after them."""
    torch.manual_seed(3)
    layers = nn.ModuleList([Chancy(), Chancy()]).double()
    found: list[Tensor] = []
    for _ in range(2):
        x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
        y = x
        for layer in layers:
            y = run(layer, y)
        y.square().sum().backward()
        found += [y.detach(), x.grad, torch.rand(1)]
    found += [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]
    return [*found, *layers.buffers()]


def test_nothing_but_memory_tells_recomputation_from_keeping() -> None:
    for kept, again in zip(train(plainly), train(recomputed), strict=True):
        assert torch.equal(kept, again)


def test_other_passes_go_back_after_a_layer_that_they_share_ran_forward_again() -> None:
    """They have kept its running statistics, which were put back for that and then forward again."""
    norm, one, two = nn.BatchNorm1d(3), torch.randn(4, 3), torch.randn(5, 3)
    plain = copy.deepcopy(norm)
    again = run_recomputed(norm, [one.requires_grad_()])
    kept = norm(two.requires_grad_())
    found = [torch.autograd.grad(y.square().sum(), x)[0] for y, x in ((again, one), (kept, two))]
    outputs = [plain(one), plain(two)]
    expected = [torch.autograd.grad(y.square().sum(), x)[0] for y, x in zip(outputs, (one, two), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(norm.buffers(), plain.buffers(), strict=True))


class Wide(nn.Module):
    """Keeps 3 x 20 MB of activations for 0.3 MB of input: (2500 rows of 2000) between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(30, 2000), nn.Linear(2000, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(torch.relu(self.up(x)).exp()))


@pytest.mark.parametrize(("run", "layers_kept"), [(plainly, 4), (recomputed, 0)])
def test_a_layer_that_recomputes_keeps_its_input_alone(
    run: Callable[[nn.Module, Tensor], Tensor], layers_kept: int
) -> None:
    layers = [Wide() for _ in range(4)]
    x = torch.zeros(2500, 30, requires_grad=True)
    gc.collect()
    before = psutil.Process().memory_info().rss
    y = x
    for layer in layers:
        y = run(layer, y)
    held = psutil.Process().memory_info().rss - before
    assert y.requires_grad
    # What the allocator has not given back yet counts, too: only the size of the difference is sure.
    kept_by_all = 4 * 3 * 20e6
    assert held > 0.8 * kept_by_all if layers_kept else held < 0.4 * kept_by_all


class Table(nn.Module):
    """Reads a large buffer, which it never changes, and a small one, which it does when it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.ones(1000, 6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.places[: len(x)])


@pytest.mark.parametrize(
    ("training", "kept"), [(True, {"norm.running_mean", "norm.running_var"}), (False, set())]
)
def test_only_buffers_that_change_are_copied(training: bool, kept: set[str]) -> None:
    module = Table().train(training)
    changed = ChangedState(module)
    first, _ = changed.contexts()
    with first:
        module(torch.randn(4, 6))
    names = {id(buffer): name for name, buffer in module.named_buffers()}
    assert changed.before is not None
    copied = changed.before.buffers
    assert {names[id(buffer)] for buffer, _ in copied} - {"norm.num_batches_tracked"} == kept
    assert all(not torch.equal(buffer, before) for buffer, before in copied)


def test_buffers_in_memory_that_is_not_torchs_are_put_back_too() -> None:
    module = Table()
    module.norm.running_mean = torch.from_numpy(numpy.zeros(6, dtype="float32"))
    changed = ChangedState(module)
    first, again = changed.contexts()
    x = torch.randn(4, 6)
    with first:
        module(x)
    after = module.norm.running_mean.clone()
    with again:
        assert torch.equal(module.norm.running_mean, torch.zeros(6))
        module(x)
    assert torch.equal(module.norm.running_mean, after)


class Teaching(nn.Module):
    """Moves parameters that are not trained, and computes with them."""

    def __init__(self, *, in_new_memory: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.teacher = nn.Linear(6, 6).requires_grad_(False)
        self.in_new_memory = in_new_memory

    def forward(self, x: Tensor) -> Tensor:
        for ours, theirs in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
            if self.in_new_memory:
                ours.data = ours.data * 0.9 + theirs.data * 0.1
            else:
                ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        return torch.tanh(self.linear(x)) * self.teacher(x)


@pytest.mark.parametrize("in_new_memory", [False, True])
def test_a_teacher_is_moved_once_and_computed_with_as_the_first_pass_moved_it(in_new_memory: bool) -> None:
    found: list[list[Tensor]] = []
    for run in (plainly, lambda module, x: run_recomputed(module, [x], may_move=True)):
        torch.manual_seed(3)
        module = Teaching(in_new_memory=in_new_memory).double()
        for _ in range(2):
            run(module, torch.randn(8, 6, dtype=torch.float64)).square().sum().backward()
        gradients = [held.grad for held in module.parameters() if held.grad is not None]
        found.append([*gradients, *module.teacher.parameters()])
    assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))


class Shrinking(nn.Module):
    """Changes a parameter that is trained, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.9)
        return torch.tanh(self.linear(x))


def test_a_trained_parameter_is_changed_once_and_has_the_gradient_of_that() -> None:
    found: list[list[Tensor]] = []
    for run in (plainly, lambda module, x: run_recomputed(module, [x], moves_trained=True)):
        torch.manual_seed(3)
        module = Shrinking().double()
        for _ in range(2):
            run(module, torch.randn(8, 6, dtype=torch.float64)).square().sum().backward()
        found.append([each for held in module.parameters() for each in (held.detach(), held.grad)])
    assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))


class Forces(nn.Module):
    """Asks for gradients itself, and counts how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        places = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(self.energy(places).sum(), places, create_graph=True)
        return x * self.runs + functional.dropout(found, 0.5)


class Centring(nn.Module):
    """Keeps running means in tensors that are no buffers: an attribute, in a dict, of a module in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(6, 6), torch.zeros(6)
        self.box, self.twins = {"mean": torch.zeros(6)}, [nn.Linear(6, 6).requires_grad_(False)]

    def kept(self) -> list[Tensor]:
        return [self.mean, self.box["mean"], self.twins[0].bias]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        with torch.no_grad():
            for mean in self.kept():
                mean.mul_(0.5).add_(y.mean(0), alpha=0.5)
        return y * torch.stack(self.kept()).sum(0)


def test_what_is_written_into_tensors_that_are_no_buffers_is_written_once() -> None:
    found: list[list[Tensor]] = []
    for run in (plainly, lambda module, x: run_recomputed(module, [x], may_move=True)):
        torch.manual_seed(3)
        layer = Centring()
        for _ in range(2):
            run(layer, torch.randn(8, 6)).square().sum().backward()
        gradients = [each.grad for each in layer.parameters() if each.grad is not None]
        found.append([*gradients, *layer.kept()])
    for kept, again in zip(*found, strict=True):
        assert torch.equal(kept, again)


def test_an_op_that_asks_for_gradients_itself_is_recomputed_as_any_other() -> None:
    """It runs again for these gradients, too, while it runs first."""
    found = []
    for run in (plainly, recomputed):
        torch.manual_seed(3)
        layer = Forces().double()
        x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        for _ in range(2):
            run(layer, x).square().sum().backward()
        trained = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        found.append([x.grad, layer.runs, torch.rand(1), *trained])
    for kept, again in zip(*found, strict=True):
        assert torch.equal(kept, again)


@pytest.mark.parametrize("selective", [False, True])
def test_an_op_keeps_what_its_slice_says(selective: bool) -> None:
    """A product that is followed by something else runs once more, or not."""
    layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    products = []
    layer[0].register_forward_hook(lambda *_: products.append(torch._C._len_torch_dispatch_stack()))
    piece = SimpleNamespace(ops=(0, 1), recompute=True, selective=selective)
    op = SimpleNamespace(coupled=False, changes=())
    local: Any = SimpleNamespace(wired=SimpleNamespace(slice=piece, ops=[op]), runnable=[layer])
    _run_op(local, 0, [torch.randn(3, 6, requires_grad=True)], None).sum().backward()
    # Twice forward, inside of what tells operations apart if the slice says so.
    assert products == ([1, 1] if selective else [0, 0])
