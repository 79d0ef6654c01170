"""Detection beside captions on one trunk, and recommendation by two towers, as people write them: what is
split, and that it trains as plain PyTorch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import Dataset

from helpers.analysed import analysed
from spindle_cli.training.batches import Batches
from spindle_cli.workload.types import Task, Workload

from .shares import assert_trains_as_plain

WIDTH, CLASSES, STRIDES = 4, 3, (4, 8)


class Pyramid(nn.Module):
    """Features at two strides, the coarse ones added to the fine ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fine, self.coarse = (
            nn.Sequential(nn.Conv2d(channels, WIDTH, 3, 2, 1), nn.GroupNorm(2, WIDTH), nn.ReLU())
            for channels in (3, WIDTH, WIDTH)
        )
        self.lateral = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, images: Tensor) -> list[Tensor]:
        fine = self.fine(self.stem(images))
        coarse = self.coarse(fine)
        return [self.lateral(fine) + functional.interpolate(coarse, size=fine.shape[-2:]), coarse]


class Head(nn.Module):
    """One for all levels: classes, and distances to the sides of a box."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Conv2d(WIDTH, WIDTH, 3, 1, 1)
        self.classes, self.boxes = nn.Conv2d(WIDTH, CLASSES, 1), nn.Conv2d(WIDTH, 4, 1)

    def forward(self, levels: list[Tensor]) -> tuple[Tensor, Tensor]:
        towers = [functional.relu(self.tower(level)) for level in levels]
        logits, sides = (
            torch.cat([head(each).flatten(2).transpose(1, 2) for each in towers], 1)
            for head in (self.classes, self.boxes)
        )
        return logits, functional.softplus(sides)


def points_of(levels: Sequence[Tensor]) -> Tensor:
    made = []
    for level, stride in zip(levels, STRIDES, strict=True):
        rows, columns = (torch.arange(size, device=level.device) for size in level.shape[-2:])
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        made.append((torch.stack([x, y], -1).reshape(-1, 2) + 0.5) * stride)
    return torch.cat(made)


class Detector(nn.Module):
    """A focal loss over all places and a loss of the boxes of those inside of one, by how many these are."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, Head()

    def forward(self, images: Tensor, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        levels = self.trunk(images)
        logits, sides = self.head(levels)
        points, boxes, labels = points_of(levels), targets["boxes"], targets["labels"]
        distances = torch.cat(
            [points[:, None] - boxes[:, None, :, :2], boxes[:, None, :, 2:] - points[:, None]], -1
        )
        inside = (distances.min(-1).values > 0) & (labels >= 0)[:, None]
        area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)[:, None].expand_as(inside)
        best, which = area.masked_fill(~inside, float("inf")).min(-1)
        positive = best < float("inf")
        wanted = functional.one_hot(labels.gather(1, which).clamp(min=0), CLASSES) * positive.unsqueeze(-1)
        errors = functional.binary_cross_entropy_with_logits(logits, wanted.to(logits), reduction="none")
        right = (logits.sigmoid() - 1 + wanted).abs()
        loss = ((1 - right) ** 2 * errors).sum() / positive.sum().clamp(min=1)
        if positive.sum() == 0:
            return {"loss": loss + sides.sum() * 0}
        target = distances.gather(2, which[..., None, None].expand(-1, -1, 1, 4)).squeeze(2)
        return {"loss": loss + functional.l1_loss(sides[positive], target[positive] / 8)}


