"""Sums, means and losses of what a mask selects are in shares what plain PyTorch has of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import default_collate

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.training.precision import constants_in, convert_module
from spindle_cli.workload.types import Task, Workload

from .shares import assert_trains_as_plain, gradients_of, run_cut, run_plain
from .toy import WIDTH, Block

SAMPLES, LENGTH, CLASSES = 7, 5, 3
CUTS = ([0, SAMPLES], [0, 1, SAMPLES], [0, 1, 2, 5, SAMPLES])


class Net(nn.Module):
    """Two blocks, and a loss of what they give; what is not selected is no number."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor, label: Tensor, mask: Tensor, seen: Tensor) -> Tensor:
        return self.loss(self, x, y, label, mask, seen)

    def hidden(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


Loss = Callable[[Net, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Items:
    """Samples of which a mask has some positions, in the first ones none; other targets are NaN."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.fields = {
            "x": torch.randn(2 * SAMPLES, LENGTH, WIDTH, generator=generator),
            "y": torch.randn(2 * SAMPLES, LENGTH, WIDTH, generator=generator),
            "label": torch.randint(0, CLASSES, (2 * SAMPLES, LENGTH), generator=generator),
            "mask": torch.rand(2 * SAMPLES, LENGTH, generator=generator) > 0.4,
            "seen": torch.rand(2 * SAMPLES, generator=generator) > 0.5,
        }
        self.fields["mask"][:2] = False
        self.fields["y"][~self.fields["mask"]] = torch.nan

    def __len__(self) -> int:
        return 2 * SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: field[index] for name, field in self.fields.items()}


def _entries(n: Net, x: Tensor, label: Tensor) -> Tensor:
    return functional.cross_entropy(n.logits(x).transpose(1, 2), label, reduction="none")


def _filled_by_selected(n: Net, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    made = y.clone()
    made[~mask] = x[~mask]
    return functional.l1_loss(n.hidden(x), made)


def _changed_in_place(n: Net, x: Tensor, mask: Tensor) -> Tensor:
    made = x * 2
    made[mask] *= 0.5
    made[made > 1] = 1.0
    made[mask] = n.scale
    return n.hidden(made).square().mean()


def _copied_and_changed(n: Net, x: Tensor, mask: Tensor) -> Tensor:
    picked = n.hidden(x)[mask]
    same = picked
    picked *= 2
    return (same - 1).square().mean()


def _selected_twice(n: Net, x: Tensor, label: Tensor, mask: Tensor) -> Tensor:
    losses = _entries(n, x, label)[mask]
    return losses[losses > 1].mean()


def _means_of_classes(n: Net, x: Tensor, label: Tensor) -> Tensor:
    hidden = n.hidden(x)
    means = torch.stack([hidden[label == number].mean(0) for number in range(CLASSES)])
    return functional.cross_entropy(hidden.flatten(0, 1) @ means.T, label.flatten())


def _per_probability(n: Net, x: Tensor, label: Tensor, mask: Tensor) -> Tensor:
    chances, wanted = torch.sigmoid(n.logits(x))[mask], functional.one_hot(label, CLASSES).to(x.dtype)[mask]
    return functional.binary_cross_entropy(chances, wanted) + 0.1 * torch.log(chances).mean()


def _distances(n: Net, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    far = (n.hidden(x)[mask] - y[mask]) * n.scale
    return far.square().sum(-1).sqrt().mean() + far[:, :3].abs().sum(dim=1).mean()


def _distillation(n: Net, x: Tensor, mask: Tensor) -> Tensor:
    taught = torch.softmax(n.head(x)[mask], -1).detach()
    return functional.kl_div(n.logits(x)[mask].log_softmax(dim=1), taught, reduction="batchmean")


def _by_masks_that_differ_in_a_keyword(n: Net, x: Tensor) -> Tensor:
    some, fewer = (torch.clamp(x[..., 0], min=low) > 0.1 for low in (0.2, 0.1))
    return (n.hidden(x)[some] - x[fewer]).square().mean()


# By name, the loss, and whether its op is split over the batch.
LOSSES: dict[str, tuple[Loss, bool]] = {
    "mean": (lambda n, x, y, label, mask, seen: _entries(n, x, label)[mask].mean(), True),
    "sum": (lambda n, x, y, label, mask, seen: _entries(n, x, label)[mask].sum() / mask.sum(), True),
    "number": (lambda n, x, y, label, mask, seen: (v := n.hidden(x)[mask]).sum() / v.numel(), True),
    "size": (lambda n, x, y, label, mask, seen: (v := n.hidden(x)[mask]).sum() / v.shape[0], True),
    "labels": (
        lambda n, x, y, label, mask, seen: functional.cross_entropy(n.logits(x)[mask], label[mask]),
        True,
    ),
    "module": (lambda n, x, y, label, mask, seen: n.criterion(n.head(n.hidden(x)[mask]), label[mask]), True),
    "weights": (
        lambda n, x, y, label, mask, seen: functional.cross_entropy(
            n.logits(x)[label != 1], label[label != 1], weight=torch.tensor([0.1, 0.3, 0.7])
        ),
        True,
    ),
    "flat": (
        lambda n, x, y, label, mask, seen: functional.nll_loss(
            n.logits(x).log_softmax(-1).view(-1, CLASSES)[mask.view(-1)], label.view(-1)[mask.view(-1)]
        ),
        True,
    ),
    "samples": (
        lambda n, x, y, label, mask, seen: functional.cross_entropy(n.logits(x)[seen, 0], label[:, 0][seen]),
        True,
    ),
    "gathered": (
        lambda n, x, y, label, mask, seen: (
            -n.logits(x)[mask].log_softmax(1).gather(1, label[mask].unsqueeze(1)).squeeze(1).mean()
        ),
        True,
    ),
    "targets that are none": (
        lambda n, x, y, label, mask, seen: functional.mse_loss(n.hidden(x)[mask], y[mask]),
        True,
    ),
    "distances": (lambda n, x, y, label, mask, seen: _distances(n, x, y, mask), True),
    "masked_select": (
        lambda n, x, y, label, mask, seen: (
            (n.hidden(x) - x).masked_select(mask.unsqueeze(-1)).square().mean()
        ),
        True,
    ),
    "probabilities": (lambda n, x, y, label, mask, seen: _per_probability(n, x, label, mask), True),
    "distillation": (lambda n, x, y, label, mask, seen: _distillation(n, x, mask), True),
    "filled": (lambda n, x, y, label, mask, seen: _filled_by_selected(n, x, y, mask), True),
    "in place": (lambda n, x, y, label, mask, seen: _changed_in_place(n, x, mask), True),
    "changed copy": (lambda n, x, y, label, mask, seen: _copied_and_changed(n, x, mask), True),
    "own": (lambda n, x, y, label, mask, seen: (v := n.hidden(x))[v.detach() > 0.3].mean(), False),
    "twice": (lambda n, x, y, label, mask, seen: _selected_twice(n, x, label, mask), False),
    "means of classes": (lambda n, x, y, label, mask, seen: _means_of_classes(n, x, label), False),
}


def workload_of(loss: Loss) -> Workload:
    torch.manual_seed(0)
    return Workload("selected", [Task("t", Net(loss), SAMPLES, Items())], operators=(Block,))


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_selections_are_those_of_plain_pytorch(name: str) -> None:
    loss, is_split = LOSSES[name]
    workload = workload_of(loss)
    plain = copy.deepcopy(workload.tasks[0].module)
    task = analysed(workload).tasks["t"]
    assert task.ops[-1].coupled != is_split, task.ops[-1].coupled_because
    fields = default_collate([task.task.dataset[index] for index in range(SAMPLES)])  # type: ignore[index]
    batch = {key: value.double() if value.is_floating_point() else value for key, value in fields.items()}
    for module in (plain, task.root):
        convert_module(module, None, torch.float64)
    with constants_in(torch.float64):
        expected = run_plain(replace(task.task, module=plain), batch)  # type: ignore[arg-type]
        gradients = gradients_of(expected, dict(plain.named_parameters()))
        for cuts in CUTS:
            found = run_cut(task, [batch], {op.index: cuts for op in task.ops})
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            ours = gradients_of(found, dict(task.root.named_parameters()))
            for key, gradient in gradients.items():
                torch.testing.assert_close(ours[key], gradient, rtol=1e-10, atol=1e-13)
    assert all(each is None or bool(each.isfinite().all()) for each in gradients.values())


@pytest.mark.parametrize("name", ["mean", "labels"])
def test_a_selection_of_nothing_counts_nothing_among_batches(name: str) -> None:
    task = analysed(workload_of(LOSSES[name][0])).tasks["t"]
    fields = default_collate([task.task.dataset[index] for index in range(SAMPLES)])  # type: ignore[index]
    none = {**fields, "mask": torch.zeros_like(fields["mask"])}
    cuts = {op.index: [0, 2, SAMPLES] for op in task.ops}
    together = run_cut(task, [none, fields], cuts)
    torch.testing.assert_close(together, run_cut(task, [fields], cuts))


@pytest.mark.parametrize(
    "loss",
    [
        lambda n, x, y, label, mask, seen: n.hidden(x)[mask].std(),
        lambda n, x, y, label, mask, seen: n.second(n.first(x)[mask]).mean(),
        lambda n, x, y, label, mask, seen: n.hidden(x)[mask].softmax(0).square().sum(),
    ],
)
def test_what_needs_the_rows_themselves_runs_whole(loss: Loss) -> None:
    _check_whole(loss)


@pytest.mark.parametrize(
    "loss",
    [
        lambda n, x, y, label, mask, seen: (n.hidden(x)[mask] - x[seen]).mean(),
        lambda n, x, y, label, mask, seen: _by_masks_that_differ_in_a_keyword(n, x),
    ],
)
def test_what_fails_on_the_rows_themselves_is_refused_and_named(loss: Loss) -> None:
    """Two masks select other numbers of rows."""
    with pytest.raises(WorkloadError, match="'sub' is given what a mask selects"):
        analysed(workload_of(loss))


@pytest.mark.parametrize(
    "share", [lambda picked: picked[:, 0], lambda picked: picked.contiguous(), lambda picked: picked[:, None]]
)
def test_what_shares_memory_with_a_selection_is_not_left_behind(share: Callable[[Tensor], Tensor]) -> None:
    def loss(n: Net, x: Tensor, _y: Tensor, _label: Tensor, mask: Tensor, _seen: Tensor) -> Tensor:
        picked = n.hidden(x)[mask]
        part = share(picked)
        picked *= 2
        return part.square().mean()

    _check_whole(loss)


def _check_whole(loss: Loss) -> None:
    """Some op runs whole, and all of them compute what forward does."""
    made = workload_of(loss)
    task = analysed(made).tasks["t"]
    assert any(op.coupled for op in task.ops)
    fields = default_collate([task.task.dataset[index] for index in range(SAMPLES)])  # type: ignore[index]
    assert_trains_as_plain(made.tasks[0], task, fields, [0, 2, SAMPLES])
