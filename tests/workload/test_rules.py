"""Which code is known to act on samples one by one, and where the rows of a sample then are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.analysis.rules.types import WHOLE, Batch, Mixed, Reduced, State
from spindle_cli.analysis.splitting.examine import Findings, examine
from spindle_cli.analysis.tracing.observe import Observer

SIZES = (3, 5, 8, 1)


def findings(code: Callable[..., Any], *shapes: tuple[int, ...]) -> Findings:
    """Of code that takes tensors of these shapes, the first dimension being the batch's."""
    given = shapes or ((4, 6),)
    inputs = [
        (tuple(torch.empty(size, *shape, device="meta").requires_grad_() for shape in given), {})
        for size in SIZES
    ]
    module = code if isinstance(code, nn.Module) else None
    return examine(code, inputs, [Batch(0)] * len(given), SIZES, Observer(), module)


def state_of(code: Callable[..., Any], *shapes: tuple[int, ...]) -> State:
    found = findings(code, *shapes)
    return found.why_not or found.states[0]


def whole_numbers(x: Tensor, below: int = 4) -> Tensor:
    return x.detach().abs().long() % below


ROWS: dict[str, tuple[Callable[..., Any], Batch]] = {
    "activation": (lambda x: functional.gelu(x) * 2 + 1, Batch(0)),
    "residual": (lambda x: x + x.mean(-1, keepdim=True), Batch(0)),
    "one mask for all": (lambda x: x.masked_fill(torch.ones(4, 6).triu(1).bool(), -1e9), Batch(0)),
    "rows merged": (lambda x: x.reshape(-1, 6), Batch(0, 1, 4)),
    "rows merged and back": (lambda x: x.reshape(-1, 6).view(x.shape[0], 4, 6), Batch(0)),
    "time first": (lambda x: x.transpose(0, 1), Batch(1)),
    "time first, merged": (lambda x: x.transpose(0, 1).reshape(-1, 6), Batch(0, 4, 1)),
    "time first, merged and back": (
        lambda x: (x.transpose(0, 1).reshape(-1, 6) * 2).view(4, -1, 6).transpose(0, 1),
        Batch(0),
    ),
    "heads with the batch": (
        lambda x: x.view(x.shape[0], 4, 2, 3).transpose(1, 2).reshape(-1, 4, 3),
        Batch(0, 1, 2),
    ),
    "flattened": (lambda x: x.flatten(1), Batch(0)),
    "channels behind": (lambda x: x.permute(1, 2, 0), Batch(2)),
    "copies of the batch": (lambda x: x.repeat(2, 1, 1), Batch(0, 2, 1)),
    "rows twice": (lambda x: x.repeat_interleave(2, 0), Batch(0, 1, 2)),
    "two views": (lambda x: torch.cat([x, -x]), Batch(0, 2, 1)),
    "two views, side by side": (lambda x: torch.stack([x, -x], 1).flatten(0, 1), Batch(0, 1, 2)),
    "class token": (
        lambda x: torch.cat([torch.zeros(1, 1, 6).expand(x.shape[0], -1, -1), x], 1),
        Batch(0),
    ),
    "first token": (lambda x: x[:, 0], Batch(0)),
    "every second token": (lambda x: x[:, ::2], Batch(0)),
    "token of each sample": (
        lambda x: x[torch.arange(x.shape[0]), whole_numbers(x[:, 0, 0])],
        Batch(0),
    ),
    "gather": (lambda x: x.gather(1, whole_numbers(x)), Batch(0)),
    "one hot": (lambda x: functional.one_hot(whole_numbers(x[..., 0]), 5), Batch(0)),
    "scatter": (lambda x: torch.zeros_like(x).scatter_(2, whole_numbers(x), 1.0), Batch(0)),
    "masked assignment": (lambda x: _assigned(x), Batch(0)),
    "softmax over tokens": (lambda x: x.softmax(1), Batch(0)),
    "sorted tokens": (lambda x: x.sort(1)[0], Batch(0)),
    "topk of tokens": (lambda x: x.topk(2, dim=1)[1], Batch(0)),
    "turned tokens": (lambda x: x.flip(1).roll(1, 2), Batch(0)),
    "padded": (lambda x: functional.pad(x, (1, 1)), Batch(0)),
    "padded, the batch by nothing": (lambda x: functional.pad(x, (1, 1, 0, 2, 0, 0)), Batch(0)),
    "transform of more entries": (lambda x: torch.fft.irfft(torch.fft.rfft(x, n=12), n=12), Batch(0)),
    "picked by repeated numbers": (
        lambda x: x[
            torch.arange(x.shape[0]).view(-1, 1).repeat(1, 3), whole_numbers(x[:, 0, :3].contiguous())
        ],
        Batch(0),
    ),
    "variance": (lambda x: torch.var_mean(x, 1)[0], Batch(0)),
    "similarities of tokens": (lambda x: x @ x.transpose(1, 2), Batch(0)),
    "einsum": (lambda x: torch.einsum("btc,bsc->bts", x, x), Batch(0)),
    "bilinear": (lambda x: functional.bilinear(x[:, 0], x[:, 1], torch.ones(5, 6, 6)), Batch(0)),
    "distances": (lambda x: torch.cdist(x, x), Batch(0)),
    "noise": (lambda x: x + torch.randn_like(x), Batch(0)),
    "rows of ones": (lambda x: torch.ones(x.shape[0], 2), Batch(0)),
    "flat kernel": (
        lambda x: functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
        Batch(0),
    ),
    "convolution": (lambda x: functional.conv1d(x, torch.ones(2, 4, 3)), Batch(0)),
    "instance norm": (lambda x: functional.instance_norm(x), Batch(0)),
    "group norm": (lambda x: functional.group_norm(x, 2), Batch(0)),
    "fixed statistics": (
        lambda x: functional.batch_norm(x, torch.zeros(4), torch.ones(4), training=False),
        Batch(0),
    ),
    "pooling": (lambda x: functional.adaptive_avg_pool1d(x, 2), Batch(0)),
    "bags of numbers": (
        lambda x: functional.embedding_bag(whole_numbers(x[..., 0]), torch.ones(4, 5), mode="mean"),
        Batch(0),
    ),
    "bags of weighted numbers": (
        lambda x: functional.embedding_bag(
            whole_numbers(x[..., 0]), torch.ones(4, 5), mode="sum", per_sample_weights=x[..., 1]
        ),
        Batch(0),
    ),
    "own attention": (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), Batch(0)),
    "recurrent": (lambda x: nn.GRU(6, 5, batch_first=True, device="meta")(x)[0], Batch(0)),
}


