"""Losses that compare samples, as people write them: which are split, and which stay whole and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from helpers.analysed import analysed
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload

WIDTH, BATCH = 4, 7
Loss = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Two operators, a parameter for the scale and one for the bias of a loss, and the loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.one, self.two, self.loss = nn.Linear(5, WIDTH), nn.Linear(3, WIDTH), loss
        self.scale, self.bias = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor(-0.7))
        self.table = nn.EmbeddingBag(3, WIDTH, padding_idx=0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, self.one(x), self.two(y))


def task_of(loss: Loss) -> TaskGraph:
    """Its analysis, in float64."""
    torch.manual_seed(0)
    with torch.random.fork_rng():
        items = [{"x": torch.randn(5).double(), "y": torch.randn(3).double()} for _ in range(2 * BATCH)]
    task = Task("t", Net(loss).double(), BATCH, items)
    return analysed(Workload("w", [task], operators=(nn.Linear,))).tasks["t"]


def own(pairs: Tensor) -> Tensor:
    return torch.arange(len(pairs), device=pairs.device)


def clip(m: Any, a: Tensor, b: Tensor) -> Tensor:
    logits = m.scale.exp() * normalize(a) @ normalize(b).T
    labels = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, labels) + cross_entropy(logits.t(), labels)) / 2


def open_clip(m: Any, a: Tensor, b: Tensor) -> Tensor:
    of_images, of_texts = m.scale * a @ b.T, m.scale * b @ a.T
    of_images += m.bias
    of_texts += m.bias
    labels = torch.arange(of_images.shape[0], device=a.device, dtype=torch.long)
    return (cross_entropy(of_images, labels) + cross_entropy(of_texts, labels)) / 2


def siglip(m: Any, a: Tensor, b: Tensor) -> Tensor:
    logits = m.scale * a @ b.T + m.bias
    n = logits.shape[0]
    labels = 2 * torch.eye(n, dtype=logits.dtype) - torch.ones((n, n), dtype=logits.dtype)
    return -functional.logsigmoid(labels * logits).sum() / n


def siglip_of_rows(m: Any, a: Tensor, b: Tensor) -> Tensor:
    logits = torch.matmul(b, a.t()) * m.scale.exp() + m.bias
    signs = -torch.ones_like(logits) + 2 * torch.eye(logits.size(0), dtype=logits.dtype)
    return (-torch.sum(functional.logsigmoid(signs * logits), dim=-1)).mean()


def equal_labels(m: Any, a: Tensor, b: Tensor) -> Tensor:
    logits, kinds = a @ b.T, (a.detach().sum(1) > 0).long()
    same = (kinds[:, None] == kinds[None]).to(logits.dtype)
    return cross_entropy(logits, same / same.sum(1, keepdim=True))


def equal_numbers(m: Any, a: Tensor, b: Tensor) -> Tensor:
    logits, numbers = a @ b.T * m.scale, torch.arange(len(a))
    same = (numbers[:, None] == numbers[None, :]).to(logits.dtype)
    return cross_entropy(logits, same) + cross_entropy(logits.T, same)


def smoothed(m: Any, a: Tensor, b: Tensor) -> Tensor:
    logits = m.scale.exp() * normalize(a) @ normalize(b).T
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    both: Tensor = loss(logits, own(logits)) + loss(logits.T, own(logits))
    return both / 2


def with_soft_targets(m: Any, a: Tensor, b: Tensor) -> Tensor:
    logits = a @ b.T
    with torch.no_grad():
        targets = (a @ a.T).softmax(1)
    return functional.kl_div(logits.log_softmax(1), targets, reduction="batchmean")


def hinge(m: Any, a: Tensor, b: Tensor) -> Tensor:
    pairs = normalize(a) @ normalize(b).T
    cost = (0.2 + pairs - pairs.diag().view(-1, 1)).clamp(min=0)
    return cost.masked_fill(torch.eye(len(pairs), dtype=torch.bool), 0).sum() / len(pairs)


def by_exponents(m: Any, a: Tensor, b: Tensor) -> Tensor:
    logits = a @ b.T
    logits = logits - logits.amax(1, keepdim=True).detach()
    return -(logits.diag() - torch.log(torch.exp(logits).sum(1))).mean()


def hardest(m: Any, a: Tensor, b: Tensor) -> Tensor:
    pairs = a @ b.T
    return functional.relu(0.2 + pairs.max(1)[0] - pairs.diag()).mean()


def others_alone(m: Any, a: Tensor, b: Tensor) -> Tensor:
    pairs, n = a @ b.T, len(a)
    others = pairs.masked_fill(torch.eye(n, dtype=torch.bool), 0).sum() / (n * (n - 1))
    return others - pairs.diag().mean()


def weighted(m: Any, a: Tensor, b: Tensor) -> Tensor:
    pairs, weight = a @ b.T, torch.sigmoid(a.sum(1))
    return (cross_entropy(pairs, own(pairs), reduction="none") * weight).mean()


def of_view(m: Any, a: Tensor, b: Tensor) -> Tensor:
    """Of one view of each sample: the other view against all other samples' views."""
    others = (m.scale * a @ a.T).masked_fill(torch.eye(len(a), dtype=torch.bool), -math.inf)
    across = m.scale * a @ b.T
    loss: Tensor = (torch.logaddexp(across.logsumexp(1), others.logsumexp(1)) - across.diagonal()).mean()
    return loss


