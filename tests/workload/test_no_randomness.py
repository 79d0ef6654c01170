"""Without chance every draw is its mean, dropout drops nothing, and results do not depend on shares."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spindle_cli.training.precision import NoRandomness, constants_in

aten = torch.ops.aten

SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": lambda x: functional.dropout(x, 0.3),
    "of one half, which is torch's default": lambda x: functional.dropout(x, 0.5),
    "a module": nn.Dropout(0.3),
    "of channels": nn.Dropout1d(0.4),
    "torch's own": lambda x: torch.dropout(x, 0.2, True),
    "noise": lambda x: x + torch.randn_like(x),
    "a mask": lambda x: x.masked_fill(torch.rand(x.shape) < 0.15, 0.0),
    "an order": lambda x: x[torch.randperm(len(x))],
}


@pytest.mark.parametrize("name", SAME)
def test_what_only_chance_changes_stays(name: str) -> None:
    x = torch.randn(4, 6, 8, dtype=torch.float64, requires_grad=True)
    with NoRandomness():
        y = SAME[name](x)
    torch.testing.assert_close(y, x, rtol=0, atol=1e-15)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))


# Kernels that drop and scale at once have their rate in the backward pass as well, as all dropout on CUDA.
FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "a function of torch": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "named": lambda x: torch.native_dropout(x, train=True, p=0.5)[0],
    "an operation": lambda x: aten.native_dropout(x, 0.5, True)[0],
    "one form of it": lambda x: aten.native_dropout.default(x, 0.5, train=True)[0],
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_rate_is_gone_from_the_backward_pass_too(name: str, is_inside: bool) -> None:
    x = torch.ones(8, requires_grad=True)
    with NoRandomness() as chance:
        y = FUSED[name](x)
        if is_inside:
            y.sum().backward()
    if not is_inside:
        y.sum().backward()
    assert y.tolist() == [1.0] * 8
    assert x.grad is not None and x.grad.tolist() == [1.0] * 8
    assert chance.replaced


def test_a_rate_that_no_function_was_called_with_is_left_out_where_it_is_computed() -> None:
    x = torch.ones(8)
    with NoRandomness() as chance, torch._C.DisableTorchFunction():
        y = functional.dropout(x, 0.5)
    assert y.tolist() == [1.0] * 8
    assert chance.replaced


def test_slopes_that_are_drawn_are_those_of_evaluation() -> None:
    x = -torch.ones(2, requires_grad=True)
    with NoRandomness() as chance:
        y = functional.rrelu(x, 0.25, 0.75, training=True)
        module = nn.RReLU(0.25, 0.75)(x)
    assert y.tolist() == module.tolist() == [-0.5, -0.5]
    assert chance.replaced


def test_a_packed_recurrent_layer_is_as_in_evaluation() -> None:
    recurrent = nn.GRU(3, 4, 2, dropout=0.5)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 3), torch.tensor([5, 2]))
    with NoRandomness() as chance:
        after = recurrent(packed)[0].data
    assert chance.replaced
    torch.testing.assert_close(after, recurrent.eval()(packed)[0].data, rtol=0, atol=0)


def test_norms_keep_their_p_and_batch_norms_their_mode() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    with NoRandomness() as chance:
        assert torch.norm(x, 2).item() == torch.norm(x, p=2).item() == 5.0
        assert functional.normalize(x, p=2.0)[0].tolist() == pytest.approx([0.6, 0.8])
        assert torch.cdist(x, x, p=1.0)[0].tolist() == [0.0, 7.0]
        normed = functional.batch_norm(x, None, None, training=True)
    assert normed[:, 1].tolist() == pytest.approx([1.0, -1.0], abs=1e-5)
    assert not chance.replaced


def test_what_drops_nothing_replaces_nothing() -> None:
    with NoRandomness() as chance:
        functional.dropout(torch.ones(2), 0.0)
    assert not chance.replaced


def test_attention_and_recurrent_layers_are_as_in_evaluation() -> None:
    x = torch.randn(3, 5, 8)
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    recurrent = nn.LSTM(8, 8, 2, dropout=0.5)
    with NoRandomness():
        attended = attention(x, x, x, need_weights=False)[0]
        direct = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        after = recurrent(x)[0]
    torch.testing.assert_close(attended, attention.eval()(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(direct, functional.scaled_dot_product_attention(x, x, x))
    torch.testing.assert_close(after, recurrent.eval()(x)[0])


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda: torch.rand(2), [0.5, 0.5]),
        (lambda: torch.empty(2).uniform_(2, 4), [3, 3]),
        (lambda: torch.randn(2), [0, 0]),
        (lambda: torch.empty(2).normal_(1, 2), [1, 1]),
        (lambda: torch.normal(torch.tensor([3.0, 4.0]), 1.0), [3, 4]),
        (lambda: torch.randint(3, 9, (2,)), [3, 3]),
        (lambda: torch.randint(9, (2,)), [0, 0]),
        (lambda: torch.randperm(3), [0, 1, 2]),
        (lambda: torch.bernoulli(torch.tensor([0.1, 0.9])), [0.1, 0.9]),
        (lambda: torch.empty(2).bernoulli_(0.25), [0.25, 0.25]),
    ],
)
def test_draws_are_means(draw: Callable[[], Tensor], expected: list[float]) -> None:
    with NoRandomness():
        assert draw().tolist() == pytest.approx(expected)


def test_what_is_computed_again_is_the_same() -> None:
    x = torch.randn(64, requires_grad=True)
    with NoRandomness():
        y = checkpoint(lambda t: functional.dropout(t, 0.5).square(), x, use_reentrant=False)
        y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize("walk", ["method", "function", "gradients"])
def test_a_fused_rate_is_gone_where_it_is_computed_again(walk: str) -> None:
    x = torch.ones(8, requires_grad=True)
    with NoRandomness():
        y = checkpoint(lambda t: torch.native_dropout(t, 0.5, True)[0].square(), x, use_reentrant=False).sum()
        if walk == "gradients":
            (found,) = torch.autograd.grad(y, x)
        else:
            y.backward() if walk == "method" else torch.autograd.backward(y)
            assert x.grad is not None
            found = x.grad
    assert found.tolist() == [2.0] * 8


def test_two_modes_hold_together_in_a_backward_pass() -> None:
    """As in a verification in float64: casts stay wide, and rates 0."""
    x = torch.full((8,), 1 + 1e-12, dtype=torch.float64, requires_grad=True)
    with constants_in(torch.float64), NoRandomness():
        y = checkpoint(lambda t: functional.dropout(t.float(), 0.5).square(), x, use_reentrant=False)
        y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())


def test_threads_that_take_turns_leave_torchs_engine_as_it_was() -> None:
    """The first to begin a backward pass may be the first to end it, with another one's still under way."""
    engine = torch.autograd._engine_run_backward
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    found: dict[str, list[float]] = {}

    def pass_with(name: str, tell: Callable[[], None], awaited: threading.Event) -> None:
        x = torch.ones(2, requires_grad=True)

        def again(t: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() != -1:  # in the backward pass
                tell()
                awaited.wait(60)
            return torch.native_dropout(t, 0.5, True)[0] * t

        with NoRandomness():
            checkpoint(again, x, use_reentrant=False).sum().backward()
        assert x.grad is not None
        found[name] = x.grad.tolist()

    def first() -> None:
        pass_with("first", first_is_in.set, second_is_in)
        first_is_out.set()

    def second() -> None:
        first_is_in.wait(60)
        pass_with("second", second_is_in.set, first_is_out)

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"first": [2.0, 2.0], "second": [2.0, 2.0]}
    assert torch.autograd._engine_run_backward is engine


def test_weights_of_a_loss_are_handed_on() -> None:
    x, weight = torch.ones(2), torch.tensor([1.0, 3.0])
    with NoRandomness():
        loss = functional.l1_loss(x, torch.zeros(2), reduction="sum", weight=weight)
    assert loss.item() == 4.0


def test_afterwards_chance_is_back() -> None:
    with NoRandomness():
        pass
    assert functional.dropout(torch.ones(1000), 0.5).min() == 0


def test_operators_of_python_around_functions_of_c_are_computed() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with NoRandomness():
        assert (x**2.0 - 2.0**x).tolist() == [-1.0, 0.0]