class Captioner(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.embed, self.out = trunk, nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, images: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        seen = self.trunk(images)[-1].flatten(2).transpose(1, 2)
        x, labels = self.embed(tokens[:, :-1]), tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.layer(x, seen, tgt_mask=mask, tgt_is_causal=True)
        keep = torch.arange(x.shape[1]) < (lengths - 1)[:, None]
        errors = functional.cross_entropy(self.out(x).transpose(1, 2), labels, reduction="none")
        return (errors * keep).sum() / keep.sum()


class Scenes(Dataset[Any]):
    """(image, target) with none to three boxes; the first `empty` images have none."""

    def __init__(self, empty: int = 0) -> None:
        self.empty = empty

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        drawn = torch.Generator().manual_seed(index)
        count = 0 if index < self.empty else index % 4
        corner, size = (torch.rand(count, 2, generator=drawn) for _ in range(2))
        boxes = torch.cat([8 * corner, 8 * corner + 5 + 5 * size], 1)
        labels = torch.randint(0, CLASSES, (count,), generator=drawn)
        return torch.randn(3, 16, 16, generator=drawn), {"boxes": boxes, "labels": labels}


def padded_boxes(items: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    boxes, labels = torch.zeros(len(items), 3, 4), torch.full((len(items), 3), -1)
    for row, (_, target) in enumerate(items):
        boxes[row, : len(target["labels"])], labels[row, : len(target["labels"])] = target.values()
    return torch.stack([image for image, _ in items]), {"boxes": boxes, "labels": labels}


class Captions(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(100 + index)
        tokens = torch.randint(1, 11, (3 + index % 4,), generator=drawn)
        return {"images": torch.randn(3, 16, 16, generator=drawn), "tokens": tokens, "name": f"{index}.png"}


def padded_words(items: list[Any]) -> dict[str, Tensor]:
    tokens = [item["tokens"] for item in items]
    return {
        "images": torch.stack([item["images"] for item in items]),
        "tokens": torch.stack([functional.pad(each, (0, 6 - len(each))) for each in tokens]),
        "lengths": torch.tensor([len(each) for each in tokens]),
    }


def scenes(empty: int = 0) -> Workload:
    torch.manual_seed(0)
    trunk = Pyramid()
    return Workload(
        "scenes",
        [
            Task("detect", Detector(trunk), 4, Scenes(empty), collate=padded_boxes),
            Task("caption", Captioner(trunk), 4, Captions(), collate=padded_words),
        ],
        (Pyramid, Head, nn.TransformerDecoderLayer),
    )


def check(made: Workload, plain: Workload, whole: dict[str, list[str]]) -> None:
    graph = analysed(made)
    for task in plain.tasks:
        found = graph.tasks[task.name]
        assert [op.target or "loss" for op in found.ops if op.coupled] == whole[task.name]
        batch = Batches(task, seed=1).rows(0, 0, task.batch_size)
        assert_trains_as_plain(task, found, batch, [0, 1, task.batch_size])


def test_detection_and_captions_on_one_trunk() -> None:
    check(scenes(), scenes(), {"detect": ["loss"], "caption": []})


def test_a_batch_without_a_box() -> None:
    """It takes the other way out of the loss."""
    graph, (task, _) = analysed(scenes()).tasks["detect"], scenes(empty=8).tasks
    batch = Batches(task, seed=1).rows(0, 0, 4)
    assert batch["targets_labels"].max() == -1
    assert_trains_as_plain(task, graph, batch, [0, 1, 4])


@dataclass
class Clicked:
    user: Tensor
    history: Tensor
    item: Tensor
    weight: Tensor


class Clicks(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Clicked:
        drawn = torch.Generator().manual_seed(index)
        history = torch.randint(1, 12, (4,), generator=drawn)
        history[1 + index % 4 :] = 0
        user, item = (torch.randint(count, (), generator=drawn) for count in (9, 12))
        return Clicked(user, history, item, 0.1 + torch.rand((), generator=drawn))


def together(items: list[Clicked]) -> Clicked:
    return Clicked(*(torch.stack([getattr(item, each.name) for item in items]) for each in fields(Clicked)))


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.net(x), dim=-1)


class Frequencies(nn.Module):
    """How many steps lie between two times that an item comes, estimated as training goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(12))
        self.register_buffer("gap", torch.full((12,), 10.0))
        self.register_buffer("step", torch.zeros(()))

    def forward(self, item: Tensor) -> Tensor:
        with torch.no_grad():
            self.step += 1
            seen = torch.zeros_like(self.last).index_fill(0, item, 1.0) > 0
            self.gap.copy_(torch.where(seen, 0.9 * self.gap + 0.1 * (self.step - self.last), self.gap))
            self.last.copy_(torch.where(seen, self.step, self.last))
            return -self.gap[item].clamp(min=1.0).log()


class TwoTowers(nn.Module):
    """In-batch negatives, the hardest two of them, corrected by how often each item comes."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, WIDTH), nn.Embedding(12, WIDTH)
        self.bag = nn.EmbeddingBag(12, WIDTH, mode="mean", padding_idx=0)
        self.query, self.candidate = Tower(2 * WIDTH), Tower(WIDTH)
        self.frequencies, self.scale = Frequencies(), nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: Clicked) -> Tensor:
        query = self.query(torch.cat([self.users(batch.user), self.bag(batch.history)], -1))
        logits = query @ self.candidate(self.items(batch.item)).T * self.scale.exp()
        logits = logits - self.frequencies(batch.item)[None]
        own = torch.eye(len(batch.item), dtype=torch.bool)
        logits = logits.masked_fill((batch.item[None] == batch.item[:, None]) & ~own, -1e9)
        negatives = logits.masked_fill(own, -1e9).topk(2, dim=1).values
        chosen = torch.cat([logits.diagonal()[:, None], negatives], 1)
        errors = functional.cross_entropy(chosen, torch.zeros_like(batch.item), reduction="none")
        return (errors * batch.weight).sum() / batch.weight.sum()


def shop() -> Workload:
    torch.manual_seed(0)
    task = Task("click", TwoTowers(), 8, Clicks(), collate=together)
    return Workload("shop", [task], (Tower, Frequencies, nn.EmbeddingBag))


def test_two_towers_with_hard_negatives_and_a_correction_that_moves() -> None:
    made, plain = shop(), shop()
    check(made, plain, {"click": ["frequencies", "loss"]})
    ours, theirs = (each.tasks[0].module.frequencies for each in (made, plain))
    for name, buffer in theirs.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer), name
    assert theirs.step == 1