def views_apart(m: Any, a: Tensor, b: Tensor) -> Tensor:
    """NT-Xent (SimCLR) of two views that are not put into one batch."""
    a, b = normalize(a), normalize(b)
    return (of_view(m, a, b) + of_view(m, b, a)) / 2


def supervised(m: Any, a: Tensor, b: Tensor) -> Tensor:
    """SupCon of one view, as its authors' code has it: others with the same label are drawn near."""
    z, label = normalize(a), (b.detach().sum(1) > 0).long().contiguous().view(-1, 1)
    same = torch.eq(label, label.T).to(z.dtype)
    logits = torch.div(z @ z.T, 0.5)
    largest, _ = torch.max(logits, dim=1, keepdim=True)
    logits = logits - largest.detach()
    others = torch.scatter(torch.ones_like(same), 1, torch.arange(z.shape[0]).view(-1, 1), 0)
    same = same * others
    log_prob = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
    return -((same * log_prob).sum(1) / (same.sum(1) + 1e-6)).mean() * m.scale


def bag_of_numbers(m: Any, a: Tensor, b: Tensor) -> Tensor:
    """An operator of torch that is another one where nothing is trained, and has no backward pass then."""
    numbers = torch.stack([a.detach()[:, 0] > 0, b.detach()[:, 0] > 0], 1).long()
    return clip(m, a + m.table(numbers), b)


SPLIT: dict[str, Loss] = {
    "bag of numbers": bag_of_numbers,
    "supervised": supervised,
    "two views apart": views_apart,
    "clip": clip,
    "open_clip": open_clip,
    "siglip": siglip,
    "siglip of rows": siglip_of_rows,
    "one way": lambda m, a, b: cross_entropy(a @ b.T * m.scale, torch.arange(a.shape[0])),
    "along columns": lambda m, a, b: -(a @ b.T).log_softmax(0).diagonal().mean(),
    "einsum": lambda m, a, b: cross_entropy(p := torch.einsum("id,jd->ij", a, b), own(p)),
    "by module": lambda m, a, b: nn.CrossEntropyLoss()(p := a @ b.T / torch.tensor(0.07), own(p)),
    "summed": lambda m, a, b: cross_entropy(p := a @ b.T, own(p), reduction="sum") / len(p),
    "by number": lambda m, a, b: -(p := (a @ b.T).log_softmax(-1))[own(p), own(p)].mean(),
    "binary": lambda m, a, b: functional.binary_cross_entropy_with_logits(
        p := a @ b.T + m.bias, torch.eye(len(p), dtype=p.dtype)
    ),
    "logsumexp": lambda m, a, b: ((p := a @ b.T).logsumexp(1) - p.diag()).mean(),
    "size as a number": lambda m, a, b: cross_entropy(p := a @ b.T, own(p)) / math.log(len(p)),
    "with a penalty": lambda m, a, b: clip(m, a, b) + 0.01 * m.scale**2,
    "minus a mean of samples": lambda m, a, b: clip(m, a, b) - 0.1 * (a - b).square().mean(),
    "with itself": lambda m, a, b: (a @ a.T - b @ b.T).square().mean(),
    "equal numbers": equal_numbers,
    "marked columns": lambda m, a, b: (
        -((a @ b.T - 9 * torch.eye(len(a), dtype=a.dtype)).log_softmax(0).diagonal().mean())
    ),
    "equal labels": equal_labels,
    "smoothed labels": lambda m, a, b: cross_entropy(p := a @ b.T * m.scale, own(p), label_smoothing=0.1),
    "smoothed both ways": smoothed,
    "smoothed sum": lambda m, a, b: cross_entropy(p := a @ b.T, own(p), reduction="sum", label_smoothing=0.3),
    "smoothed targets": lambda m, a, b: cross_entropy(
        p := a @ b.T, torch.eye(len(p), dtype=p.dtype), label_smoothing=0.2
    ),
    "soft targets": with_soft_targets,
    "hinge": hinge,
    "by exponents": by_exponents,
    "hardest": hardest,
    "others alone": others_alone,
    "weighted": weighted,
}


