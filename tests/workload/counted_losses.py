"""Losses as people write them, and whether they can be computed by shares of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items

SAMPLES, TOKENS, CLASSES = 6, 4, 5
Given = SimpleNamespace  # z: (B, T, C) values of the model, and the batch's fields, by their first letters
Loss = Callable[[Given], Tensor]


@dataclass(frozen=True)
class Case:
    """A loss. `whole`: a part of the reason why it is never split; None: it is split."""

    loss: Loss
    whole: str | None = None
    counts: int = 0


def per_token(g: Given) -> Tensor:
    return (g.z - g.target).square().mean(-1)


def own_mask(g: Given) -> Tensor:
    return g.z[..., 0] > 0


def rows(g: Given) -> tuple[Tensor, Tensor]:
    return g.z.flatten(0, 1), g.label.flatten()


def causal(g: Given) -> Tensor:
    """As Hugging Face's ForCausalLMLoss has it."""
    labels = functional.pad(g.label, (0, 1), value=-100)[..., 1:].contiguous()
    return cross_entropy(g.z.view(-1, CLASSES), labels.view(-1), ignore_index=-100, reduction="mean")


def causal_sum(g: Given) -> Tensor:
    labels = functional.pad(g.label, (0, 1), value=-100)[..., 1:].contiguous()
    summed = cross_entropy(g.z.view(-1, CLASSES), labels.view(-1), ignore_index=-100, reduction="sum")
    return summed / (labels != -100).sum()


def alignments(g: Given) -> dict[str, Tensor]:
    """Arguments of ctc_loss: one or two of the first two labels, for three or four tokens."""
    return {
        "log_probs": g.z.transpose(0, 1).log_softmax(-1),
        "targets": g.ids[:, :2].clamp(min=1),
        "input_lengths": TOKENS - (g.ids[:, 3] > 2).long(),
        "target_lengths": 1 + (g.ids[:, 2] > 2).long(),
    }


def active(g: Given) -> Tensor:
    """As transformers' classes for tokens had it: where the mask is 0, a label that is ignored."""
    loss_fct = nn.CrossEntropyLoss(weight=g.m.class_weight)
    ignored = torch.tensor(loss_fct.ignore_index).type_as(g.label)
    return loss_fct(g.z.view(-1, CLASSES), torch.where(g.mask.view(-1) == 1, g.label.view(-1), ignored))


def begun_with_zeros(g: Given) -> Tensor:
    """Constants of the dtype and on the device of what the model gives."""
    loss = g.z.new_tensor(0.0) + g.z.new_zeros(())
    loss = loss + per_token(g).mean() * g.target.new_full((), 2.0) / g.target.new_ones((1,), dtype=g.z.dtype)
    return (loss * torch.tensor(3.0).to(g.z)).squeeze()


def supervised(g: Given) -> Tensor:
    """Supervised contrast, each sample's mean over those of its class."""
    z, label = functional.normalize(g.z[:, 0], dim=1), g.ids[:, 0]
    apart = torch.eye(len(z), dtype=torch.bool)
    alike = (label[:, None] == label[None]) & ~apart
    chances = (z @ z.T).masked_fill(apart, -1e9).log_softmax(1)
    return -((chances * alike).sum(1) / alike.sum(1).clamp(min=1)).mean()


def by_class(g: Given) -> Tensor:
    """The mean over classes of their means."""
    each = functional.one_hot(g.ids[:, 0], CLASSES).to(g.z.dtype)
    return ((per_token(g).mean(1)[:, None] * each).sum(0) / (each.sum(0) + 1)).sum()


