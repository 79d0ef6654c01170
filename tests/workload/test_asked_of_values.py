"""What forward asks of traced values it is told as of tensors, and what it computes stays the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributions as distributions
import torch.nn.functional as functional
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload
from workload.shares import run_plain, run_shares

from .asked_elsewhere import doubled_if_tensor
from .toy import WIDTH, Block, Items

BATCH = 6
Use = Callable[[Tensor, Tensor], Tensor]
_ISINSTANCE = isinstance


class Net(nn.Module):
    """A block, what a test does with what it gives and a label, and another block."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.first, self.second, self.use = Block(), Block(), use

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.use(self.second(self.first(x)), label).pow(2).mean()


def _doubled_if(asked: Callable[[Tensor], object], classes: Any) -> Use:
    return lambda h, _: h * 2 if isinstance(asked(h), classes) else h


def _doubled_if_either(h: Tensor, _: Tensor) -> Tensor:
    return h * 2 if isinstance(h, (tuple, Tensor)) else h


def _of_logits(h: Any, _: Tensor) -> Any:
    return h.logits if hasattr(h, "logits") else h.exp()


def _normal(h: Tensor, label: Tensor) -> Tensor:
    drawn = distributions.Normal(h, functional.softplus(h) + 0.1)
    return drawn.log_prob(label[:, None, None].float()).sum(-1) + drawn.entropy().mean(-1)


def _in_its_own_numbers(h: Tensor, _: Tensor) -> Tensor:
    """A number among a distribution's parameters is in those of the other one."""
    short = h.bfloat16()
    return distributions.Normal(short, 0.1).log_prob(short * 2).float()


def _squashed(h: Tensor, label: Tensor) -> Tensor:
    base = distributions.Independent(distributions.Normal(h, h.exp()), 1)
    made = distributions.TransformedDistribution(base, [distributions.TanhTransform(cache_size=1)])
    return made.log_prob((label[:, None, None].float() / 4).expand_as(h))


def _divergence(h: Tensor, _: Tensor) -> Tensor:
    prior = distributions.Normal(torch.zeros_like(h), torch.ones_like(h))
    return distributions.kl_divergence(distributions.Normal(h, h.exp()), prior)


def _part_added(h: Tensor, _: Tensor) -> Tensor:
    h = h.clone()
    h[:, 0] += 1
    h[:, 1:] *= h[:, :1]
    h[..., -1] -= h[..., 0]
    return h


def _number_of_numpy(h: Tensor, _: Tensor) -> Tensor:
    steps, width = h.shape[1:]
    return np.float64(0.5) * h * np.sqrt(width) / round(steps / 3) / math.ceil(steps / 3)


def _numbers_of_shapes(h: Tensor, _: Tensor) -> Tensor:
    flat = h.reshape(len(h), int(np.prod(h.shape[1:])))
    return flat * np.prod(h.shape[1:]) / np.sum(h.shape[1:]) / np.max(h.shape[1:]) / np.min(h.shape[1:])


def _places_by_a_sample(h: Tensor, _: Tensor) -> Tensor:
    """As DETR and those that copy it make positions: of the size of one sample alone."""
    places = torch.ones_like(h[0, [0]]).cumsum(0) + torch.zeros_like(h[0], dtype=h.dtype)
    return h + places / torch.full_like(h[0, 0], 3.0) + h[0].new_ones(WIDTH)


RECIPES = {1: 1.0, 3: 2.0}


def _called_if_it_can_be(value: Any) -> Any:
    return value() if callable(value) else value


