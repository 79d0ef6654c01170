"""The models that HAP was measured on: their sizes, and that they train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.data import default_collate

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.load import load_abstract
from spindle_cli.workload.types import Workload
from spindle_cli.zoo.single_task import bert, vgg, vit

Build = Callable[..., Workload]

CONFIGS = Path(__file__).parents[2] / "configs" / "workloads"


@pytest.mark.parametrize(("name", "millions"), [("vgg19", 139.6), ("vit", 85.1), ("bert-base", 136.3)])
def test_they_are_as_large_as_published(name: str, millions: float) -> None:
    """VGG19 with 10 classes; ViT-Base and BERT-Base have 86 and 110 million with other heads and words."""
    (task,) = load_abstract(str(CONFIGS / f"{name}.yaml")).workload.tasks
    assert task.batch_size == 2048
    assert sum(p.numel() for p in task.module.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize("build", [vgg.build, vit.build, bert.build])
def test_small_ones_give_every_parameter_a_gradient(build: Build) -> None:
    (task,) = build("laptop").tasks
    task.module(**default_collate([task.dataset[i] for i in range(3)])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.module.parameters())


@pytest.mark.parametrize(("build", "name"), [(vgg.build, "vgg"), (vit.build, "vit"), (bert.build, "bert")])
def test_what_there_is_not_is_refused(build: Build, name: str) -> None:
    with pytest.raises(WorkloadError, match=f"{name}: size: found 'huge', expected one of paper, laptop"):
        build("huge")
    with pytest.raises(WorkloadError, match=f"{name}: batch_sizes: found 'x'"):
        build("laptop", {"x": 1})
