"""What cannot be trained as it is written is refused, with the place in the user's code and what to do."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, fx, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import Batches
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.refuse import place_of_error
from spindle_cli.workload.types import FlowTask, Task, Workload

from .shares import run_cut, run_plain
from .toy import WIDTH, Block, Items


class Net(nn.Module):
    """A chain of blocks; what each test breaks comes after, between or before them."""

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.run = forward
        self.block = Block()
        self.second = Block()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor, label: Tensor) -> Any:
        return self.run(self, x, label)


def refusal_of(workload: Workload) -> str:
    with pytest.raises(WorkloadError) as caught:
        analysed(workload)
    return str(caught.value)


def of_forward(
    forward: Callable[..., Any], *, operators: tuple[type[nn.Module], ...] = (Block,), **modules: nn.Module
) -> str:
    data = Items(x=(4, WIDTH), label=((), 3))
    return refusal_of(Workload("w", [Task("t", Net(forward, **modules), 4, data)], operators=operators))


def whole_of(
    forward: Callable[..., Any], *, operators: tuple[type[nn.Module], ...] = (Block,), **modules: nn.Module
) -> dict[str, str]:
    """Why ops run whole, by their layers; what all of them compute is what forward does."""
    data = Items(x=(4, WIDTH), label=((), 3))
    task = Task("t", Net(forward, **modules), 4, data)
    graph = analysed(Workload("w", [task], operators=operators)).tasks["t"]
    batch = Batches(task, seed=1).rows(0, 0, 4)
    loss = run_cut(graph, [batch], {op.index: [0, 1, 4] for op in graph.ops})
    torch.testing.assert_close(loss, run_plain(task, batch), rtol=1e-5, atol=1e-7)
    return {op.target or "loss": str(op.coupled_because) for op in graph.ops if op.coupled}


def place(function: Callable[..., Any], line: int) -> str:
    """'file:line' of the line-th line of a function (its `def` is line 0)."""
    first = inspect.getsourcelines(function)[1]
    return f"{Path(__file__).name}:{first + line}"


def test_parameters_that_forward_goes_through() -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        loss = functional.cross_entropy(self.second(self.block(x)).mean(1), label)
        return loss + 0.1 * sum(parameter.pow(2).sum() for parameter in self.parameters())

    whole = whole_of(forward)
    assert list(whole) == ["loss"]
    assert place(forward, 2) in whole["loss"]


def test_control_flow_on_values() -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.block(x)
        if x.sum() > 0:
            x = -x
        return x.mean()

    whole = whole_of(forward)
    assert list(whole) == ["loss"]
    assert "decided by values" in whole["loss"] and place(forward, 2) in whole["loss"]


@pytest.mark.parametrize(
    "decide",
    [
        lambda x: torch.stack([row.mean() for row in x]).mean(),
        lambda x: x.mean() if int(x.shape[0]) > 3 else x.sum(),
        lambda x: x.sum() / float(x.shape[0]),
        lambda x: sum(x[position].mean() for position in range(len(x))),
        lambda x: x.sum() / len(x.unbind()),
        lambda x: sum(x[position].mean() for position in range(x.size(0))),
    ],
)
def test_a_decision_by_the_size_of_the_batch(decide: Callable[[Tensor], Tensor]) -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.block(x)
        return decide(x)

    whole_of(forward)


class InALambda(Net):
    """Whose forward cannot be written anew."""

    forward = lambda self, x, label: self.block(x).sum() / float(x.shape[0])  # noqa: E731


def test_a_size_of_the_batch_as_a_number_is_told_what_it_may_be_used_for() -> None:
    task = Task("t", InALambda(lambda *_: None), 4, Items(x=(4, WIDTH), label=((), 3)))
    message = refusal_of(Workload("w", [task], (Block,)))
    assert "decides by the size of the batch" in message and Path(__file__).name in message
    assert "to divide by and in `if`, not in `range`, `int` or `float`" in message


def test_an_error_of_the_users_own_names_its_line() -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.block(x)
        return self.blok(x).mean()

    message = of_forward(forward)
    assert place(forward, 2) in message and "AttributeError" in message and "blok" in message


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (lambda x: None, "returns nothing"),
        (lambda x: {"logits": x.mean()}, "returns a dict with 'logits'"),
        (lambda x: {"loss": 1.0}, "float"),
        (lambda x: (x.mean(), x), "returns a tuple"),
        (lambda x: x, "shape (4, 4, 8)"),
        (lambda x: x.mean().detach(), "no parameter that is trained"),
        (lambda x: (x > 0).sum(), "no parameter that is trained"),
    ],
)
def test_no_scalar_loss(result: Callable[[Tensor], Any], found: str) -> None:
    message = of_forward(lambda self, x, label: result(self.block(x)))
    assert "task 't'" in message and found in message and Path(__file__).name in message


class Absent(nn.Linear):
    pass


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_an_operator_class_that_no_task_holds() -> None:
    message = of_forward(lambda self, x, label: self.block(x).mean(), operators=(Block, Absent))
    assert "Absent never occurs" in message and "no task holds" in message and "Block" in message


def test_an_operator_class_inside_another_operator() -> None:
    message = of_forward(lambda self, x, label: self.outer(x).mean(), operators=(Outer, Block), outer=Outer())
    assert "Block never occurs" in message and "inside Outer" in message


def test_an_operator_class_that_is_never_called() -> None:
    message = of_forward(lambda self, x, label: self.linear(x).mean(), linear=nn.Linear(WIDTH, 1))
    assert "Block never occurs" in message and "no task's loss depends on" in message


def test_a_batch_too_small_for_batch_norm() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x[:, 0])

    net = Net(lambda self, x, label: self.normed(x).mean(), normed=Normed())
    message = refusal_of(Workload("w", [Task("t", net, 1, Items(x=(4, WIDTH), label=((), 3)))], (Normed,)))
    assert "for a batch of 1 samples" in message and "more than 1 value per channel" in message
    assert "large enough" in message and place(Normed, 6) in message


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"x": (4, WIDTH)}, "lack 'label'"),
        ({"x": (4, WIDTH), "label": ((), 3), "extra": (1,)}, "does not take 'extra'"),
        ({"y": (4, WIDTH), "label": ((), 3)}, "lack 'x' and forward does not take 'y'"),
    ],
)
def test_items_that_are_not_forwards_arguments(fields: dict[str, Any], found: str) -> None:
    net = Net(lambda self, x, label: self.block(x).mean())
    message = refusal_of(Workload("w", [Task("t", net, 4, Items(**fields))], (Block,)))
    assert found in message and place(Net.forward, 0) in message


def test_items_of_a_shape_that_the_model_does_not_take() -> None:
    net = Net(lambda self, x, label: self.block(x).mean())
    message = refusal_of(Workload("w", [Task("t", net, 4, Items(x=(4, 5), label=((), 3)))], (Block,)))
    assert "'block' (Block) fails" in message and "(4, 4, 5)" in message and "layers.py" in message


def test_an_operator_that_reads_values() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.max().item()

    whole = whole_of(
        lambda self, x, label: self.reads(self.block(x)).mean(), operators=(Block, Reads), reads=Reads()
    )
    assert list(whole) == ["reads"]
    assert "it decides by the values of its batch" in whole["reads"] and place(Reads, 2) in whole["reads"]


def test_a_selection_of_unknown_size() -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.block(x)
        return x[(label > 1).nonzero().squeeze(1)].mean()

    whole = whole_of(forward)
    assert list(whole) == ["loss"] and place(forward, 2) in whole["loss"]


def test_a_value_that_mixes_samples_before_an_operator() -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.block(x)
        x = x - x.mean(0)
        return self.second(x).mean()

    whole = whole_of(forward)
    assert list(whole) == ["second"]
    assert "mixes the samples" in whole["second"] and place(forward, 2) in whole["second"]


def test_a_batch_norm_with_another_forward_before_all_operators_is_named_as_what_it_is() -> None:
    """And not as a layer that fails for one sample; with torch's own forward it is split."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.block = nn.BatchNorm1d(4), Block()
            self.norm.forward = lambda x: nn.functional.batch_norm(x, None, None, training=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.norm(x)).mean()

    task = Task("t", Normed(), 4, Items(x=(4, WIDTH)))
    (op,) = analysed(Workload("w", [task], (Block,))).tasks["t"].ops
    assert op.coupled and "it normalises over the batch" in str(op.coupled_because)
    whole, split = analysed(Workload("w", [task], (Block,), (nn.BatchNorm1d,))).tasks["t"].ops
    assert (whole.target, whole.coupled, split.coupled) == ("norm", True, False)


