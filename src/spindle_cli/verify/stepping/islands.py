"""Islands in one plain process, one after the other: what `train.local_sgd` means.

Each island is the plain training of a workload on its own batches. After every so many steps they average:

    gradient of common = mean over islands of (common - parameters of the island)
    torch.optim.SGD([common], lr, momentum, nesterov).step()
    parameters of every island = common

where common are the parameters after the last average, the initial values before the first. With fewer bits
each island's differences are rounded first: to whole multiples of their largest over 2^(bits - 1) - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spindle_cli.files.request import RunRequest, island_dir
from spindle_cli.files.run_files import StepMetrics
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.types import LocalSgd


def request_of_island(request: RunRequest, number: int) -> RunRequest:
    """The request as of one island, with a folder of its own for what is compared, which this makes."""
    assert request.capture_dir is not None
    if request.islands == 1:
        return request
    run_dir = island_dir(request.run_dir, number)
    capture_dir = run_dir / request.capture_dir.name
    capture_dir.mkdir(parents=True, exist_ok=True)
    return request.model_copy(update={"island": number, "run_dir": run_dir, "capture_dir": capture_dir})


@dataclass(frozen=True)
class PlainOuterSteps:
    """`islands`: the parameters of each, by name. `common`: as they were after the last outer step."""

    every: int
    local_sgd: LocalSgd
    islands: Sequence[Mapping[str, nn.Parameter]]
    common: Mapping[str, nn.Parameter]
    outer: torch.optim.Optimizer

    def after(self, steps_done: int) -> None:
        """The outer step, if there is one after so many steps."""
        if steps_done % self.every:
            return
        with torch.no_grad():
            for name, common in self.common.items():
                moved = [self._rounded(common - island[name]) for island in self.islands]
                common.grad = torch.stack(moved).mean(0)
        self.outer.step()
        with torch.no_grad():
            for island in self.islands:
                for name, parameter in island.items():
                    if name in self.common:
                        parameter.copy_(self.common[name])

    def _rounded(self, moved: Tensor) -> Tensor:
        if self.local_sgd.bits == 32 or not moved.any():
            return moved
        unit = moved.abs().max() / (2 ** (self.local_sgd.bits - 1) - 1)
        rounded: Tensor = unit * torch.round(moved / unit)
        return rounded


def outer_steps_of(
    train: TrainSettings, outer_every: int | None, islands: Sequence[Mapping[str, nn.Parameter]]
) -> PlainOuterSteps | None:
    """None where the train settings have no islands. `outer_every`: instead of what they say."""
    local_sgd = train.local_sgd
    if local_sgd is None:
        return None
    common = {
        name: nn.Parameter(parameter.detach().clone())
        for name, parameter in islands[0].items()
        if parameter.requires_grad
    }
    outer = local_sgd.outer
    optimizer = torch.optim.SGD(
        common.values(), lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov
    )
    return PlainOuterSteps(outer_every or local_sgd.every, local_sgd, islands, common, optimizer)


def mean_metrics(islands: Sequence[StepMetrics]) -> StepMetrics:
    """Return a step of all islands: each loss is the mean of theirs."""
    first, count = islands[0], len(islands)
    if count == 1:
        return first
    losses = {name: sum(island.task_losses[name] for island in islands) / count for name in first.task_losses}
    return first.model_copy(
        update={
            "loss": sum(island.loss for island in islands) / count,
            "task_losses": losses,
            "iteration_s": sum(island.iteration_s for island in islands),
        }
    )