CASES: Mapping[str, Case] = {
    # several numbers that the batch counts
    "supervised contrast": Case(supervised, "grows with the batch in more than one dimension"),
    "by class": Case(by_class, "adds values that grow with the batch in different ways"),
    # means over what counts
    "active labels": Case(active, counts=1),
    "constants like others": Case(begun_with_zeros),
    "padded": Case(lambda g: cross_entropy(*rows(g)), counts=1),
    "classes second": Case(lambda g: cross_entropy(g.z.transpose(1, 2), g.label), counts=1),
    "positional": Case(lambda g: cross_entropy(g.z.flatten(0, 1), g.ids.flatten(), None, None, 3), counts=1),
    "class weights": Case(lambda g: cross_entropy(*rows(g), weight=g.m.class_weight), counts=1),
    "smoothed": Case(
        lambda g: cross_entropy(*rows(g), weight=g.m.class_weight, label_smoothing=0.2), counts=1
    ),
    "module": Case(lambda g: g.m.criterion(g.z.flatten(0, 1), g.ids.flatten()), counts=1),
    "nll": Case(lambda g: functional.nll_loss(g.z.log_softmax(-1).transpose(1, 2), g.label), counts=1),
    "nll of weighted classes": Case(
        lambda g: functional.nll_loss(
            functional.log_softmax(g.z.flatten(0, 1), dim=-1), g.label.flatten(), weight=g.m.class_weight
        ),
        counts=1,
    ),
    "causal": Case(causal, counts=1),
    "causal sum": Case(causal_sum, counts=1),
    "masked": Case(lambda g: (per_token(g) * g.mask).sum() / g.mask.sum(), counts=1),
    "masked, clamped": Case(lambda g: (per_token(g) * g.mask).sum() / g.mask.sum().clamp(min=1), counts=1),
    "masked, epsilon": Case(
        lambda g: (per_token(g) * g.mask).sum() / (g.mask.double().sum() + 1e-8), counts=1
    ),
    "masked means": Case(lambda g: (per_token(g) * g.mask).mean() / g.mask.double().mean(), counts=1),
    "masked, reciprocal": Case(
        lambda g: (per_token(g) * g.mask).sum() * g.mask.double().sum().reciprocal(), counts=1
    ),
    "normalised weights": Case(lambda g: ((g.mask.double() / g.mask.sum()) * per_token(g)).sum(), counts=1),
    "masked, chosen": Case(
        lambda g: torch.where(g.mask.sum() > 0, (per_token(g) * g.mask).sum() / g.mask.sum(), 0.0), counts=2
    ),
    "sample weights": Case(lambda g: (g.one * per_token(g).mean(1)).sum() / g.one.sum(), counts=1),
    "weighted squares": Case(lambda g: functional.mse_loss(g.z, g.target, weight=g.target.abs()), counts=1),
    "weighted distances": Case(lambda g: functional.l1_loss(g.z, g.target, weight=g.target.abs()), counts=1),
    "mean without missing": Case(
        lambda g: per_token(g).masked_fill(g.mask == 0, float("nan")).nanmean(), counts=1
    ),
    "mean without missing, time first": Case(
        lambda g: g.z[..., 0].T.masked_fill(g.mask.T == 0, math.nan).nanmean(), counts=1
    ),
    "mean without chosen": Case(
        lambda g: torch.nanmean(torch.where(g.mask.unsqueeze(-1) > 0, (g.z - g.target).abs(), math.nan)),
        counts=1,
    ),
    "mean without missing fields": Case(
        lambda g: (g.z.abs() + g.one.masked_fill(g.one > 1, math.nan).view(-1, 1, 1)).nanmean(),
        counts=1,
    ),
    "mean of rows without missing": Case(
        lambda g: torch.where(g.mask.unsqueeze(-1) > 0, g.z.square(), math.nan).mean(-1).nanmean(), counts=1
    ),
    "mixture": Case(lambda g: cross_entropy(*rows(g)) + 0.1 * g.z.square().mean(), counts=1),
    "scaled sum": Case(
        lambda g: (
            torch.add(cross_entropy(*rows(g)), g.z.square().mean(), alpha=0.3)
            + 1e-3 * g.m.last.weight.square().sum()
        ),
        counts=1,
    ),
    # means over samples
    "unreduced": Case(lambda g: cross_entropy(g.z.transpose(1, 2), g.label, reduction="none").mean()),
    "probabilities": Case(lambda g: cross_entropy(g.z.transpose(1, 2), g.target.softmax(-1).transpose(1, 2))),
    "masked by sample": Case(lambda g: ((per_token(g) * g.mask).sum(1) / g.mask.sum(1).clamp(min=1)).mean()),
    "own labels": Case(lambda g: cross_entropy(g.z.transpose(1, 2), g.z.detach().argmax(-1))),
    "unreduced, legacy": Case(lambda g: functional.mse_loss(g.z, g.target, reduce=False).mean()),
    "batchmean": Case(
        lambda g: functional.kl_div(g.z.log_softmax(-1), g.target.softmax(-1), reduction="batchmean")
    ),
    "positive weights": Case(
        lambda g: functional.binary_cross_entropy_with_logits(
            g.z, g.target.sigmoid(), pos_weight=g.m.class_weight
        )
    ),
    "element weights": Case(
        lambda g: functional.binary_cross_entropy_with_logits(
            g.z, g.target.sigmoid(), weight=g.mask.unsqueeze(-1).double()
        )
    ),
    "triplet": Case(lambda g: functional.triplet_margin_loss(g.z[:, 0], g.z[:, 1], g.z[:, 2])),
    "cosine": Case(lambda g: functional.cosine_embedding_loss(g.z[:, 0], g.z[:, 1], g.one.sign())),
    "ranking": Case(lambda g: functional.margin_ranking_loss(g.z[:, 0, 0], g.z[:, 1, 0], g.one.sign())),
    "margin": Case(lambda g: functional.multi_margin_loss(g.z[:, 0], g.ids[:, 0], weight=g.m.class_weight)),
    "sum without NaN": Case(lambda g: g.z.square().nansum() / g.label.shape[0]),
    "scores of one class": Case(
        lambda g: functional.binary_cross_entropy_with_logits(g.z[:, 0, :1].squeeze(-1), g.one.sigmoid())
    ),
    "scores, squeezed": Case(
        lambda g: functional.binary_cross_entropy_with_logits(g.z[:, 0, :1].squeeze(), g.one.sigmoid())
    ),
    "mean without NaN": Case(lambda g: g.z.square().nanmean()),
    "means of samples without NaN": Case(lambda g: g.z.square().nanmean((1, 2)).mean()),
    "over length": Case(lambda g: g.z.square().sum() / len(g.label)),
    "over tokens": Case(lambda g: g.z.square().sum() / len(g.z.flatten(0, 1))),
    "gaussian": Case(lambda g: functional.gaussian_nll_loss(g.z, g.target, g.z.square() + 0.1, full=True)),
    "gaussian module": Case(lambda g: g.m.gaussian(g.z, g.target, g.z.square() + 0.1)),
    "gaussian, one variance": Case(lambda g: functional.gaussian_nll_loss(g.z, g.target, 0.5)),
    "gaussian, a variance per row": Case(
        lambda g: functional.gaussian_nll_loss(g.z, g.target, g.z.square().mean(-1) + 0.1)
    ),
    "gaussian, a variance per channel": Case(
        lambda g: (
            functional.gaussian_nll_loss(
                g.z[:, 0], g.target[:, 0], g.m.class_weight.unsqueeze(0), reduction="sum"
            )
            / len(g.label)
        )
    ),
    "gaussian, unreduced": Case(
        lambda g: functional.gaussian_nll_loss(g.z, g.target, g.z.square() + 0.1, reduction="none").mean()
    ),
    "alignments": Case(lambda g: functional.ctc_loss(**alignments(g))),
    "alignments, module": Case(lambda g: g.m.alignment(**alignments(g))),
    "alignments, unreduced": Case(lambda g: functional.ctc_loss(**alignments(g), reduction="none").mean()),
    "alignments over length": Case(
        lambda g: functional.ctc_loss(**alignments(g), reduction="sum") / len(g.label)
    ),
    "paired products": Case(lambda g: torch.einsum("btc,btc->bt", g.z, g.target).mean()),
    "over size": Case(lambda g: g.z.square().sum() / g.z.shape[0]),
    "over elements": Case(lambda g: g.z.square().sum() / g.z.numel()),
    "python sum": Case(lambda g: sum([g.z[:, i].square().mean() for i in range(3)]) / 3),
    "stacked": Case(
        lambda g: torch.stack([functional.mse_loss(g.z[:, i], g.target[:, i]) for i in range(3)]).mean()
    ),
    # neither
    "legacy sum": Case(lambda g: functional.mse_loss(g.z, g.target, size_average=False), "it is a sum over"),
    "turned batchmean": Case(
        lambda g: functional.kl_div(
            g.z.log_softmax(-1).transpose(0, 1), g.target.softmax(-1).transpose(0, 1), reduction="batchmean"
        ),
        "it is a sum over",
    ),
    "turned classes": Case(lambda g: cross_entropy(g.z[:, 0].T, g.target[:, 0].T.softmax(0)), "places"),
    "module of a mean": Case(lambda g: g.m.softplus(g.z.mean()), "'Softplus' is applied to"),
    "norm of a mean": Case(lambda g: g.m.norm(g.z.mean((0, 1))).square().sum(), "'LayerNorm' is applied"),
    "relativistic": Case(
        lambda g: functional.softplus(g.z[:, 0].sum(-1) - g.z[:, 1].sum(-1).mean(0)).mean(),
        "joins samples with what is made of all of them",
    ),
    "count of a count": Case(
        lambda g: (per_token(g) * g.mask).sum() / (g.mask.double() / g.mask.sum()).sum(), "own values"
    ),
    "root": Case(lambda g: functional.mse_loss(g.z, g.target).sqrt(), "'sqrt' is applied"),
    "spread": Case(lambda g: g.z.std(), "nothing is known of 'std'"),
    "own mask": Case(lambda g: (per_token(g) * own_mask(g)).sum() / own_mask(g).sum(), "own values"),
    "thresholded labels": Case(
        lambda g: cross_entropy(
            g.z.transpose(1, 2), torch.where(g.z.detach().amax(-1) > 0.1, g.z.detach().argmax(-1), -100)
        ),
        "own values",
    ),
    "longest": Case(lambda g: per_token(g).sum() / g.mask.sum(1).max(), "nothing is known of 'max'"),
    "mean without what the model chooses": Case(
        lambda g: torch.where(g.z > 0, g.z, math.nan).nanmean(), "what the model itself selects"
    ),
    "mean without the same of all": Case(
        lambda g: (g.z + g.m.class_weight.masked_fill(g.m.class_weight > 1, math.nan)).nanmean(),
        "lacks the same entries for all samples",
    ),
    "mean without missing that are moved": Case(
        lambda g: g.z.masked_fill(g.mask.unsqueeze(-1) == 0, math.nan).flip(-1).nanmean(),
        "may be made of entries that are missing",
    ),
    "mean of a quotient": Case(lambda g: per_token(g).mean() / g.z.square().mean(), "own values"),
}


