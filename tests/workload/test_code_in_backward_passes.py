"""Hooks on gradients and backward passes that users write are split where they keep samples apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.operators.tensor_parallel import describe_ways, layer_split
from spindle_cli.workload.types import Task, Workload

WIDTH = 4
Hook = Callable[[Tensor], Any]


class Layer(nn.Module):
    """Applies a function beside its linear layer."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.function is None else self.function(x, self.linear.weight)
        return x + torch.tanh(self.linear(y))


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), *layers])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))}


def reasons(*layers: nn.Module) -> list[str | None]:
    """Why layers behind a first one are not split over the batch."""
    classes = tuple(dict.fromkeys((Layer, *map(type, layers))))
    graph = analysed(Workload("w", [Task("t", Net(*layers), 4, Rows())], classes))
    return [op.coupled_because for op in graph.tasks["t"].ops[1:]]


def in_place(gradient: Tensor) -> None:
    gradient.div_(gradient.norm())


def hooked(hook: Hook, *, leaf: bool = False) -> Layer:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = weight * 1.0 if leaf else x * 1.0
        y.register_hook(hook)  # type: ignore[no-untyped-call]
        return x + y.mean() if leaf else y

    return Layer(function)


APART: list[Hook] = [
    lambda g: 0.1 * g,
    lambda g: g.clamp(-0.1, 0.1),
    lambda g: g / g.norm(dim=1, keepdim=True),
    torch.nan_to_num,
    lambda _: None,
]
COUPLED: list[Hook] = [
    lambda g: g / g.norm(),
    lambda g: g - g.mean(0),
    lambda g: g * len(g),
    lambda g: g / g.norm() if g.norm() > 1 else g,
    lambda g: g.flip(0),
    in_place,
]


@pytest.mark.parametrize("hook", APART)
def test_a_hook_that_treats_samples_alone_keeps_no_layer_whole(hook: Hook) -> None:
    assert reasons(hooked(hook)) == [None]


@pytest.mark.parametrize("hook", COUPLED)
def test_a_hook_that_couples_samples_keeps_its_layer_whole(hook: Hook) -> None:
    (why,) = reasons(hooked(hook))
    assert why is not None and "its backward pass" in why and "test_code_in_backward_passes.py:" in why


@pytest.mark.parametrize(("hook", "is_split"), [(lambda g: 0.5 * g, True), (lambda g: g / g.norm(), False)])
def test_what_is_the_same_for_all_samples_has_a_sum_for_a_gradient(hook: Hook, is_split: bool) -> None:
    (why,) = reasons(hooked(hook, leaf=True))
    assert (why is None) is is_split


class Own(torch.autograd.Function):
    """A product with a weight, and what is made of its two gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, of_x: Hook, of_weight: Hook) -> Tensor:
        y = (x @ weight.t()).exp()
        ctx.save_for_backward(x, weight, y)
        ctx.of_x, ctx.of_weight = of_x, of_weight
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, y = ctx.saved_tensors
        g = gradients[0] * y
        return ctx.of_x(g @ weight), ctx.of_weight(g.t() @ x), None, None


def same(gradient: Tensor) -> Tensor:
    return gradient


def normed(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


@pytest.mark.parametrize(
    ("of_x", "of_weight", "is_split"),
    [(same, same, True), (torch.neg, same, True), (normed, same, False), (same, normed, False)],
)
def test_a_backward_of_somebodys_own_is_followed(of_x: Hook, of_weight: Hook, is_split: bool) -> None:
    (why,) = reasons(Layer(lambda x, weight: Own.apply(x, weight, of_x, of_weight)))  # type: ignore[no-untyped-call]
    assert (why is None) is is_split
    assert why is None or "in its backward pass" in why


class Saved(torch.autograd.Function):
    """Computes in its backward with what its forward has given, which autograd keeps as another object."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: Hook) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.made = made
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.made(ctx.saved_tensors[0]), None


@pytest.mark.parametrize(("made", "is_split"), [(same, True), (lambda y: y.mean(0), False)])
def test_what_a_backward_has_saved_is_of_the_batch(made: Hook, is_split: bool) -> None:
    (why,) = reasons(Layer(lambda x, _: Saved.apply(x, made)))  # type: ignore[no-untyped-call]
    assert (why is None) is is_split


