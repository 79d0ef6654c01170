"""What a task may declare to change from step to step, and what forwards may not do with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.checks import check_workload
from spindle_cli.workload.step_values import HELD_AS, StepValues, WatchedNumber
from spindle_cli.workload.types import FlowTask, Task, Workload

SAMPLES = [{"x": torch.linspace(-1.0, 1.0, 4) * (index + 1)} for index in range(8)]
NUMBER = 0.5


class Layer(nn.Module):
    def __init__(self, compute: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = 1.0
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h * self.gain if self.compute is None else self.compute(self, h)


class Net(nn.Module):
    def __init__(
        self,
        loss: Callable[[Any, Tensor], Tensor] | None = None,
        inside: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.layer = Layer(inside)
        self.beta = 0
        self.config = SimpleNamespace(scale=1.0)
        self.table = {"scale": [1.0, 2.0]}
        self.register_buffer("held", torch.zeros(()))
        self.loss = loss or (lambda net, h: (net.beta * h.square()).mean())

    @property
    def doubled(self) -> float:
        return 2.0 * self.beta

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self, self.layer(x))


def workload(
    values: Mapping[str, Any], net: Net | None = None, more: Mapping[str, Any] | None = None
) -> Workload:
    net = Net() if net is None else net
    tasks = [Task("net", net, batch_size=4, dataset=SAMPLES, step_values=values)]
    if more is not None:
        tasks.append(Task("other", net, batch_size=4, dataset=SAMPLES, step_values=more))
    return Workload("values", tasks, operators=(Layer,))


def loss_at(made: Workload, step: int) -> float:
    """By its ops, at a step."""
    graph = analysed(made)
    StepValues.of(made).begin(step)
    values = dict.fromkeys(["x"], torch.stack([sample["x"] for sample in SAMPLES[:4]]))
    task = graph.tasks["net"]
    for op in task.ops:
        result = task.op_module(op)(*(values[name] for name in (*op.fields, *op.inputs)))
        if op.is_loss:
            return float(result.detach())
        values.update(zip(op.outputs, result, strict=True))
    raise AssertionError("a task ends with its loss")


BETWEEN: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "scaled": lambda net, h: (net.beta * h.square()).mean(),
    "mixed": lambda net, h: (1 - net.beta) * h.square().mean() + net.beta * h.abs().mean(),
    "a power": lambda net, h: h.abs().pow(1 + net.beta).mean(),
    "divided": lambda net, h: (h / (net.beta + 1)).logsumexp(1).mean(),
    "math's": lambda net, h: math.exp(net.beta) * h.square().mean(),
    "an argument": lambda net, h: nn.functional.leaky_relu(h, net.beta).square().mean(),
    "smoothed": lambda net, h: nn.functional.cross_entropy(
        h, h.detach().argmax(1), label_smoothing=net.beta / 2
    ),
    "made a tensor": lambda net, h: (h.new_tensor(net.beta) * h.square()).mean(),
    "full": lambda net, h: (torch.full_like(h, net.beta) * h.square()).mean(),
    "two of them": lambda net, h: (net.beta * h.square() * net.layer.gain).mean(),
}


@pytest.mark.parametrize("kind", BETWEEN)
def test_a_trace_reads_the_number_of_each_step(kind: str) -> None:
    net = Net(BETWEEN[kind])
    made = workload({"beta": lambda step: step / 4, "layer.gain": lambda step: 1.0 + step}, net)
    x = torch.stack([sample["x"] for sample in SAMPLES[:4]])
    for step in (0, 1, 3):
        found = loss_at(made, step)
        net.beta, net.layer.gain = step / 4, 1.0 + step
        assert found == pytest.approx(float(net(x).detach()), rel=1e-6), step


DECIDES: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "if": lambda net, h: h.square().mean() * net.beta if net.beta > 0 else h.mean(),
    "truth": lambda net, h: h.square().mean() if net.beta else h.mean(),
    "int": lambda net, h: h[:, : 1 + int(net.beta)].square().mean(),
    "float": lambda net, h: float(net.beta) * h.square().mean(),
    "max": lambda net, h: max(net.beta, 0.1) * h.square().mean(),
    "round": lambda net, h: round(net.beta) * h.square().mean(),
    "computed": lambda net, h: h.square().mean() if 1 - net.beta > 0.5 else h.mean(),
}


@pytest.mark.parametrize("kind", DECIDES)
def test_forward_does_not_decide_by_it(kind: str) -> None:
    with pytest.raises(
        WorkloadError, match=r"test_step_values\.py:\d+: task 'net': forward decides by"
    ) as caught:
        analysed(workload({"beta": float}, Net(DECIDES[kind])))
    assert "Decide in the function of the step" in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in DECIDES if kind != "float"])
def test_neither_does_an_operator(kind: str) -> None:
    def inside(layer: Any, h: Tensor) -> Tensor:
        layer.beta = layer.gain
        return h * DECIDES[kind](SimpleNamespace(beta=layer.gain), h)

    net = Net(lambda _, h: h.square().mean(), inside)
    with pytest.raises(WorkloadError, match=r"forward decides by net/layer\.gain"):
        analysed(workload({"layer.gain": float}, net))


def test_torch_may_look_at_it() -> None:
    def dropped(layer: Any, h: Tensor) -> Tensor:
        return nn.functional.dropout(h, layer.gain)

    analysed(
        workload({"layer.gain": lambda step: 0.1 + step / 10}, Net(lambda _, h: h.square().mean(), dropped))
    )


def test_what_is_computed_with_a_number_asks_as_well() -> None:
    asked = WatchedNumber(0.25, "net/beta")
    for found in (1 - asked, asked * 2, -asked, asked / 4, 2**asked, abs(asked)):
        with pytest.raises(WorkloadError, match="decides by net/beta"):
            bool(found > 0)
    assert math.exp(asked) == math.exp(0.25) and repr(asked) == "0.25" and f"{asked:.1f}" == "0.2"


@pytest.mark.parametrize(
    ("path", "start", "get"),
    [
        ("beta", 0.0, lambda net: net.beta),
        ("layer.gain", 0.0, lambda net: net.layer.gain),
        ("*.gain", 0.0, lambda net: net.layer.gain),
        ("config.scale", 0.0, lambda net: net.config.scale),
        ("table.scale.1", 0.0, lambda net: net.table["scale"][1]),
        ("test_step_values:NUMBER", 0.0, lambda _: globals()["NUMBER"]),
    ],
)
def test_a_path_names_a_place(path: str, start: float, get: Callable[[Net], float]) -> None:
    import sys

    sys.modules.setdefault("test_step_values", sys.modules[__name__])
    net = Net()
    values = StepValues.of(workload({path: [[0, 0.0], [4, 2.0], [5, 1.0]]}, net))
    seen = []
    for step in (0, 1, 4, 5, 9):
        assert values.begin(step) == {f"net/{path}": get(net)}
        seen.append(get(net))
    assert seen == [start, 0.5, 2.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("path", "schedule", "said"),
    [
        ("gamma", float, r"task 'net': step_values: 'gamma': Net has no 'gamma'"),
        ("layer.x.gain", float, r"Layer has no 'x'"),
        ("*.nothing", float, r"no module has a number by '\*\.nothing'"),
        ("held", float, r"'held' is a tensor, expected a number"),
        ("doubled", float, r"'doubled' is a property of Net"),
        ("training", float, r"'training' is True, expected a number to begin with"),
        ("no_such_module:X", float, r"there is no module 'no_such_module'"),
        ("beta", "fast", r"'beta' has 'fast', expected a function of the step"),
        ("beta", [[1, 0.5], [0, 0.1]], r"expected a function of the step, \[\[step, number\]"),
        ("beta", [], r"expected a function of the step"),
        ("beta", math.inf, r"expected a function of the step"),
        ("beta", lambda step: "much", r"net/beta gave 'much' for step 0; expected a finite number"),
        ("beta", lambda step: math.nan, r"net/beta gave nan for step 0"),
        ("beta", lambda step: 1 / step, r"net/beta failed for step 0: ZeroDivisionError.*test_step_values"),
    ],
)
def test_what_is_no_number_of_a_step_is_refused(path: str, schedule: Any, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        StepValues.of(workload({path: schedule})).reset()


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    net = Net()
    values = StepValues.of(workload({"beta": lambda step: torch.tensor(0.5) * step}, net))
    values.begin(3)
    assert net.beta == 1.5 and type(net.beta) is float


def test_step_values_are_a_mapping() -> None:
    with pytest.raises(WorkloadError, match=r"step_values is \['beta'\], expected a schedule by attribute"):
        check_workload(workload(["beta"]), "here")  # type: ignore[arg-type]


def test_tasks_that_share_a_module_share_its_numbers() -> None:
    shared: Callable[[int], float] = lambda step: step / 2  # noqa: E731 - one object for both
    made = workload({"beta": shared}, more={"beta": shared})
    assert list(StepValues.of(made).by_name) == ["net/beta"]
    analysed(made)
    with pytest.raises(WorkloadError, match=r"'beta' is declared twice, as net/beta too"):
        StepValues.of(workload({"beta": shared}, more={"beta": lambda step: 1.0}))


def test_a_task_that_shares_the_module_without_saying_so_reads_it_too() -> None:
    net = Net()
    made = workload({"beta": lambda step: step / 4}, net, more={})
    graph = analysed(made)
    for task in graph.tasks.values():
        assert any(str(node.target) == f"{HELD_AS}0" for op in task.ops for node in op.graph.nodes), (
            task.task.name
        )


def test_the_fingerprint_does_not_depend_on_the_number() -> None:
    prints = set()
    for first in (0, 0.0, 0.25, 1e-5):
        net = Net()
        net.beta = net.layer.gain = first
        made = workload({"beta": lambda step, first=first: first, "layer.gain": float}, net)
        StepValues.of(made).reset()
        prints.add(analysed(made).fingerprint)
    assert len(prints) == 1


def test_the_modules_of_flows_have_numbers_too() -> None:
    class Loss(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.square().mean()

    layer = Layer()
    task = FlowTask(
        "flow", batch_size=4, dataset=SAMPLES, step_values={"layer.gain": lambda step: step + 1.0}
    )
    task.add_flow("x", layer).add_flow(layer, Loss())
    made = Workload("flows", [task])
    analysed(made)
    assert StepValues.of(made).begin(2) == {"flow/layer.gain": 3.0}
    assert layer.gain == 3.0


def test_analysis_leaves_numbers_as_they_were() -> None:
    net = Net()
    made = workload({"beta": float, "layer.gain": lambda step: 0.5}, net)
    StepValues.of(made).reset()
    analysed(made, evaluates=True)
    assert (type(net.beta), net.beta, type(net.layer.gain), net.layer.gain) == (float, 0.0, float, 0.5)


class Asks(Net):
    """Takes numbers as arguments of its forward."""

    def forward(self, x: Tensor, beta: float = 1.0, *, gamma: float = 2.0, text: str = "") -> Tensor:
        return (beta * self.layer(x).square()).mean() + gamma


def test_an_argument_of_forward_is_a_number_of_the_step() -> None:
    plain = Asks()
    del plain.beta  # an attribute of that name would be meant
    x = torch.stack([sample["x"] for sample in SAMPLES[:4]])
    made = workload({"beta": lambda step: 0.5 * step, "gamma": lambda step: 0.25}, plain)
    for step in (0, 1, 3):
        assert loss_at(made, step) == pytest.approx(plain(x, 0.5 * step, gamma=0.25).item())
    assert StepValues.of(made).at(3) == {"net/beta": 1.5, "net/gamma": 0.25}


def test_an_attribute_comes_before_an_argument_of_its_name() -> None:
    made = workload({"beta": lambda step: 3.0}, net := Asks())
    StepValues.of(made).begin(0)
    assert net.beta == 3.0
    assert loss_at(workload({}, Asks()), 0) > 2.0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"text": 0.0}, "'text' is an argument of Asks.forward, without a number to begin with"),
        ({"x": 0.0}, "'x' is an argument of Asks.forward, without a number to begin with"),
        ({"delta": 0.0}, "'delta': Asks has no 'delta'"),
    ],
)
def test_an_argument_without_a_number_is_refused(values: Mapping[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        StepValues.of(workload(values, Asks()))


def test_what_is_a_field_too_is_refused() -> None:
    net = Asks()
    del net.beta
    items = [sample | {"beta": torch.ones(())} for sample in SAMPLES]
    task = Task("net", net, batch_size=4, dataset=items, step_values={"beta": 1.0})
    with pytest.raises(WorkloadError, match="items have 'beta', which is a number of the step too"):
        analysed(Workload("values", [task], operators=(Layer,)))