def _assigned(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 0] = 0.0
    x[:, 0] = 1.0
    return x


@pytest.mark.parametrize("name", ROWS)
def test_what_acts_on_samples_one_by_one_is_followed(name: str) -> None:
    code, state = ROWS[name]
    assert state_of(code) == state


MIXES: dict[str, Callable[..., Any]] = {
    "mean taken off": lambda x: x - x.mean(0),
    "mean taken off in place": lambda x: x.clone().sub_(x.mean(0)),
    "mean written into a part": lambda x: _mean_written(x),
    "mean written into a part of what is the same for all": lambda x: _mean_kept(x),
    "first half": lambda x: x.chunk(2, 0)[0],
    "second sample": lambda x: x[1],
    "all but the last": lambda x: x[: x.shape[0] - 1],
    "one of two": lambda x: x[::2],
    "two largest": lambda x: x.topk(2, dim=0)[0],
    "turned by two": lambda x: x.roll(2, 0),
    "turned as one row": lambda x: x.roll(1),
    "backwards": lambda x: x.flip(0),
    "backwards by number": lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)],
    "next sample by number": lambda x: x[torch.arange(x.shape[0]) - 1],
    "number as value": lambda x: x + torch.arange(x.shape[0]).view(-1, 1, 1),
    "number as index of a table": lambda x: torch.ones(99, 6)[torch.arange(x.shape[0])],
    "numbers again and again": lambda x: x[torch.arange(x.shape[0]).repeat(2)],
    "repeated numbers as value": lambda x: x + torch.arange(x.shape[0]).view(-1, 1, 1).repeat(1, 4, 6),
    "padded by a sample": lambda x: functional.pad(x, (0, 0, 0, 0, 1, 0)),
    "picked by strided numbers": lambda x: x[torch.arange(0, 2 * x.shape[0], 2)],
    "picked by values": lambda x: x[whole_numbers(x[:, 0, 0])],
    "products over the batch, and more": lambda x: (x.flatten(1).T @ x.flatten(1)).square(),
    "products over the batch, added": lambda x: torch.addmm(torch.ones(24, 24), x.flatten(1).T, x.flatten(1)),
    "bags by another sample's weights": lambda x: functional.embedding_bag(
        whole_numbers(x[..., 0]), torch.ones(4, 5), mode="sum", per_sample_weights=x[..., 1].flip(0)
    ),
    "shuffled": lambda x: x[torch.randperm(x.shape[0])],
    "sorted": lambda x: x.sort(0)[0],
    "running sum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "norm": lambda x: functional.normalize(x, dim=0),
    "smallest": lambda x: x - x.min(0)[0],
    "variance": lambda x: torch.var_mean(x, 0)[0],
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "batch norm without statistics": lambda x: functional.batch_norm(x, None, None, training=False),
    "batch in the norm": lambda x: functional.layer_norm(x, x.shape),
    "similarities": lambda x: x.flatten(1) @ x.flatten(1).T,
    "scaled by the batch's size": lambda x: x / x.shape[0],
    "scaled by one less": lambda x: x.clone().div_(x.shape[0] - 1),
    "another for few samples": lambda x: x * 2 if x.shape[0] > 4 else x,
    "another number for few samples": lambda x: x * (2.0 if x.shape[0] > 4 else 3.0),
    "another for many samples": lambda x: x.flip(0) if x.shape[0] > 6 else x,
    "another shape for one sample": lambda x: x[:, 0, 0].squeeze(),
    "half as many rows": lambda x: x.reshape(x.shape[0] // 2, -1, 6),
    "rows cut at another place": lambda x: x.reshape(2, -1),
    "different orders": lambda x: x.reshape(-1, 6) + x.transpose(0, 1).reshape(-1, 6),
    "a queue behind": lambda x: torch.cat([x, torch.ones(7, 4, 6)]),
    "attention": nn.TransformerEncoderLayer(6, 2, 8),
    "time first in a recurrent layer": lambda x: nn.GRU(6, 5, device="meta")(x)[0],
    "gradient by how often": lambda x: functional.embedding(
        whole_numbers(x), torch.ones(4, 3), scale_grad_by_freq=True
    ),
    "unknown": lambda x: x.renorm(2, 0, 1.0),
}