USES: dict[str, Use] = {
    "a recipe for its dimensions": lambda h, _: h * RECIPES[h.ndim],
    "what callable says": lambda h, _: (
        _called_if_it_can_be(h) * (2 if _called_if_it_can_be(h.shape[1] > 9) else 3)
    ),
    "a gradient where there is none": lambda h, _: h * (2.0 if h.detach().grad is None else 3.0),
    "the size of a sample": _places_by_a_sample,
    "isinstance": doubled_if_tensor,
    "isinstance of a union": _doubled_if(lambda h: h, Tensor | list),
    "isinstance of what is none": _doubled_if(lambda h: h, Callable),
    "isinstance of a fake": _doubled_if(lambda h: h, torch._subclasses.FakeTensor),
    "isinstance of a size": _doubled_if(lambda h: h.shape[0], int),
    "isinstance of all sizes": _doubled_if(lambda h: h.shape, tuple),
    "isinstance of a dtype": _doubled_if(lambda h: h.dtype, torch.dtype),
    "isinstance of several results": _doubled_if(lambda h: h.max(1), tuple),
    "isinstance of one result": _doubled_if(lambda h: h.max(1)[0], Tensor),
    "isinstance of several": _doubled_if_either,
    "a mark of forward's own": lambda h, label: _marked(h, label),
    "is_tensor": lambda h, _: h * 2 if torch.is_tensor(h) else h,
    "hasattr": _of_logits,
    "log-probability": _normal,
    "log-probability by a number": _in_its_own_numbers,
    "log-probability of classes": lambda h, label: distributions.Categorical(logits=h.mean(1)).log_prob(
        label
    ),
    "log-probability behind a transform": _squashed,
    "divergence": _divergence,
    "parts changed by an operator": _part_added,
    "numbers of numpy": _number_of_numpy,
    "numbers of shapes by numpy": _numbers_of_shapes,
}


def workload(use: Use) -> Workload:
    data = Items(x=(4, WIDTH), label=((), 3))
    return Workload("w", [Task("t", Net(use), BATCH, data)], (Block,))


@pytest.mark.parametrize("name", USES)
def test_what_forward_asks_is_answered_as_of_a_tensor(name: str) -> None:
    torch.manual_seed(3)
    distributions.Distribution.set_default_validate_args(True)  # torch.compile leaves it off
    graph = analysed(workload(USES[name]))
    task = graph.tasks["t"]
    assert not any(op.coupled for op in task.ops)
    batch = {"x": torch.randn(BATCH, 4, WIDTH), "label": torch.randint(3, (BATCH,))}
    shares = run_shares(task, batch, {op.index: 3 for op in task.ops})
    torch.testing.assert_close(shares, run_plain(task.task, batch))
    assert isinstance is _ISINSTANCE and distributions.Distribution._validate_args


def _looked_at_between(h: Tensor, _: Tensor) -> Tensor:
    h = h.clone()
    part = h[:, 0]
    part += 1
    seen = h.sum()
    h[:, 0] = part
    return h * seen


def _looked_at_by_another_view(h: Tensor, _: Tensor) -> Tensor:
    h = h.clone()
    other = h[:, :2]
    h[:, 0] += 1
    return other * 2


def _changed_once_put_back(h: Tensor, _: Tensor) -> Tensor:
    h = h.clone()
    part = h[:, 0]
    part += 1
    h[:, 0] = part
    part *= 2
    return h


def _looked_at_once_put_back(h: Tensor, _: Tensor) -> Tensor:
    h = h.clone()
    part = h[:, 0]
    part += 1
    h[:, 0] = part
    h[:, 0] += 5
    return h + part[:, None]


def _marked(h: Tensor, _: Tensor) -> Tensor:
    h.scale = 3  # type: ignore[attr-defined]
    return h * h.scale  # type: ignore[attr-defined, no-any-return]


def _changed_by_a_view_that_nobody_looks_at(h: Tensor, _: Tensor) -> Tensor:
    h = h.clone()
    view = h.flatten(1)
    h += 1
    view.mul_(2)
    return h


SEEN = [_looked_at_between, _looked_at_by_another_view, _changed_once_put_back, _looked_at_once_put_back]


@pytest.mark.parametrize("use", [*SEEN, _changed_by_a_view_that_nobody_looks_at])
def test_a_changed_part_that_something_else_looks_at_is_refused(use: Use) -> None:
    with pytest.raises(WorkloadError, match="in place, which other operators or glue use"):
        analysed(workload(use))


def _in_place(change: Callable[[Tensor], object]) -> Use:
    def use(h: Tensor, _: Tensor) -> Tensor:
        h = h.clone()
        change(h)
        return h

    return use