def test_a_change_in_place_that_others_see() -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.block(x)
        y = x.view(-1, WIDTH)
        return (x.mul_(2) + self.second(y).view_as(x)).mean()

    message = of_forward(forward)
    assert "in place" in message and place(forward, 3) in message


def test_an_operator_that_changes_its_input() -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    message = of_forward(
        lambda self, x, label: self.changes(self.block(x)).mean(),
        operators=(Block, Changes),
        changes=Changes(),
    )
    assert "'changes' (Changes) changes its input in place" in message


def test_a_batch_size_written_into_the_model() -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        return self.block(x.view(4, 2, 2, WIDTH)).mean()

    message = of_forward(forward)
    assert place(forward, 1) in message and "batch size written into the model" in message


def test_several_rows_per_sample_along_an_inner_dimension() -> None:
    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.block(x).flatten(0, 1).T
        return self.wide(x).mean()

    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    message = of_forward(forward, operators=(Block, Wide), wide=Wide())
    assert "4 rows per sample along dimension 1" in message and place(forward, 2) in message


@pytest.mark.parametrize(
    "rows",
    [
        lambda x: x.transpose(0, 1).reshape(-1, WIDTH),
        lambda x: torch.cat([x, -x]),
        lambda x: x.repeat(2, 1, 1),
        lambda x: x.flip(0),
        lambda x: x.roll(1, 0),
        lambda x: x.softmax(0),
        lambda x: functional.normalize(x, dim=0),
        lambda x: x + torch.arange(x.shape[0]).view(-1, 1, 1),
        lambda x: x[torch.arange(x.shape[0]) - 1],
    ],
)
def test_rows_that_do_not_lie_sample_by_sample(rows: Callable[[Tensor], Tensor]) -> None:
    """Splitting them would give each share rows of other samples."""

    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = rows(self.block(x))
        return self.second(x).mean()

    whole = whole_of(forward)
    assert "second" in whole
    assert all(
        Path(__file__).name in why and ("mixes the samples" in why or "do not lie together" in why)
        for why in whole.values()
    )