class Watched(Layer):
    """Has a hook on the gradients of a part, or of the node of a graph."""

    def __init__(self, kind: str, hook: Hook) -> None:
        super().__init__()
        self.kind, self.hook = kind, hook
        self.part = nn.Linear(WIDTH, WIDTH)
        if kind == "layer":
            self.part.register_full_backward_hook(lambda _, given, __: tuple(map(hook, given)))
        elif kind == "layer, before":
            self.part.register_full_backward_pre_hook(lambda _, taken: tuple(map(hook, taken)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(super().forward(x))
        if self.kind == "node":
            y.grad_fn.register_prehook(lambda taken: tuple(map(self.hook, taken)))
        elif self.kind == "node, behind":
            y = torch.sin(y)
            y.grad_fn.register_hook(lambda given, _: tuple(map(self.hook, given)))
        return y


@pytest.mark.parametrize("kind", ["layer", "layer, before", "node", "node, behind"])
@pytest.mark.parametrize(("hook", "is_split"), [(torch.neg, True), (normed, False)])
def test_hooks_of_layers_and_of_nodes_are_followed(kind: str, hook: Hook, is_split: bool) -> None:
    (why,) = reasons(Watched(kind, hook))
    assert (why is None) is is_split


def test_layers_whose_hooks_call_others_are_told_apart() -> None:
    """Both functions have the same code but for what it calls."""
    found = reasons(*(hooked(hook) for hook in (lambda g: g + g.tanh(), lambda g: g + g.mean())))
    assert found[0] is None and found[1] is not None


def test_a_sum_over_samples_by_a_product_is_one() -> None:
    """Of which nothing but multiples may be made."""

    class Covariance(nn.Module):
        def __init__(self, power: int) -> None:
            super().__init__()
            self.power = power

        def forward(self, x: Tensor) -> Tensor:
            return (0.5 * (x.t() @ x)).sum() if self.power == 1 else (x.t() @ x).pow(self.power).sum()

    def why(power: int) -> str | None:
        class Last(Net):
            def forward(self, x: Tensor) -> Tensor:
                return self.layers[1](self.layers[0](x))  # type: ignore[no-any-return]

        task = Task("t", Last(Covariance(power)), 4, Rows(), reduction="sum")
        graph = analysed(Workload("w", [task], (Layer, Covariance)))
        return graph.tasks["t"].ops[-1].coupled_because

    assert why(1) is None
    assert why(2) is not None


@pytest.mark.parametrize("hook", [None, torch.neg])
@pytest.mark.parametrize("kind", ["", "layer", "node"])
def test_a_layer_with_hooks_on_gradients_is_not_split_by_tensor_parallelism(
    kind: str, hook: Hook | None
) -> None:
    layer: Layer = Watched(kind, hook or same) if kind else Layer()
    if hook is not None and not kind:
        layer = hooked(hook)
    plan = {type(layer): {"linear": "colwise_gather"}}
    workload = Workload("w", [Task("t", Net(layer), 4, Rows())], (Layer, type(layer)), tp_plans=plan)
    graph = analysed(workload)
    op = graph.tasks["t"].ops[1]
    assert op.changes_gradients is (kind != "" or hook is not None)
    if op.changes_gradients:
        assert layer_split(workload, graph.tasks["t"], op, 2) is None
        assert "hooks on gradients" in describe_ways(workload, graph.tasks["t"], op)


COUNT = {"of the file": 0}


class Counting(torch.autograd.Function):
    """Its backward counts in its class and in a dict of the file's, and may compute with these."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: Hook) -> Tensor:
        ctx.made = made
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Counting.calls += 1
        COUNT["of the file"] += 1
        return ctx.made(gradients[0]), None


@pytest.mark.parametrize(
    ("made", "is_split"),
    [
        (torch.neg, True),
        (lambda g: g * torch.tensor(2.0), True),
        (lambda g: g * torch.tensor(1.0 / Counting.calls), False),
        (lambda g: g / Counting.calls, False),
        (lambda g: g * COUNT["of the file"], False),
        (lambda g: g.neg() if Counting.calls % 2 else g, False),
    ],
)
def test_a_backward_that_computes_with_what_it_counts_is_not_split(made: Hook, is_split: bool) -> None:
    """Each share would call it, and count for itself."""
    (why,) = reasons(Layer(lambda x, _: Counting.apply(x, made)))  # type: ignore[no-untyped-call]
    assert (why is None) is is_split
    assert why is None or "its backward pass computes otherwise each time that it runs" in why
    assert why is None or "test_code_in_backward_passes.py:" in why
