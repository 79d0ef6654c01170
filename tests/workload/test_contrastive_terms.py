"""Losses that compare all samples and are one term of a loss that also counts labels, as CoCa's."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from helpers.analysed import analysed
from spindle_cli.analysis.losses.counts import LossCounter
from spindle_cli.operators.batch_dependent import pairs_over_shares
from spindle_cli.operators.heads.chunked import timed_op
from spindle_cli.profile.checking.in_turn import InTurn
from spindle_cli.workload.graph import TaskGraph, ValueSpec
from spindle_cli.workload.types import Task, Workload

BATCH, LENGTH, WIDTH, WORDS = 6, 4, 3, 5
CUTS = ((0, 1, BATCH), (0, 2, 3, BATCH))
STEP_BATCHES = 2


class Layer(nn.Module):
    """An operator of either tower."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Clip(nn.Module):
    """CLIP's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        logits = self.scale * normalize(one) @ normalize(two).T
        own = torch.arange(len(logits), device=logits.device)
        return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2


class Sampled(Clip):
    """With a random order, which no share has."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return super().forward(one, two[torch.randperm(len(two))])


class Both(Clip):
    """Contrastive and captioning, as open_clip's CoCaLoss gives them."""

    def forward(self, one: Tensor, two: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        caption = cross_entropy(logits.permute(0, 2, 1), labels, ignore_index=-100)
        return super().forward(one, two), 2 * caption


class Caption(nn.Module):
    """A captioner's head with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.head(x).permute(0, 2, 1), labels)


class Captioner(nn.Module):
    """Two towers, and a head behind one of them that captions."""

    def __init__(self, way: str, contrast: type[Clip] = Clip) -> None:
        super().__init__()
        self.way = way
        self.image, self.text, self.head = Layer(), Layer(), nn.Linear(WIDTH, WORDS)
        self.clip, self.both, self.caption = contrast(), Both(), Caption()
        self.weights = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.register_buffer("class_weight", torch.linspace(0.5, 2, WORDS))

    def forward(self, image: Tensor, words: Tensor, labels: Tensor) -> Tensor:
        image, words = self.image(image), self.text(words)
        logits = self.head(words)
        one, two = image.mean(1), words[:, -1]
        if self.way == "both":
            return sum(self.both(one, two, logits, labels))
        contrast = self.clip(one, two)
        if self.way == "two contrasts":
            contrast = contrast + 0.5 * self.clip(two, image[:, 0])
        if self.way == "caption":
            return contrast + self.caption(words, labels)
        if self.way == "learned weights":
            caption = cross_entropy(logits.permute(0, 2, 1), labels)
            terms = zip((contrast, caption), self.weights, strict=True)
            return sum((-weight).exp() * term + weight for term, weight in terms)
        if self.way == "class weights":
            scores = functional.log_softmax(logits.reshape(-1, WORDS), dim=-1)
            return contrast + functional.nll_loss(scores, labels.reshape(-1), weight=self.class_weight)
        if self.way == "mask":
            counts = (labels != -100).to(logits.dtype)
            return contrast + (logits.square().mean(-1) * counts).sum() / counts.sum().clamp(min=1)
        if self.way == "samples":
            return contrast + logits.square().mean()
        return contrast + 2 * cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def items() -> list[dict[str, Tensor]]:
    """Of sample k labels up to k are left out; of the last but one all."""
    torch.manual_seed(1)
    made = []
    for sample in range(2 * BATCH):
        labels = torch.randint(WORDS, (LENGTH,))
        labels[: sample % BATCH] = -100
        made.append(
            {
                "image": torch.randn(2, WIDTH).double(),
                "words": torch.randn(LENGTH, WIDTH).double(),
                "labels": labels,
            }
        )
    return made


def task_of(way: str, contrast: type[Clip] = Clip, **classes: tuple[type, ...]) -> TaskGraph:
    torch.manual_seed(0)
    task = Task("t", Captioner(way, contrast).double(), BATCH, items())
    given = {"operators": (Layer,), **classes}
    return analysed(Workload("w", [task], **given)).tasks["t"]


def batch() -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in items()[:BATCH]]) for name in items()[0]}


def rows_of(tensor: Tensor, spec: ValueSpec, first: int, last: int) -> Tensor:
    rows = spec.rows_per_sample
    return tensor.narrow(spec.batch_dim or 0, first * rows, (last - first) * rows)


def arguments_of(task: TaskGraph) -> list[Tensor]:
    """Of the loss op, for a whole batch."""
    op, fields = task.ops[-1], batch()
    torch.manual_seed(2)
    specs = [task.values[name] for name in op.inputs]
    return [
        *(fields[name] for name in op.fields),
        *(torch.randn(spec.shape, dtype=spec.dtype) for spec in specs),
    ]


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_(tensor.is_floating_point())


def gradients(loss: Tensor, leaves: list[Tensor], task: TaskGraph) -> list[Tensor]:
    parameters = [task.root.get_parameter(name) for name in task.ops[-1].parameters]
    wanted = [*(tensor for tensor in leaves if tensor.requires_grad), *parameters]
    return list(torch.autograd.grad(loss, wanted, retain_graph=True))


def of_shares(task: TaskGraph, arguments: list[Tensor], cuts: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """The sum of the parts of a step of equal batches, and its gradients, computed by shares of one."""
    op, group = task.ops[-1], InTurn(len(cuts) - 1)
    shares = task.loss_shares
    counts: tuple[Tensor, ...] = ()
    if shares.num_counts:
        counter = LossCounter(task.root, shares)
        counted = counter.count(batch(), 1 / STEP_BATCHES)
        counts = (counted * STEP_BATCHES).unbind()
    module = pairs_over_shares(task.share_module(op), task, op, group, cuts)
    specs = [*(task.fields[name] for name in op.fields), *(task.values[name] for name in op.inputs)]
    leaves = [
        [leaf(rows_of(tensor, spec, *span)) for tensor, spec in zip(arguments, specs, strict=True)]
        for span in pairwise(cuts)
    ]
    calls = [
        partial(module, *own, (last - first) / BATCH / STEP_BATCHES, *counts)
        for own, (first, last) in zip(leaves, pairwise(cuts), strict=True)
    ]
    parts = group.run(calls)
    found = group.run([partial(gradients, *each, task) for each in zip(parts, leaves, strict=True)])
    by_leaf = list(zip(*found, strict=True))
    trained = [spec.batch_dim or 0 for spec in specs if spec.dtype.is_floating_point]
    joined = [torch.cat(each, dim) for each, dim in zip(by_leaf, trained, strict=False)]
    summed = [torch.stack(each).sum(0) for each in by_leaf[len(trained) :]]
    return torch.stack(parts).sum(), [*joined, *summed]


NAMED: dict[str, Any] = {"operators": (Layer,), "contrastive": (Clip,)}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "in forward": ("", {}),
    "an operator before the loss": ("", {"operators": (Layer, Clip)}),
    "a named operator": ("", NAMED),
    "an operator called twice": ("two contrasts", NAMED),
    "one operator gives both losses": ("both", {"operators": (Layer, Both)}),
    "one operator each": ("caption", {"operators": (Layer, Caption), "contrastive": (Clip,)}),
    "weights that are learned": ("learned weights", {}),
    "labels of weighted classes": ("class weights", NAMED),
    "a mask": ("mask", {}),
    "a mean over samples": ("samples", NAMED),
}


@pytest.mark.parametrize("name", WAYS)
def test_shares_of_a_contrastive_loss_and_another_add_up_to_both(name: str) -> None:
    way, classes = WAYS[name]
    task = task_of(way, **classes)
    op = task.ops[-1]
    assert (op.target, op.coupled, op.contrasts) == (None, False, True), op.coupled_because
    assert [other.target for other in task.ops[:-1]] == ["image", "text"]
    arguments = arguments_of(task)
    leaves = [leaf(tensor) for tensor in arguments]
    loss = task.op_module(op)(*leaves)
    expected = gradients(loss, leaves, task)
    assert all(gradient.abs().max() > 1e-4 for gradient in expected)
    for cuts in CUTS:
        part, found = of_shares(task, arguments, cuts)
        torch.testing.assert_close(part * STEP_BATCHES, loss, rtol=1e-12, atol=1e-13)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one * STEP_BATCHES, other, rtol=1e-11, atol=1e-13)


def test_an_operator_that_is_traced_into_is_said_and_one_listed_as_coupled_is_not_touched() -> None:
    assert task_of("", **NAMED).opened == ("clip",)
    assert task_of("two contrasts", **NAMED).opened == ("clip",)
    listed = task_of("", operators=(Layer,), coupled=(Clip,))
    assert listed.opened == ()
    assert [(op.target, op.coupled) for op in listed.ops[2:]] == [("clip", True), (None, False)]


def test_an_operator_that_would_ignore_labels_is_traced_into_with_it() -> None:
    """Of the first samples here none has a label that is left out, of those after them some."""
    classes: dict[str, Any] = {"operators": (Layer, Caption), "contrastive": (Clip,)}
    full = [dict(item, labels=item["labels"].clamp(min=0)) for item in items()]
    task = Task("t", Captioner("caption").double(), BATCH, [*full[:4], *items()])
    graph = analysed(Workload("w", [task], **classes)).tasks["t"]
    assert graph.opened == ("clip", "caption")
    assert (graph.ops[-1].contrasts, graph.loss_shares.num_counts) == (True, 1)


def test_a_named_operator_before_the_loss_says_why_it_is_not_split() -> None:
    task = task_of("", Sampled, operators=(Layer,), contrastive=(Sampled,))
    (named,) = [op for op in task.ops if op.target == "clip"]
    assert (task.opened, named.coupled) == ((), True)
    assert named.coupled_because == (
        "it is named as contrastive, but it cannot be split: it draws random numbers"
    )


def test_what_is_timed_of_a_share_takes_what_a_share_is_told() -> None:
    task = task_of("")
    op = task.ops[-1]
    timed = timed_op(task, op, BATCH, 1)
    assert timed.num_counts == 1
    arguments = arguments_of(task)
    found = timed.module(*arguments, *timed.more_arguments(torch.device("cpu")))
    assert found.ndim == 0