def two_views(m: Any, a: Tensor, b: Tensor) -> Tensor:
    """NT-Xent as it is often written."""
    z, n = normalize(torch.cat([a, b])), len(a)
    pairs = (m.scale * z @ z.T).masked_fill(torch.eye(2 * n, dtype=torch.bool), -math.inf)
    return cross_entropy(pairs, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def weighted_mean(m: Any, a: Tensor, b: Tensor) -> Tensor:
    pairs, weight = a @ b.T, torch.sigmoid(a.sum(1))
    return (cross_entropy(pairs, own(pairs), reduction="none") * weight).sum() / weight.sum()


WHOLE: dict[str, tuple[Loss, str]] = {
    "two views": (two_views, "no single row for each sample"),
    "weighted mean": (weighted_mean, "a sum or mean over pairs"),
    "of features": (lambda m, a, b: (a.T @ b).square().mean(), "it sums over the batch"),
    "centred": (lambda m, a, b: ((a - a.mean(0)) @ b.T).square().mean(), "a sum or mean over pairs"),
    "pairs of pairs": (lambda m, a, b: ((a @ b.T) @ (b @ a.T)).mean(), "nothing is known of how mm treats"),
    "turned labels": (
        lambda m, a, b: cross_entropy(p := a @ b.T, torch.arange(len(p) - 1, -1, -1)),
        "no row for each sample",
    ),
    "next sample": (lambda m, a, b: cross_entropy(p := a @ b.roll(1, 0).T, own(p)), "into another order"),
    "next label": (lambda m, a, b: cross_entropy(p := a @ b.T, own(p) * 0 + 1), "not the numbers"),
    "all but one label": (
        lambda m, a, b: (a @ b.T).square().sum() / (~(own(a) == 2)).sum(),
        "it works over the batch",
    ),
    "an ignored number": (
        lambda m, a, b: cross_entropy(p := a @ b.T, own(p), ignore_index=0),
        "not the numbers",
    ),
    "beside the diagonal": (lambda m, a, b: (a @ b.T).diagonal(1).mean(), "some of the pairs alone"),
    "one column": (lambda m, a, b: (a @ b.T)[:, 0].square().mean(), "nothing is known of how select treats"),
    "both ways in a row": (
        lambda m, a, b: (a @ b.T).softmax(0).softmax(1).square().mean(),
        "rows of pairs that are cut along their columns",
    ),
    "root of a mean": (lambda m, a, b: (a @ b.T).square().mean().sqrt(), "a sum or mean over pairs"),
    "product of means": (lambda m, a, b: clip(m, a, b) * (a @ b.T).mean(), "a sum or mean over pairs"),
    "mean and a number": (lambda m, a, b: (a @ b.T).square().mean() + 1, "a sum or mean over pairs"),
    "noise": (
        lambda m, a, b: cross_entropy(p := a @ b.T + torch.randn(len(a), len(a)), own(p)),
        "random numbers",
    ),
    "three at once": (
        lambda m, a, b: torch.einsum("id,jd,kd->ijk", a, b, a).square().mean(),
        "no single row for each sample",
    ),
}
