"""Devices that share out samples and experts find the loss and the gradients of the whole."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_toys import DEPTH, Mixture, mixtures, workload_of
from torch import Tensor, nn
from torch.nn import functional

from helpers.analysed import analysed
from helpers.thread_groups import Meeting, in_threads
from spindle_cli.errors import WorkloadError
from spindle_cli.operators.experts.region import Dispatch, SamplePart
from spindle_cli.operators.experts.types import expert_sizes
from spindle_cli.operators.split_op import PartialOp, View, region_of
from spindle_cli.operators.tensor_parallel import LayerSplit, kept_whole, layer_split
from spindle_cli.profile.op.split_runs import SumCounter, one_part
from spindle_cli.runtime.step.compute import run_backward, run_forward
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Workload
from spindle_cli.zoo import bert_moe

EXACT = 1e-12


def part_of(
    task: TaskGraph, index: int, split: LayerSplit, group: Any, leaves: dict[str, nn.Parameter]
) -> nn.Module:
    """One device's op over leaves of its own; notes those whose gradients count."""
    module = task.op_module(task.ops[index])
    views: dict[str, View] = {}
    for name, whole in module.named_parameters(remove_duplicate=False):
        counts = group.member == 0 or split.finds_own_gradient(name)
        leaf = leaves.setdefault(name, whole)
        if name in split.dims and leaf is whole:
            sizes = expert_sizes(len(whole), split.degree)
            part = torch.split(whole.detach(), sizes)[group.member]
            leaf = leaves[name] = nn.Parameter(part.clone())
        views[name] = View((leaf,), counts=counts)
    return PartialOp(module, views, region_of(module, split, group))


