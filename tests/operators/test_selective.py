"""Selective recomputation: the same numbers and chance, less memory, and no product computed twice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.operators.whole import is_kept, selective_checkpoint
from spindle_cli.profile.op.op_memory import LiveBytes

WIDTH, INNER = 32, 128
Run = Callable[[Callable[..., Any], Sequence[Tensor]], Tensor]


class Layer(nn.Module):
    """A transformer's, with dropout everywhere, also in its attention."""

    def __init__(self, chance: float = 0.2) -> None:
        super().__init__()
        self.norm, self.inner_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mixed(self.norm(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=self.chance)
        x = x + functional.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.chance)
        inner: Tensor = functional.gelu(self.up(self.inner_norm(x)))
        return x + self.down(functional.dropout(inner, self.chance))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        pictures = x[..., :30].reshape(x.shape[0], 3, -1, 10)
        return x + functional.pad(
            self.second(functional.silu(self.first(pictures))).reshape(x.shape[0], -1, 30), (0, 2)
        )


def plainly(function: Callable[..., Any], arguments: Sequence[Tensor]) -> Tensor:
    found: Tensor = function(*arguments)
    return found


def selectively(function: Callable[..., Any], arguments: Sequence[Tensor]) -> Tensor:
    found: Tensor = selective_checkpoint(function, arguments)
    return found


def trained(layers: nn.ModuleList, run: Run, *, narrow: bool = False) -> list[Tensor]:
    """What layers in a row give, their gradients, and the next random number."""
    torch.manual_seed(5)
    given = torch.randn(4, 10, WIDTH, requires_grad=True)
    x: Tensor = given
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        for layer in layers:
            x = run(layer, [x])
    gradients = torch.autograd.grad(x.float().square().sum(), [given, *layers.parameters()])
    return [x.detach(), *gradients, torch.rand(1)]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("chance", [0.0, 0.2])
def test_nothing_but_memory_tells_it_from_keeping_all(chance: float, narrow: bool) -> None:
    """The second time a layer is there, autocast has its parameters cast already."""
    layer = Layer(chance)
    layers = nn.ModuleList([layer, Convolved(), layer])
    for kept, again in zip(
        trained(layers, plainly, narrow=narrow), trained(layers, selectively, narrow=narrow), strict=True
    ):
        assert torch.equal(kept, again)


class Counted(TorchDispatchMode):
    """How often each operation has run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func._overloadpacket).split(".")[-1]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_products_run_once_and_the_rest_twice() -> None:
    layer = Layer(0.0)
    x = torch.randn(4, 10, WIDTH, requires_grad=True)
    counted = {}
    for run in (plainly, selectively):
        with Counted() as counter:
            run(layer, [x]).sum().backward()
        counted[run] = counter.counts
    plain, again = counted[plainly], counted[selectively]
    assert again["addmm"] == plain["addmm"] == 4
    assert again["mm"] == plain["mm"]
    assert (plain["native_layer_norm"], again["native_layer_norm"]) == (2, 4)
    assert (plain["gelu"], again["gelu"]) == (1, 2)


_aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operation", "arguments", "is_kept_then"),
    [
        (_aten._scaled_dot_product_flash_attention.default, (), True),
        (_aten._scaled_dot_product_flash_attention.default, (0.1,), False),
        (_aten._scaled_dot_product_flash_attention.default, (0.0, True), True),
        (_aten._scaled_dot_product_efficient_attention.default, (None, True, 0.1), False),
        (_aten._scaled_dot_product_efficient_attention.default, (None, True), True),
        (_aten._scaled_dot_product_flash_attention_for_cpu.default, (0.2,), False),
        (_aten._scaled_dot_product_flash_attention_for_cpu.default, (0.0,), True),
    ],
)
def test_attention_is_kept_if_it_draws_no_random_numbers(
    operation: Any, arguments: tuple[Any, ...], is_kept_then: bool
) -> None:
    """Else the second pass would draw others behind it."""
    given = (torch.zeros(1, 1, 2, 8),) * 3
    assert is_kept(operation, (*given, *arguments), {}) is is_kept_then
    assert is_kept(operation, given, {"dropout_p": 0.5}) is False


def kept_bytes(layer: nn.Module, run: Run) -> float:
    x = torch.randn(4, 10, WIDTH, requires_grad=True)
    meter = LiveBytes([x, *layer.parameters()])
    before = meter.held
    with meter:
        out = run(layer, [x])
    assert out.requires_grad
    return meter.held - before


class Mapped(nn.Module):
    """Two maps with something between them; `behind`: what comes behind the second."""

    def __init__(self, behind: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(x, self.down(torch.tanh(self.up(x))))


def test_it_keeps_its_products_but_for_the_last_if_no_gradient_needs_it() -> None:
    """40 samples: what `up` gives, 128 floats each, and the output, 32; what `down` gives where a gradient is
    computed from it, or from a random number behind it. Kept whole: `tanh` of 128 instead.
    """
    ends: dict[Callable[[Tensor, Tensor], Tensor], int] = {
        lambda x, y: x + y: INNER + WIDTH,
        lambda x, y: (x + y.view(-1, WIDTH).view(x.shape)) - x: INNER + WIDTH,
        lambda _, y: y: INNER + WIDTH,  # it is the output
        lambda x, y: x * y: INNER + 2 * WIDTH,
        lambda x, y: x + torch.tanh(y): INNER + 2 * WIDTH,
    }
    for behind, floats in ends.items():
        torch.manual_seed(0)
        layer = Mapped(behind)
        # And the state of random numbers: less than what the second map gives.
        assert 4 * 40 * floats <= kept_bytes(layer, selectively) < 4 * 40 * (floats + WIDTH)
        layers = nn.ModuleList([layer])
        for kept, again in zip(trained(layers, plainly), trained(layers, selectively), strict=True):
            assert torch.equal(kept, again)


class Attending(nn.Module):
    """What it ends with is attention, whose gradient needs what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, torch.tanh(heads), heads)
        return x + attended.transpose(1, 2).flatten(2)


