"""What forward does between operators, and cannot be kept, is said in the words of who wrote it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from helpers.analysed import analysed
from helpers.logged import messages_logged
from spindle_cli.workload.types import Task, Workload

from .test_refusals import Net, of_forward, whole_of
from .toy import WIDTH, Block, Items


@pytest.mark.parametrize("method", ["__setitem__", "index_add_"])
def test_traced_values_written_into_a_constant(method: str) -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.block(x)
        made = torch.zeros(4, 8)
        if method == "index_add_":
            made.index_add_(0, label, x)
        else:
            made[label[0]] = x[0]
        return x.mean() + made.square().sum()

    message = of_forward(forward)
    assert (
        f"writes by {method}" in message and "float32 of shape (4, 8)" in message and "new_zeros" in message
    )


def test_an_instance_norm_with_running_statistics_before_an_operator() -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        return self.second(self.norm(self.block(x))).mean()

    whole = whole_of(forward, norm=nn.InstanceNorm1d(4, track_running_stats=True))
    assert "its forward changes 'running_mean'" in whole["second"]


@pytest.mark.parametrize("of", ["a parameter", "a value"])
def test_a_gradient_that_is_read(of: str) -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.block(x)
        gradient = self.block.norm.weight.grad if of == "a parameter" else x.grad
        return x.mean() if gradient is None else x.mean() * gradient.norm()

    message = of_forward(forward)
    assert "forward reads grad between operators" in message and "torch.autograd.grad" in message
    assert "test_refusals_of_glue.py:" in message


class OwnNorm(nn.Module):
    """A norm of the user's own over the statistics that it keeps."""

    def __init__(self, normalises: Callable[..., Tensor]) -> None:
        super().__init__()
        self.normalises = normalises
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.normalises(x, self.mean, self.var)


def _by_instance(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return functional.instance_norm(x, mean, var, use_input_stats=True)


def test_a_function_that_changes_buffers_before_an_operator() -> None:
    """Each share would move them by its own samples, and those are what evaluations and checkpoints take."""

    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        return self.second(self.norm(self.block(x))).mean()

    (why,) = whole_of(forward, norm=OwnNorm(_by_instance)).values()
    assert "'instance_norm', which leads to it, mixes the samples" in why
    assert "it changes a parameter or buffer" in why


@pytest.mark.parametrize(
    "normalises", [_by_instance, lambda x, mean, var: functional.batch_norm(x, mean, var, training=True)]
)
def test_a_function_that_changes_buffers_behind_the_operators(normalises: Callable[..., Tensor]) -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        return self.norm(self.second(self.block(x))).square().mean()

    data, net = Items(x=(4, WIDTH), label=((), 3)), Net(forward, norm=OwnNorm(normalises))
    graph = analysed(Workload("w", [Task("t", net, 4, data)], operators=(Block,))).tasks["t"]
    assert [(op.coupled, op.changes) for op in graph.ops if op.is_loss] == [(True, ("norm.mean", "norm.var"))]


class Counting(nn.Module):
    """Keeps a running mean of what it is given, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return 2 * x


UNUSED: dict[str, tuple[nn.Module, tuple[type[nn.Module], ...], str]] = {
    "glue": (nn.BatchNorm1d(4), (Block,), "'norm.running_mean'"),
    "an operator with a norm": (
        nn.Sequential(nn.BatchNorm1d(4)),
        (Block, nn.Sequential),
        "'norm.0.running_mean'",
    ),
    "an operator with a buffer": (Counting(), (Block, Counting), "'norm.mean'"),
    "a function": (OwnNorm(_by_instance), (Block,), "a parameter or buffer"),
}


@pytest.mark.parametrize("kind", UNUSED)
def test_what_changes_buffers_and_gives_nothing_that_the_loss_is_made_of(kind: str) -> None:
    """Plain PyTorch runs it; here nobody would."""
    module, operators, changed = UNUSED[kind]

    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.block(x)
        with torch.no_grad():
            self.norm(x)
        return self.second(x).square().mean()

    message = of_forward(forward, operators=operators, norm=module)
    assert f"so that nobody would run it; but it changes {changed}" in message
    assert "loss + 0 * unused.detach().mean()" in message

    def used(self: Net, x: Tensor, label: Tensor) -> Tensor:
        """As the message says."""
        x = self.block(x)
        unused = self.norm(x)
        return self.second(x).square().mean() + 0 * unused.detach().mean()

    whole_of(used, operators=operators, norm=module.train())


def test_what_changes_nothing_and_nobody_uses_is_left_out() -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.block(x)
        self.norm(x), self.head(x)
        return self.second(x).square().mean()

    whole_of(forward, norm=nn.BatchNorm1d(4).eval(), head=nn.Linear(WIDTH, 2))


def test_torch_prints_nothing_of_what_is_tried() -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        return self.block(x).square().mean((1, 2)).topk(4).values.mean()

    data = Items(x=(4, WIDTH), label=((), 3))
    with messages_logged() as messages:
        analysed(Workload("w", [Task("t", Net(forward), 4, data)], operators=(Block,)))
    assert not messages


@pytest.mark.parametrize("detaches", [False, True])
def test_what_a_hook_has_seen_of_an_operator(detaches: bool) -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.block.register_forward_hook(
            lambda _module, _given, made: seen.append(made.detach() if detaches else made)
        )
        x = self.block(x)
        handle.remove()
        return self.second(x).mean() + seen[0].mean() * x.mean()

    assert "takes what a hook has seen of an operator" in of_forward(forward)


class DecidesByValues(nn.Module):
    """A layer that can be looked at with real samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Twice as much of what is positive on the whole."""
        return self.layer(2 * x if x.sum().item() > 0 else x)


def test_real_tensors_that_a_hook_has_seen_are_no_constants() -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.decides.register_forward_hook(lambda _module, _given, made: seen.append(made.detach()))
        x = self.decides(x)
        handle.remove()
        return self.second(x).mean() + seen[0].mean() * x.mean()

    operators = (Block, DecidesByValues)
    task = Task("t", Net(forward, decides=DecidesByValues()), 4, Items(x=(4, WIDTH), label=((), 3)))
    (op,) = analysed(Workload("w", [task], operators=operators)).tasks["t"].ops
    assert not op.graph.find_nodes(op="get_attr")
