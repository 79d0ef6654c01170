"""The plain process on its own: flows are followed, shared parameters are named once, losses are weighted."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import Batches
from spindle_cli.verify.counted import counted_losses
from spindle_cli.verify.evaluated import evaluate_all
from spindle_cli.verify.flow import run_flow
from spindle_cli.verify.plain import backward, generator_states, require_no_chance
from spindle_cli.verify.stepping.arithmetic import Arithmetic, move_to
from spindle_cli.verify.stepping.named import parameters_by_name
from spindle_cli.workload.types import FlowTask, Metric, Task, Workload


class Scale(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


class Gap(nn.Module):
    """Mean of (a - b): tells its arguments apart."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b).mean()


def items(value: float) -> list[dict[str, Tensor]]:
    return [{"x": torch.tensor([value])} for _ in range(4)]


def flow_task(scale: Scale) -> FlowTask:
    """2 (x scale) - x, over a batch of 2."""
    double, gap = Scale(2.0), Gap()
    task = FlowTask("flow", 2, items(3.0))
    task.add_flow("x", gap, argument="b")
    task.add_flow(scale, double)
    task.add_flow("x", scale)
    task.add_flow(double, gap, argument="a")
    return task


class Mean(nn.Module):
    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.scale(x).mean()}


def test_a_flow_task_is_called_in_the_order_of_its_flows() -> None:
    task = flow_task(Scale(5.0))
    assert run_flow(task, {"x": torch.tensor([[3.0], [1.0]])}).item() == pytest.approx((27 + 9) / 2)


def test_shared_parameters_are_named_once_and_take_the_gradients_of_weighted_losses() -> None:
    shared = Scale(5.0)
    tasks = [Task("plain", Mean(shared), 2, items(7.0), weight=10.0), flow_task(shared)]
    workload = Workload("w", tasks)
    parameters = parameters_by_name(workload)
    assert list(parameters) == ["plain.scale.by", "flow.scale_2.by"]
    move_to(workload, torch.device("cpu"), torch.float64)
    batches = {task.name: [Batches(task, 0).rows(0, 0, task.batch_size)] for task in tasks}
    arithmetic = Arithmetic(torch.device("cpu"), torch.float64)
    losses = {task.name: backward(task, batches[task.name], arithmetic, None, task.weight) for task in tasks}
    assert losses == {"plain": 35.0, "flow": 27.0}
    assert shared.by.grad is not None
    assert shared.by.grad.dtype == torch.float64
    assert float(shared.by.grad) == 10 * 7 + 2 * 3


class Shrinks(nn.Module):
    """Changes what it computes with; an operator of its own, whose samples stay together."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.5)
        return self.linear(x)


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), Shrinks()

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.last(self.first(x)), label)


def test_of_a_mean_over_several_batches_each_goes_backward_before_the_next_forward() -> None:
    """As a run has it: what a later forward changes is not what an earlier one computed with."""
    torch.manual_seed(0)
    samples = [{"x": torch.randn(3), "label": torch.tensor(number % 3)} for number in range(8)]
    model, plain = Labelled(), Labelled()
    plain.load_state_dict(model.state_dict())
    task = Task("t", model, 4, samples)
    counted = counted_losses(Workload("w", [task], (nn.Linear, Shrinks)))["t"]
    batches = [Batches(task, 0).rows(number, 0, 4) for number in range(2)]
    counted.fit(batches)
    loss = backward(task, batches, Arithmetic(torch.device("cpu"), torch.float32), counted, 1.0)
    expected = 0.0
    for batch in batches:
        part = plain(**batch) / 2
        part.backward()
        expected += float(part.detach())
    assert loss == pytest.approx(expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_drawing_random_numbers_is_noticed() -> None:
    workload = Workload("w", [Task("t", nn.Sequential(nn.Dropout(0.5)), 2, items(1.0))])
    cpu = torch.device("cpu")
    before = generator_states(cpu)
    require_no_chance(workload, before, cpu)
    torch.rand(1)
    with pytest.raises(WorkloadError, match=r"\(Dropout\)"):
        require_no_chance(workload, before, cpu)


def test_drawing_on_any_cuda_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload("w", [Task("t", nn.Linear(1, 1), 2, items(1.0))])
    states = [torch.zeros(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone() for state in states])
    gpu = torch.device("cuda")
    before = generator_states(gpu)
    require_no_chance(workload, before, gpu)
    states[1][8] = 4  # the second's offset
    with pytest.raises(WorkloadError, match="draws random numbers"):
        require_no_chance(workload, before, gpu)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.mean(), "chance": x.sigmoid().bfloat16(), "label": x.round().clamp(0, 1)}


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda given: nn.functional.binary_cross_entropy(given["chance"], given["label"]), "RuntimeError"),
        (lambda given: given["label"], "element"),
    ],
)
def test_a_metric_that_fails_is_named_with_its_task_and_the_types_of_what_it_was_given(
    metric: Metric, message: str
) -> None:
    data = items(0.5)
    task = Task("click", Halved(), 2, data, eval_dataset=data[:2], metrics={"logloss": metric})
    found = evaluate_all(Workload("w", tasks=[task]), 0, 1, dict, nullcontext)
    with pytest.raises(WorkloadError, match="the metric 'logloss' of task 'click' failed: ") as caught:
        list(found)
    assert message in caught.value.message
    assert caught.value.hint == "Forward gives chance (bfloat16), label (float32) beside its loss."


class Positions(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.mean(), "logits": x}


def test_results_whose_size_follows_the_length_of_a_batch_are_refused_by_name() -> None:
    lengths = [{"x": torch.ones(length)} for length in (3, 3, 5, 5)]
    task = Task("tag", Positions(), 2, lengths, eval_dataset=lengths, metrics={"f1": lambda given: 0.0})
    found = evaluate_all(Workload("w", tasks=[task]), 0, 1, dict, nullcontext)
    with pytest.raises(
        WorkloadError, match="task 'tag': metrics are given one tensor with 'logits'"
    ) as caught:
        list(found)
    assert "gives torch.float32 (2, 3) and torch.float32 (2, 5)" in caught.value.message