def test_attention_at_the_end_is_kept_and_not_run_again() -> None:
    layers = nn.ModuleList([Attending()])
    for kept, again in zip(trained(layers, plainly), trained(layers, selectively), strict=True):
        assert torch.equal(kept, again)
    with Counted() as counter:
        selectively(layers[0], [torch.randn(4, 10, WIDTH, requires_grad=True)]).sum().backward()
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert counter.counts[attention] == counter.counts[f"{attention}_backward"] == 1


def test_what_is_changed_in_place_is_not_used_for_gradients() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.map(x).mul_(2.0))

    out = selectively(Changing(), [torch.randn(4, 10, WIDTH)])
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, 1))

    def forward(self, x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return found


def test_an_op_that_asks_for_gradients_itself_is_refused() -> None:
    with pytest.raises(RuntimeError, match="asks for gradients itself"):
        selectively(Forces(), [torch.randn(4, 10, WIDTH, requires_grad=True)])


def test_another_shape_the_second_time_is_refused() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map, self.calls = nn.Linear(WIDTH, WIDTH), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.sin(self.map(torch.cat([x] * self.calls)))

    out = selectively(Growing(), [torch.randn(4, 10, WIDTH)])
    with pytest.raises(RuntimeError, match="takes other shapes"):
        out.sum().backward()


def test_a_parameter_that_was_cast_for_an_op_before_is_not_taken_for_another_one() -> None:
    """The second layer's first map is the first layer's: autocast has it cast, and casts the other one alone;
    its second pass casts both.
    """
    first, second = Mapped(lambda x, y: x + y), Mapped(lambda x, y: x + torch.tanh(y))
    wide = nn.Linear(INNER, INNER)
    for layer in (first, second):
        layer.up, layer.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, INNER)
        layer.behind = lambda x, y: x + torch.tanh(wide(torch.tanh(y)))[..., :WIDTH]
    second.up = first.up
    layers = nn.ModuleList([first, second])
    for kept, again in zip(
        trained(layers, plainly, narrow=True), trained(layers, selectively, narrow=True), strict=True
    ):
        assert torch.equal(kept, again)


def test_parameters_cast_for_the_first_pass_are_not_cast_again() -> None:
    layer = Layer(0.0)
    x = torch.randn(4, 10, WIDTH, requires_grad=True)
    casts = {}
    for run in (plainly, selectively):
        with Counted() as counter, torch.autocast("cpu", torch.bfloat16):
            out = run(copy.deepcopy(layer), [x])
        with counter:
            out.float().sum().backward()
        casts[run] = counter.counts["_to_copy"]
    # Activations are cast again, six of them; none of the eight parameters of the four maps.
    assert casts[selectively] - casts[plainly] < 8