def trained(
    task: TaskGraph, splits: list[LayerSplit], group: Any, batch: dict[str, Tensor], recompute: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients that one device finds, as a slice of all ops runs."""
    own = copy.deepcopy(task)
    leaves: dict[str, nn.Parameter] = {}
    runnable = tuple(part_of(own, index, split, group, leaves) for index, split in enumerate(splits))
    piece = SimpleNamespace(ops=(0, len(own.ops)), recompute=recompute, selective=False)
    local: Any = SimpleNamespace(
        wired=SimpleNamespace(inputs=(), outputs=(), slice=piece, ops=own.ops), runnable=runnable
    )
    run = run_forward(local, batch, {}, {}, lambda _: None)
    assert run.loss is not None
    run_backward(run, {}, 1.0)
    return run.loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def compare(workload: Workload, degree: int, samples: int, *, recompute: bool = False) -> Meeting:
    declared = workload.tasks[0]
    plain = copy.deepcopy(declared.module).double()  # type: ignore[union-attr]
    declared.module.double()  # type: ignore[union-attr]
    task = analysed(workload).tasks[declared.name]
    splits = [layer_split(workload, task, op, degree) for op in task.ops]
    items = [declared.dataset[index] for index in range(samples)]
    batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
    loss = plain(**batch)
    loss.backward()
    known = [split for split in splits if split is not None]
    assert len(known) == len(splits)
    found, meeting = in_threads(degree, lambda group: trained(task, known, group, batch, recompute))
    cut = {name for split in known for name in split.dims}
    for each, _ in found:
        assert torch.allclose(each, loss, rtol=EXACT, atol=0.0)
    for name, parameter in plain.named_parameters():
        parts = [gradients[name] for _, gradients in found if name in gradients]
        whole = torch.cat(parts) if name in cut else torch.stack(parts).sum(0)
        assert parameter.grad is not None
        error = float((whole - parameter.grad).abs().max() / parameter.grad.abs().max().clamp(min=1e-3))
        assert error <= EXACT, (name, error)
    return meeting


@pytest.mark.parametrize(("degree", "samples"), [(2, 5), (3, 5), (4, 4), (3, 2), (4, 1)])
def test_devices_with_own_samples_and_experts_train_as_the_whole(degree: int, samples: int) -> None:
    """Also where experts (4 over 3) and samples (5 over 2) do not divide, and where devices have none."""
    compare(mixtures(), degree, samples)


def test_recomputed_layers_train_as_the_whole() -> None:
    compare(mixtures(), 2, 5, recompute=True)


def test_two_layers_exchange_four_times_in_each_pass_and_join_at_the_end_alone() -> None:
    """The zoo's BERT hands on two results from pair to pair; before the first there is the gradient of its
    trunk alone to be joined, as the balance begins with zeros.
    """
    torch.manual_seed(0)
    meeting = compare(bert_moe.build("laptop"), 2, 6)
    kinds = [kind for kind, _ in meeting.sums]
    assert kinds.count("exchange") == kinds.count("exchange back") == 2 * DEPTH
    assert kinds.count("gather") == 2 + 1
    assert len(kinds) == 4 * DEPTH + 3
    # To the experts: 3 samples, 4 experts of 10 places; back: 6 samples, 2 experts.
    shapes = [shape for kind, shape in meeting.sums if kind == "exchange"]
    assert shapes == [(3, 4, 10, 32), (6, 2, 10, 32)] * DEPTH


def test_a_trained_argument_of_no_sample_has_its_gradients_summed() -> None:
    kinds = [kind for kind, _ in compare(mixtures(), 2, 5).sums]
    assert kinds.count("backward") == DEPTH
    assert kinds.count("forward") == 0


def test_what_is_dispatched_comes_to_its_experts_and_back() -> None:
    """5 samples over 3 devices are 2, 2, 1; 4 experts are 1, 1, 2."""
    whole = torch.arange(5 * 4 * 2).reshape(5, 4, 2)
    samples, experts = (2, 2, 1), (1, 1, 2)

    def one(group: Any) -> tuple[Tensor, Tensor]:
        dispatch = Dispatch(group, samples, experts)
        there = dispatch.to_experts(torch.split(whole, samples)[group.member])
        return there, dispatch.to_samples(there)

    found, _ = in_threads(3, one)
    for member, (there, back) in enumerate(found):
        assert torch.equal(there, torch.split(whole, experts, 1)[member])
        assert torch.equal(back, torch.split(whole, samples)[member])


def test_experts_are_cut_as_parameters_are() -> None:
    assert expert_sizes(4, 3) == (1, 1, 2)
    assert expert_sizes(16, 8) == (2,) * 8
    assert expert_sizes(5, 2) == (2, 3)


def test_of_fewer_samples_than_devices_the_last_is_computed_again() -> None:
    whole = torch.arange(6.0).reshape(2, 3).requires_grad_()

    def one(group: Any) -> tuple[Tensor, Tensor, Tensor]:
        shared = SamplePart(4, 0, group).cut(whole.detach().requires_grad_())
        leaf = shared.tensor.detach().requires_grad_()
        joined = type(shared)(leaf, shared.length, shared.part).whole()
        joined.sum().backward()
        assert leaf.grad is not None
        return shared.tensor.detach(), joined.detach(), leaf.grad

    found, _ = in_threads(4, one)
    for member, (own, joined, gradient) in enumerate(found):
        assert torch.equal(own, whole.detach()[min(member, 1) : min(member, 1) + 1])
        assert torch.equal(joined, whole.detach())
        assert torch.equal(gradient, torch.full((1, 3), 1.0 if member < 2 else 0.0))


class Flat(Mixture):
    """Its experts take the tokens of all samples in one row."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        takes, weights, _ = self.gate(x + shift)
        given = torch.einsum("bsec,bsw->ebcw", takes, x).flatten(1, 2)
        out = self.experts(given.unsqueeze(0)).squeeze(0).unflatten(1, (x.shape[0], -1))
        return x + torch.einsum("bsec,ebcw->bsw", weights, out)


class Uncalled(Mixture):
    """Uses the parameters of its experts itself."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + shift * self.experts.up.mean()


class WithBuffer(Mixture):
    """Its experts have a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.experts.register_buffer("scale", torch.ones(4, 1, 1))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (WithBuffer, "layers.0.experts has a buffer, scale, which is not cut with its parameters"),
        (Flat, "experts takes (1, 4, 6, 8) for 2 samples, not [samples, 4 experts, ...]"),
        (Uncalled, "it does not call experts"),
    ],
)
def test_a_layer_whose_experts_take_something_else_stays_whole(kind: type[nn.Module], why: str) -> None:
    graph = analysed(workload := workload_of([kind(), kind()]))
    task = graph.tasks["task"]
    assert layer_split(workload, task, task.ops[0], 2) is None
    (said,) = kept_whole(graph)
    assert (
        said
        == f"tensor parallelism: the experts of {kind.__name__} are not shared out: {why}; it stays whole"
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"norm": "expertwise", "experts": "colwise"}, "experts is a Experts, expected an nn.Linear"),
        ({"gate": "expertwise", "norm": "expertwise"}, None),
        ({"experts": "expertwise", "gate.logits": "colwise"}, "gate.logits is colwise beside experts"),
        ({"mixture": "expertwise"}, "mixture is nothing, expected a module of stacked experts"),
    ],
)
def test_plans_of_experts_that_do_not_fit_are_refused(plan: dict[str, str], message: str | None) -> None:
    torch.manual_seed(0)
    workload = workload_of([Mixture(), Mixture()], plan)
    task = analysed(workload).tasks["task"]
    if message is None:
        assert layer_split(workload, task, task.ops[0], 2) is None
        return
    with pytest.raises(WorkloadError, match=f"tp_plans: Mixture: {message}"):
        layer_split(workload, task, task.ops[0], 2)


