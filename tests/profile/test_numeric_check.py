"""Ops in shares of 1 and n - 1 samples against the whole batch: what differs in numbers is left whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.losses.counts import LossCounter
from spindle_cli.errors import WorkloadError
from spindle_cli.plan.plan_report import describe_unchecked
from spindle_cli.profile.checking.compare import relative_difference
from spindle_cli.profile.checking.run import CheckSettings, check_numbers, with_whole
from spindle_cli.profile.checking.values import choose_samples
from spindle_cli.profile.numeric_check import TaskCheck
from spindle_cli.training.items import Generators
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.types import Task, Workload

WIDTH = 4
PADDED = -100
Act = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """Does something to the samples, and holds a parameter and a buffer."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = act
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) + 0 * self.seen


class Tracking(Layer):
    """Keeps a moving average of what it has seen."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x + self.linear(x)


class MaskedMean(nn.Module):
    """A mean over what counts, and what does the model's own values say: no mean over samples."""

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        counts = (x[..., 2:3] > 0).to(x.dtype) + 0 * label
        return (x.square().sum(-1, keepdim=True) * counts).sum() / counts.sum()


class Net(nn.Module):
    def __init__(self, act: Act, loss: str = "mean", layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.first = Layer(torch.tanh)
        self.second = layer(act)
        self.loss = loss
        self.masked = MaskedMean()
        self.scale = 1.0

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        x = self.second(self.first(x)) * self.scale
        if self.loss == "masked":
            return self.masked(x, label)
        if self.loss == "labels beyond":
            return functional.cross_entropy(x.flatten(0, 1), label.flatten() + WIDTH)
        if self.loss == "padded":
            return functional.cross_entropy(x.flatten(0, 1), label.flatten())
        return x.square().sum() if self.loss == "sum" else x.square().mean()


def samples(count: int = 24) -> list[dict[str, Tensor]]:
    """Sample i has i % 5 labels that count, and then 5 - i % 5 that do not."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(5, WIDTH, generator=generator),
            "label": torch.tensor([3] * (i % 5) + [PADDED] * (5 - i % 5)),
        }
        for i in range(count)
    ]


def graph_of(act: Act = torch.tanh, *, splits: bool = True, **rest: Any) -> WorkloadGraph:
    """A task of two layers and a loss, all of which are taken to be split if `splits`."""
    torch.manual_seed(0)
    batch = rest.pop("batch_size", 12)
    reduction = "sum" if rest.get("loss") == "sum" else "mean"
    data = [{"x": item["x"], "label": item["label"][:, None]} for item in samples()]
    task = Task("t", Net(act, **rest), batch, data, reduction=reduction)
    operators = {Layer, type(task.module.second)} | ({MaskedMean} if rest.get("loss") == "masked" else set())
    coupled = (Centred,) if rest.get("layer") is Centred else ()
    graph = analysed(Workload("w", [task], operators=tuple(operators - set(coupled)), coupled=coupled))
    if not splits:
        return graph
    traced = graph.tasks["t"]
    ops = tuple(replace(op, coupled=False, coupled_because=None) for op in traced.ops)
    return replace(graph, tasks={"t": replace(traced, ops=ops)})


def check(graph: WorkloadGraph, **settings: Any) -> TaskCheck:
    (task,) = check_numbers(graph, 0, CheckSettings(threads=1, **settings)).tasks
    return task


class Centred(Layer):
    """Couples the samples, and says so."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y - y.mean(0)


class Halves(Layer):
    """Cannot do with a single sample."""

    def forward(self, x: Tensor) -> Tensor:
        best, _ = x.topk(2, dim=0)
        return self.linear(x) + best.mean() * 0


def names(graph: WorkloadGraph) -> list[str]:
    return [metaop.name for metaop in graph.metaops]


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_what_acts_on_samples_one_by_one_agrees(loss: str) -> None:
    graph = graph_of(loss=loss)
    found = check(graph)
    assert found.whole == found.unchecked == {}
    assert set(found.checked) == set(names(graph))
    assert found.largest_difference < 1e-12
    assert found.forward_unchecked is None
    assert found.samples == 6


def test_dropout_does_not_keep_layers_from_being_compared() -> None:
    found = check(graph_of(lambda x: functional.dropout(x, 0.5)))
    assert found.whole == {} and found.largest_difference < 1e-12


def test_a_layer_that_couples_samples_is_found_with_its_place_and_nothing_else_is() -> None:
    graph = graph_of(layer=Centred)
    found = check(graph)
    (name,) = found.whole
    assert "second" in name
    assert (
        "test_numeric_check.py:" in found.whole[name]
        and "differs from that of the whole" in found.whole[name]
    )
    assert set(found.checked) == set(names(graph)) - {name}


def test_a_mean_over_what_counts_is_no_mean_over_samples() -> None:
    """An operator's own loss is taken to be what its task says; numbers tell."""
    found = check(graph_of(loss="masked"))
    (why,) = found.whole.values()
    assert "test_numeric_check.py:" in why


def test_a_loss_over_labels_that_count_agrees_where_shares_count_differently() -> None:
    graph = graph_of(loss="padded", splits=False)
    found = check(graph)
    assert found.whole == found.unchecked == {}
    loss = graph.tasks["t"].ops[-1]
    assert not loss.coupled and loss.shares is not None and loss.shares.num_counts == 1


def test_a_loss_whose_counts_are_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(loss="padded", splits=False)
    monkeypatch.setattr(LossCounter, "count", lambda self, rows, share: torch.tensor([10.0 * share]))
    (why,) = check(graph).whole.values()
    assert "differs from that of the whole" in why


def test_a_layer_that_fails_on_one_sample_is_left_whole() -> None:
    found = check(graph_of(layer=Halves, splits=True))
    (why,) = found.whole.values()
    assert "fails on shares of 1 and 5 samples" in why


def test_a_buffer_that_depends_on_the_share_is_found() -> None:
    found = check(graph_of(layer=Tracking))
    (why,) = found.whole.values()
    assert "what forward leaves in second.seen differs" in why


def test_what_was_traced_is_compared_with_forward() -> None:
    graph = graph_of()
    graph.tasks["t"].root.scale = 1.001
    with pytest.raises(WorkloadError, match="what was traced of it is not what its forward computes"):
        check(graph)


def test_gradients_of_what_was_traced_are_compared_though_the_loss_agrees() -> None:
    graph = graph_of()
    root = graph.tasks["t"].root
    written = root.forward

    def twice_the_gradient(**batch: Tensor) -> Tensor:
        loss: Tensor = written(**batch)
        return 2 * loss - loss.detach()

    root.forward = twice_the_gradient
    with pytest.raises(WorkloadError, match=r"a gradient differs by 5\.0e-01"):
        check(graph)


def test_what_is_too_large_or_too_late_is_not_checked_and_it_says_so() -> None:
    graph = graph_of()
    large = check(graph, max_bytes=100)
    assert set(large.unchecked) == set(names(graph)) and large.checked == ()
    assert all("more than 100 B" in why for why in large.unchecked.values())
    assert large.forward_unchecked is not None and "more than 100 B" in large.forward_unchecked
    late = check(graph, max_s=0.0)
    assert set(late.unchecked.values()) == {"the check's 0 s were over"}


def test_what_computes_in_float32_is_compared_as_such() -> None:
    found = check(graph_of(lambda x: torch.tanh(x.float()).to(x.dtype)))
    assert found.whole == found.unchecked == {}
    coupling = check(graph_of(layer=Centred32))
    assert len(coupling.whole) == 1


class Centred32(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).float()
        return (y - 0.001 * y.mean(0)).to(x.dtype)


def test_a_loss_that_runs_in_float64_is_not_compared_in_float32_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, seen = graph_of(loss="masked"), list[torch.dtype]()
    known = MaskedMean.forward

    def noted(self: MaskedMean, x: Tensor, label: Tensor) -> Tensor:
        seen.append(x.dtype)
        return known(self, x, label)

    monkeypatch.setattr(MaskedMean, "forward", noted)
    check(graph, losses_only=True)
    assert set(seen) == {torch.float64}


def test_half_numbers_tell_nothing() -> None:
    found = check(graph_of(lambda x: torch.tanh(x.bfloat16()).to(x.dtype)))
    assert [why.split(": ")[-1] for why in found.unchecked.values()] == ["it computes in numbers of 16 bits"]


def test_an_estimate_checks_the_loss_alone() -> None:
    graph = graph_of(layer=Centred)
    found = check(graph, losses_only=True)
    loss = next(m.name for m in graph.metaops if len(graph.tasks["t"].ops) - 1 in m.ops)
    assert set(found.unchecked) == set(names(graph)) - {loss} or found.checked == ()
    assert found.forward_unchecked == "an estimate runs no layers"


@pytest.mark.parametrize("losses_only", [True, False])
def test_a_loss_that_the_samples_make_fail_is_not_checked_and_it_is_no_error(losses_only: bool) -> None:
    graph = graph_of(loss="labels beyond")
    found = check(graph, losses_only=losses_only)
    loss = next(m.name for m in graph.metaops if len(graph.tasks["t"].ops) - 1 in m.ops)
    assert loss in found.unchecked and loss not in found.checked
    assert losses_only or "fails by itself: IndexError: Target" in found.unchecked[loss]


def test_nothing_is_left_changed() -> None:
    graph = graph_of(layer=Tracking)
    root = graph.tasks["t"].root
    before = dict(root.named_parameters())
    values = {name: tensor.clone() for name, tensor in root.state_dict().items()}
    generators = Generators.now()
    check(graph)
    assert all(parameter is before[name] for name, parameter in root.named_parameters())
    assert all(torch.equal(tensor, values[name]) for name, tensor in root.state_dict().items())
    after = Generators.now()
    assert torch.equal(after.torch, generators.torch) and after.python == generators.python
    np.testing.assert_equal(after.numpy, generators.numpy)
    assert torch.get_default_dtype() is torch.float32


def test_the_samples_counts_differ_and_the_first_counts_least() -> None:
    batch = choose_samples(graph_of().tasks["t"], 0)
    counts = (batch["label"] != PADDED).sum((1, 2)).tolist()
    assert len(counts) == 6
    assert counts[0] == min(counts) == 0 and max(counts) == 4


def test_a_batch_of_one_sample_has_nothing_to_check() -> None:
    found = check(graph_of(batch_size=1))
    assert found.checked == () and found.unchecked == found.whole == {}


def test_what_differs_has_curves_of_one_device_and_the_fingerprint_stays() -> None:
    graph = graph_of(layer=Centred)
    graph = replace(graph, metaops=tuple(replace(metaop, coupled=False) for metaop in graph.metaops))
    found = check_numbers(graph, 0, CheckSettings(threads=1))
    changed = with_whole(graph, found)
    (name,) = found.tasks[0].whole
    assert [metaop.name for metaop in changed.metaops if metaop.coupled] == [name]
    assert changed.fingerprint == graph.fingerprint


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([float("nan")], [float("nan")], 0.0),
        ([float("-inf"), 1.0], [float("-inf"), 1.0], 0.0),
        ([float("nan")], [1.0], float("inf")),
        ([1e-9], [0.0], float("inf")),
        ([1.0], [1.0, 2.0], float("inf")),
    ],
)
def test_relative_differences(ours: list[float], theirs: list[float], expected: float) -> None:
    assert relative_difference(torch.tensor(ours), torch.tensor(theirs), 0.0) == expected