def _mean_written(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, 1:] = x[:, 1:]
    out[:, 0] = x[:, 0] - x[:, 0].mean(0)
    return out


def _mean_kept(x: Tensor) -> Tensor:
    kept = torch.zeros(2, 6)
    kept[0].add_(x.mean((0, 1)))
    return x + kept[0]


@pytest.mark.parametrize("name", MIXES)
def test_what_is_not_known_to_act_on_samples_one_by_one_mixes_them(name: str) -> None:
    assert isinstance(state_of(MIXES[name]), Mixed)


@pytest.mark.parametrize(
    "function",
    [
        *(nn.Softplus(), nn.ELU(), nn.SELU(), nn.CELU(), nn.LeakyReLU(), nn.Hardtanh(), nn.Hardswish()),
        *(nn.Hardsigmoid(), nn.Softshrink(), nn.Hardshrink(), nn.SiLU(), nn.Softmax(-1), nn.LogSoftmax(1)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_gradients_that_forward_asks_for_are_followed(function: nn.Module) -> None:
    def each(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energies = function(x).sum((1, 2))
        (found,) = torch.autograd.grad(energies, x, torch.ones_like(energies), create_graph=True)
        return found

    assert state_of(each) == Batch(0)


def test_the_gradient_of_a_sum_over_samples_is_each_samples_own_and_that_of_a_mean_is_not() -> None:
    def gradient(x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(total(x.pow(3)), x, create_graph=True)[0]

    assert state_of(lambda x: gradient(x, torch.sum)) == Batch(0)
    assert isinstance(state_of(lambda x: gradient(x, torch.mean)), Mixed)
    assert isinstance(state_of(lambda x: gradient(x, lambda e: e.sum().square())), Mixed)


def test_the_gradient_of_a_softmax_over_samples_mixes_them() -> None:
    def over_samples(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(x.softmax(0), x, torch.ones_like(x))
        return found

    assert isinstance(state_of(over_samples), Mixed)


def test_it_is_said_where() -> None:
    found = state_of(MIXES["mean taken off"])
    assert isinstance(found, Mixed) and found.place is not None and "test_rules.py" in found.place


LOSSES: dict[str, tuple[Callable[..., Any], State | None]] = {
    "mean": (lambda x: x.pow(2).mean(), Reduced(0)),
    "sum": (lambda x: x.pow(2).sum(), Reduced(1)),
    "products over the batch": (lambda x: x.flatten(1).T @ x.flatten(1), Reduced(1)),
    "sum over the batch's size": (lambda x: x.sum() / x.shape[0], Reduced(0)),
    "sum over all entries": (lambda x: x.sum() / x.numel(), Reduced(0)),
    "two means": (lambda x: x.mean() + 0.5 * x.abs().mean() + 1.0, Reduced(0)),
    "means added up in place": (lambda x: torch.zeros(()).add_(x.mean()).add_(x.abs().mean()), Reduced(0)),
    "mean and sum": (lambda x: x.mean() + x.sum(), None),
    "one more in a sum": (lambda x: x.sum() + 1, None),
    "root": (lambda x: x.mean().sqrt(), None),
    "product": (lambda x: x.mean() * x.abs().mean(), None),
    "of the weights": (lambda x: torch.ones(3).sum(), WHOLE),
    "squares": (lambda x: functional.mse_loss(x, x * 2), Reduced(0)),
    "differences broadcast": (lambda x: (x[:, :1, 0] - x[:, 0, 0]).abs().mean(), None),
    "labels that count": (
        lambda x: functional.cross_entropy(x.flatten(1), whole_numbers(x[:, 0, 0])),
        Reduced(0, counted=True),
    ),
    "sum over labels": (
        lambda x: functional.cross_entropy(x.flatten(1), whole_numbers(x[:, 0, 0]), reduction="sum"),
        Reduced(1),
    ),
    "scores": (
        lambda x: functional.binary_cross_entropy_with_logits(x, x, pos_weight=torch.ones(6)),
        Reduced(0),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_sums_and_means_over_samples_are_known(name: str) -> None:
    code, state = LOSSES[name]
    found = state_of(code)
    assert isinstance(found, Mixed) if state is None else found == state


class Keeps(nn.Module):
    def __init__(self, keep: Callable[..., Any]) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.step = 0
        self.cache: Tensor | None = None
        self.seen: list[int] = []
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        return x * 2


KEEPS: dict[str, tuple[Callable[..., Any], bool]] = {
    "moving average": (lambda self, x: self.average.mul_(0.9), False),
    "moving average, assigned": (lambda self, x: setattr(self, "average", self.average * 0.9), False),
    "a part of a buffer": (lambda self, x: self.average[:2].add_(1), False),
    "a counter": (lambda self, x: setattr(self, "step", self.step + 1), True),
    "a counter that is read": (lambda self, x: setattr(self, "step", 1 if self.step else 2), False),
    "a list": (lambda self, x: self.seen.append(1), True),
    "a cache": (lambda self, x: setattr(self, "cache", torch.ones(6)), True),
    "nothing": (lambda self, x: None, True),
}


@pytest.mark.parametrize("name", KEEPS)
def test_what_forward_changes_in_its_module_forbids_to_split_it_and_is_undone(name: str) -> None:
    keep, is_split = KEEPS[name]
    module = Keeps(keep)
    found = findings(module)
    assert (found.why_not is None) == is_split
    assert found.states == (Batch(0),)
    assert (module.step, module.cache, module.seen) == (0, None, [])
    assert module.average.device.type == "cpu" and not module.average.any()


def test_what_fails_for_one_sample_is_not_split() -> None:
    def code(x: Tensor) -> Tensor:
        assert x.shape[0] > 1
        return x

    assert "fails for a batch of 1" in str(findings(code).why_not)