class Dropping(Mixture):
    """Drops at random ahead of what it takes."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(functional.dropout(x, 0.5), shift)


def test_devices_draw_their_own_numbers_inside_and_the_same_behind() -> None:
    torch.manual_seed(0)
    workload = workload_of([Dropping(), Dropping()])
    task = analysed(workload).tasks["task"]
    split = layer_split(workload, task, task.ops[0], 2)
    assert split is not None
    assert split.experts is not None
    split = split.with_whole_ends()
    kept: dict[int, Tensor] = {}
    behind: dict[int, Tensor] = {}
    for member in (0, 1):
        torch.manual_seed(7)
        group = SumCounter((0, 1), member, torch.device("cpu"))
        part = one_part(task.op_module(task.ops[0]), split, group)
        part.op.get_submodule("layers.0.norm").register_forward_pre_hook(
            lambda _, args, member=member: kept.__setitem__(member, args[0].detach())
        )
        part(torch.ones(4, 6, dtype=torch.int64))
        behind[member] = torch.rand(3)
    assert len(kept[0]) == 2
    assert not torch.equal(kept[0], kept[1])
    assert torch.equal(behind[0], behind[1])


def test_an_op_that_is_evaluated_takes_and_gives_all_samples() -> None:
    workload = mixtures()
    task = analysed(workload).tasks["task"]
    first, last = (layer_split(workload, task, op, 2) for op in task.ops)
    assert first is not None
    assert last is not None
    assert (first.is_handed_on, last.is_handed_on) == (True, False)  # a loss is behind the last
    assert set(last.parts_taken(SumCounter((0, 1), 0, torch.device("cpu")))) == {1}  # words come first
    for split in (first.with_whole_ends(), last.with_whole_ends()):
        assert split.experts is not None
        assert not split.is_handed_on
        assert split.parts_taken(SumCounter((0, 1), 0, torch.device("cpu"))) == {}
        assert split.experts.modules == {f"{split.experts.layer}.experts": 4}


def test_more_devices_than_experts_are_no_split() -> None:
    workload = mixtures()
    task = analysed(workload).tasks["task"]
    assert layer_split(workload, task, task.ops[0], 4) is not None
    assert layer_split(workload, task, task.ops[0], 5) is None