def test_a_difference_is_over_no_less_than_it_is_told() -> None:
    assert relative_difference(torch.tensor([1e-3]), torch.tensor([0.0]), 0.1) == pytest.approx(1e-2)


def test_the_line_about_what_is_not_checked() -> None:
    assert describe_unchecked({}) is None
    line = describe_unchecked({"a": "large", "b": "large", "c": "late"})
    assert line is not None
    assert line.startswith("not checked by numbers: a, b (large); c (late).")
    many = describe_unchecked(dict.fromkeys("abcd", "--no-check"))
    assert many is not None and "4 parts (--no-check)" in many


class Following(Tracking):
    """What it gives depends on its moving average."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_run_of_a_check_begins_with_the_buffers_as_they_were(dtype: torch.dtype) -> None:
    """Also where they need no conversion."""
    graph = graph_of(layer=Following, splits=False)
    graph.tasks["t"].root.to(dtype)
    before = {name: buffer.clone() for name, buffer in graph.tasks["t"].root.named_buffers()}
    assert check(graph).forward_unchecked is None
    assert all(torch.equal(buffer, before[name]) for name, buffer in graph.tasks["t"].root.named_buffers())


class Reversed(torch.autograd.Function):
    """Counts its backward passes."""

    calls = 0

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        Reversed.calls += 1
        return gradient


class CountsBackward(Net):
    """Counts backward passes by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__(torch.tanh if kind != "a function" else lambda x: Reversed.apply(x))  # type: ignore[no-any-return, no-untyped-call]
        self.calls = 0
        self.register_buffer("norm", torch.zeros(()))
        if kind == "a parameter's hook":
            self.first.linear.weight.register_hook(lambda _: self.count())
        elif kind == "a layer's hook":
            self.first.register_full_backward_hook(lambda *_: self.count())
        elif kind == "a buffer":
            self.first.register_full_backward_hook(lambda *given: self.keep(given[2][0]))

    def count(self) -> None:
        self.calls += 1

    def keep(self, gradient: Tensor) -> None:
        self.norm.copy_(gradient.norm())


class ReadsOfBackward(CountsBackward):
    """Does something else from the tenth backward pass on."""

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        loss = super().forward(x, label)
        return (2 * loss if max(self.calls, Reversed.calls) > 9 else loss) + 0 * self.norm


MOVED = {
    "a parameter's hook": "self.calls",
    "a layer's hook": "self.calls",
    "a function": "Reversed.calls",
    "a buffer": "norm",
}


@pytest.mark.parametrize("kind", MOVED)
def test_what_a_backward_pass_moves_is_read_by_no_forward(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reversed, "calls", 0)

    def found(net: type[CountsBackward]) -> TaskCheck:
        torch.manual_seed(0)
        data = [{"x": item["x"], "label": item["label"][:, None]} for item in samples()]
        task = Task("t", net(kind), 12, data)
        return check(analysed(Workload("w", [task], operators=(Layer,))))

    assert found(CountsBackward).forward_unchecked is None
    moved = re.escape(f"a backward pass moves {MOVED[kind]}, which forward reads")
    with pytest.raises(WorkloadError, match=rf"test_numeric_check\.py:\d+: task 't': {moved}"):
        found(ReadsOfBackward)