def flow_task(**fields: Any) -> FlowTask:
    return FlowTask("f", 4, Items(x=(4, WIDTH), **fields))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


@pytest.mark.parametrize(
    "name", ["graph", "code", "meta", *({"shape_env"} & vars(fx.GraphModule({}, fx.Graph())).keys())]
)
def test_a_part_whose_name_torch_fx_uses_itself(name: str) -> None:
    def forward(net: Net, x: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(getattr(net, name)(net.block(x)).mean(1), label)

    found = of_forward(forward, **{name: nn.Linear(WIDTH, 3)})
    assert f"the Net has a part called {name!r}" in found and f"self.{name}_net" in found
    assert place(forward, 1) in found


def test_a_flow_through_a_class_whose_name_torch_fx_uses_itself() -> None:
    class Graph(nn.Linear):
        """Called 'graph' in the task."""

    task = FlowTask("t", 4, Items(x=(4, WIDTH)))
    task.add_flow("x", Graph(WIDTH, WIDTH))
    assert "the task has a part called 'graph'" in refusal_of(Workload("w", [task]))


def test_a_part_further_down_may_be_called_as_it_likes() -> None:
    def forward(net: Net, x: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(net.head.graph(net.block(x)).mean(1), label)  # type: ignore[operator, union-attr]

    head = nn.ModuleDict({"graph": nn.Linear(WIDTH, 3)})
    analysed(
        Workload("w", [Task("t", Net(forward, head=head), 4, Items(x=(4, WIDTH), label=((), 3)))], (Block,))
    )


def test_flows_without_an_end() -> None:
    first, second = Block(), Block()
    task = flow_task().add_flow("x", first).add_flow(first, second).add_flow(second, first)
    assert "cycle among block, block_2" in refusal_of(Workload("w", [task]))


def test_flows_with_two_ends() -> None:
    task = flow_task().add_flow("x", Mean()).add_flow("x", Mean())
    assert "found mean, mean_2" in refusal_of(Workload("w", [task]))


def test_flows_from_an_unknown_field() -> None:
    assert "neither a module nor a field" in refusal_of(Workload("w", [flow_task().add_flow("y", Mean())]))


def test_no_flows() -> None:
    assert "no flows" in refusal_of(Workload("w", [flow_task()]))


def test_a_lazy_module_that_has_not_seen_a_batch() -> None:
    message = of_forward(lambda self, x, label: self.lazy(self.block(x)).mean(), lazy=nn.LazyLinear(3))
    assert "'lazy.weight'" in message and "forward once" in message


def test_what_is_right_is_not_refused() -> None:
    """A loss by functional.cross_entropy in glue is accepted: the control of the refusals above."""
    net = Net(
        lambda self, x, label: functional.cross_entropy(self.head(self.block(x)[:, 0]), label),
        head=nn.Linear(WIDTH, 3),
    )
    graph = analysed(Workload("w", [Task("t", net, 4, Items(x=(4, WIDTH), label=((), 3)))], (Block,)))
    assert [op.coupled for op in graph.tasks["t"].ops] == [False]


def test_a_place_is_in_the_users_code_not_in_what_it_calls() -> None:
    """Python's own modules and torch fail for what they are given."""
    for fails in (lambda: json.loads("{"), lambda: torch.ones(2) @ torch.ones(3)):
        with pytest.raises((ValueError, RuntimeError)) as error:
            fails()
        place = place_of_error(error.value)
        assert place is not None and "test_refusals.py:" in place


class Hides(nn.Module):
    """Has a layer where torch does not look."""

    def __init__(self, hide: Callable[[nn.Module, nn.Module], None]) -> None:
        super().__init__()
        self.first = Block()
        hide(self, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        held: Any = self.held
        layer = held if isinstance(held, nn.Module) else held[0]
        return layer(self.first(x)).square().mean()  # type: ignore[no-any-return]


HIDES: list[Callable[[nn.Module, nn.Module], None]] = [
    lambda net, layer: net.__setattr__("held", [layer]),
    lambda net, layer: net.__setattr__("held", {0: layer}),
    lambda net, layer: net.__dict__.__setitem__("held", layer),
]


def hidden(net: nn.Module, operators: tuple[type[nn.Module], ...]) -> WorkloadGraph:
    return analysed(Workload("w", [Task("t", net, 4, Items(x=(WIDTH,)))], operators))


@pytest.mark.parametrize("operators", [(Block,), (Block, nn.Linear)])
@pytest.mark.parametrize("hide", HIDES)
def test_a_layer_that_torch_does_not_see_is_refused(
    hide: Callable[[nn.Module, nn.Module], None], operators: tuple[type[nn.Module], ...]
) -> None:
    said = r"test_refusals\.py:\d+: task 't': Hides keeps a Linear in self\.held, where torch does not see it"
    with pytest.raises(WorkloadError, match=said) as raised:
        hidden(Hides(hide), operators)
    assert "nn.ModuleList" in str(raised.value.hint)


OF_FILE: list[nn.Module] = []


def in_file(layer: nn.Module) -> Callable[[], nn.Module]:
    OF_FILE[:] = [layer]
    return lambda: OF_FILE[0]


def in_object(layer: nn.Module) -> Callable[[], nn.Module]:
    holder = types.SimpleNamespace(layer=layer)
    return lambda: holder.layer  # type: ignore[no-any-return]


@pytest.mark.parametrize("keep", [in_file, in_object, lambda layer: lambda: layer])
def test_a_layer_that_code_alone_comes_to_is_refused(
    keep: Callable[[nn.Module], Callable[[], nn.Module]],
) -> None:
    """Commands build on the meta device, where a layer that is no part of the model stays."""
    with torch.device("meta"):
        layer = keep(nn.Linear(WIDTH, WIDTH))
        net = Net(lambda self, x, label: self.second(layer()(self.block(x))).square().mean())
    data = Items(x=(WIDTH,), label=((), 3))
    with pytest.raises(WorkloadError, match="a parameter of a layer that is no part of the model") as raised:
        analysed(Workload("w", [Task("t", net, 4, data)], (Block,)))
    assert "nn.ModuleList" in str(raised.value.hint)


def test_a_layer_that_is_in_a_list_too_is_a_part() -> None:
    net = Hides(HIDES[0])
    net.part = net.held[0]  # type: ignore[index, union-attr]
    assert len(hidden(net, (Block,)).tasks["t"].ops) == 1
