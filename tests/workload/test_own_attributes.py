"""What a forward keeps on a module for itself is a value like any other; if another could see it, refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import AffineTransform, StudentT, TransformedDistribution

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import Batches
from spindle_cli.workload.types import Task, Workload

from .shares import gradients_of, run_plain, run_shares
from .toy import WIDTH, Block, Items


class Doubles(Items):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value.double() for name, value in super().__getitem__(index).items()}


class Reversible(nn.Module):
    """Reversible instance normalisation as its authors have it: what one call finds, the next one uses."""

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            self.mean = x.mean(1, keepdim=True).detach()
            self.stdev = (x.var(1, keepdim=True) + 1e-5).sqrt()
            return (x - self.mean) / self.stdev
        return x * self.stdev + self.mean


class Operator(nn.Module):
    """A layer that undoes the normalisation itself."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.block = shared, Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * (2.0 if hasattr(self.shared, "mean") else 1.0)


class Net(nn.Module):
    def __init__(self, shared: nn.Module, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.shared, self.block, self.run = shared, Block(), run
        if run is lets_an_operator_look:
            self.other = Operator(shared)
        if run in (computes_a_weight, looks_into_a_normed_layer):
            self.normed = Normed()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def workload(*runs: Callable[..., Tensor]) -> Workload:
    torch.manual_seed(0)
    shared = Reversible()
    nets = [Net(shared, run).double() for run in runs]
    tasks = [Task(f"t{number}", net, 6, Doubles(x=(4, WIDTH))) for number, net in enumerate(nets)]
    return Workload("w", tasks, (Operator,) if lets_an_operator_look in runs else (Block,))


def reverses(self: Net, x: Tensor) -> Tensor:
    y = self.block(self.shared(self.block(x), "norm"))
    return (self.shared(y, "denorm") - x[:, :1]).pow(2).mean()


def looks_first(self: Net, x: Tensor) -> Tensor:
    return reverses(self, x - self.shared.mean if hasattr(self.shared, "mean") else x)


def looks_alone(self: Net, x: Tensor) -> Tensor:
    return (self.block(x) * (2.0 if hasattr(self.shared, "mean") else 1.0)).pow(2).mean()


def lets_an_operator_look(self: Net, x: Tensor) -> Tensor:
    return self.other(self.shared(x, "norm")).pow(2).mean()


def takes_sizes_of_the_batch(self: Net, x: Tensor) -> Tensor:
    order = torch.arange(4.0, dtype=torch.float64)
    weights = order.unsqueeze(0).expand(x.shape[0], -1) + order.repeat(x.size(0), 1)
    return (self.block(x) * weights.unsqueeze(-1)).mean()


def transforms_a_distribution(self: Net, x: Tensor) -> Tensor:
    scaled = AffineTransform(0.0, x.abs().mean(1, keepdim=True) + 1)
    made = TransformedDistribution(StudentT(4.0, self.block(x), 1.0), [scaled])
    return -made.log_prob(x).mean()


class Normed(nn.Module):
    """A layer of one's own, which is traced into, whose weight a hook of torch sets ahead of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        nn.utils.weight_norm(self)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def computes_a_weight(self: Net, x: Tensor) -> Tensor:
    return (self.block(self.normed(x)) - self.normed(x)).pow(2).mean()


def looks_into_a_normed_layer(self: Net, x: Tensor) -> Tensor:
    """Which leaves what it has computed on itself, beside the weight that the hook sets."""
    kept = getattr(self.normed, "kept", None)
    self.normed.kept = self.normed(self.block(x))
    return (self.normed.kept if kept is None else self.normed.kept - kept).pow(2).mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "run", [reverses, takes_sizes_of_the_batch, transforms_a_distribution, computes_a_weight]
)
def test_what_a_forward_makes_for_itself_is_split_over_the_batch_and_gives_the_same(
    run: Callable[..., Tensor],
) -> None:
    made = workload(run, run)
    for traced in analysed(made).tasks.values():
        assert not any(op.coupled for op in traced.ops)
        batch = Batches(traced.task, seed=0).rows(0, 0, 6)
        parameters = dict(traced.task.module.named_parameters())
        shared = run_shares(traced, batch, dict.fromkeys(range(9), 4))
        plain = run_plain(traced.task, batch)
        torch.testing.assert_close(shared, plain, rtol=1e-12, atol=0)
        expected = gradients_of(plain, parameters)
        for name, found in gradients_of(shared, parameters).items():
            torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        ([looks_first], "sets self.mean"),  # from the second step on it would see the step before
        ([reverses, looks_alone], "asks for self.mean of Reversible, which another forward sets"),
        ([looks_alone, reverses], "sets self.mean"),  # the same, from the second step on
        ([lets_an_operator_look], "sets self.mean"),  # it would look at the module itself, which has none
        ([looks_into_a_normed_layer], "sets self.kept"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_an_attribute_that_another_forward_could_see_is_refused(
    runs: list[Callable[..., Tensor]], found: str
) -> None:
    with pytest.raises(WorkloadError, match=found):
        analysed(workload(*runs))


class Hooked(nn.Module):
    """Notes what its map gives, by a hook that it sets in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not self.map._forward_hooks:
            self.map.register_forward_hook(lambda _, __, result: None)
        y: Tensor = self.map(x)
        return y.square().mean((1, 2))


class HookedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.hooked = Block(), Hooked()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.hooked(self.block(x))
        return y.mean()


def test_hooks_that_a_forward_sets_are_gone_when_it_was_looked_at() -> None:
    net = HookedNet()
    analysed(Workload("w", [Task("t", net, 4, Items(x=(3, WIDTH)))], operators=(Block, Hooked)))
    assert not net.hooked.map._forward_hooks