def _put(part: Callable[[Tensor], Tensor], at: Any) -> Callable[[Tensor], object]:
    return lambda h: h.__setitem__(at, part(h))


def _shifted_and_added(h: Tensor) -> None:
    h[:, 1:] += h[:, :-1]


def _first_row_taken_away(h: Tensor) -> None:
    h -= h[:, :1]


def _square_turned(h: Tensor) -> None:
    h[:, :, :4] *= h[:, :, :4].mT


ALL = slice(None)
READ: dict[str, Callable[[Tensor], object]] = {
    "added to its neighbour": _shifted_and_added,
    "without the first row": _first_row_taken_away,
    "first sample taken away": lambda h: h.sub_(h[:1]),
    "product with its own transpose": _square_turned,
    "moved by one": _put(lambda h: h[:, :-1], (ALL, slice(1, None))),
}
NOT_READ: dict[str, Callable[[Tensor], object]] = {
    "by itself": lambda h: h.add_(h),
    "by itself as another view": lambda h: h.add_(h[:]),
    "other rows": _put(lambda h: h[:, 2:], (ALL, slice(0, 2))),
    "every second row": _put(lambda h: h[:, ::2], (ALL, slice(1, None, 2))),
    "a column in another row": _put(lambda h: h[:, :, 0], (ALL, 0, slice(1, 5))),
    "where a mask is": lambda h: h.__setitem__(h.detach() > 0, 0.0),
}


@pytest.mark.parametrize("name", READ)
def test_a_change_that_reads_what_it_has_changed_is_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match="in place and reads what it may have changed before"):
        analysed(workload(_in_place(READ[name])))


@pytest.mark.parametrize("name", NOT_READ)
def test_a_change_by_other_parts_of_the_same_tensor_is_taken(name: str) -> None:
    torch.manual_seed(3)
    task = analysed(workload(_in_place(NOT_READ[name]))).tasks["t"]
    batch = {"x": torch.randn(BATCH, 4, WIDTH), "label": torch.randint(3, (BATCH,))}
    torch.testing.assert_close(run_shares(task, batch, {0: 2, 1: 3}), run_plain(task.task, batch))


@pytest.mark.parametrize("name", ["data", "grad"])
def test_what_torch_has_of_a_tensor_is_not_set_in_a_trace(name: str) -> None:
    def use(h: Tensor, _: Tensor) -> Tensor:
        setattr(h, name, h.detach())
        return h

    with pytest.raises(WorkloadError, match=rf"_asked_of_values.py.*calls setattr\('{name}'\) of a Tensor"):
        analysed(workload(use))


def test_a_changed_part_is_refused_where_gradients_do_not_see_the_change() -> None:
    def use(h: Tensor, _: Tensor) -> Tensor:
        h = h.clone()
        part = h[:, 0]
        with torch.no_grad():
            part += 1
        h[:, 0] = part
        return h

    with pytest.raises(WorkloadError, match="in place where gradients are switched off"):
        analysed(workload(use))


def test_a_parameter_is_told_from_another_tensor() -> None:
    def use(h: Tensor, _: Tensor) -> Tensor:
        scales = net.second.norm.weight
        return h * 2 if isinstance(scales, nn.Parameter) and not isinstance(h, nn.Parameter) else h

    net = Net(use)
    task = analysed(Workload("w", [Task("t", net, BATCH, Items(x=(4, WIDTH), label=((), 3)))], (Block,)))
    batch = {"x": torch.randn(BATCH, 4, WIDTH), "label": torch.zeros(BATCH, dtype=torch.int64)}
    graph = task.tasks["t"]
    torch.testing.assert_close(run_shares(graph, batch, {}), run_plain(graph.task, batch))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return distributions.Normal(self.linear(x), 1.0).log_prob(x)


def test_an_operator_with_a_distribution_in_it_is_split() -> None:
    net = Net(lambda h, _: h)
    net.second = Head()  # type: ignore[assignment]
    data = Items(x=(4, WIDTH), label=((), 3))
    graph = analysed(Workload("w", [Task("t", net, BATCH, data)], (Block, Head)))
    assert not any(op.coupled for op in graph.tasks["t"].ops)