class Model(nn.Module):
    """Two operators, a head, and a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, CLASSES)
        self.criterion = nn.CrossEntropyLoss(torch.linspace(1, 2, CLASSES), ignore_index=3)
        self.gaussian, self.alignment = nn.GaussianNLLLoss(full=True), nn.CTCLoss()
        self.softplus, self.norm = nn.Softplus(), nn.LayerNorm(CLASSES)
        self.register_buffer("class_weight", torch.linspace(0.5, 2, CLASSES))
        self.loss = loss

    def forward(
        self, image: Tensor, label: Tensor, ids: Tensor, mask: Tensor, one: Tensor, target: Tensor
    ) -> Tensor:
        x = self.embed(image)
        for block in self.blocks:
            x = block(x)
        given = Given(m=self, z=self.last(x), label=label, ids=ids, mask=mask, one=one, target=target)
        return self.loss(given)


def build(loss: Loss) -> Workload:
    """A workload of one task, `t`, whose first samples count differently: sample 1 has no label, sample 2 no
    mask.
    """
    data = Items(
        count=18,
        image=(TOKENS, 6),
        label=((TOKENS,), CLASSES),
        ids=((TOKENS,), CLASSES),
        mask=((TOKENS,), 2),
        one=(),
        target=(TOKENS, CLASSES),
    )
    generator = torch.Generator().manual_seed(1)
    data.data["label"][torch.rand(18, TOKENS, generator=generator) < 0.3] = -100
    data.data["label"][1::6] = -100
    data.data["mask"][2::6] = 0
    for name in ("image", "one", "target"):
        data.data[name] = data.data[name].double()
    torch.manual_seed(0)  # some masks are of what the model gives, and must not be empty
    return Workload("w", [Task("t", Model(loss).double(), SAMPLES, data)], operators=(Block,))
