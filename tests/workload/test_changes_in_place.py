"""What forward changes in place between operators: a new value where nobody looks at the old one, else
refused.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.localise import place_of_buffer
from spindle_cli.errors import WorkloadError
from spindle_cli.training.batches import Batches
from spindle_cli.workload.types import Task, Workload

from .shares import gradients_of, run_cut, run_plain
from .toy import WIDTH, Block, Items

Forward = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Two blocks and a buffer, with a forward of the test's."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.first, self.second, self.dropout, self.run = Block(), Block(), nn.Dropout(0.0), run
        self.identity = nn.Identity()
        self.register_buffer("offset", torch.ones(WIDTH))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.run(self, x, label)


def _workload(run: Forward) -> Workload:
    torch.manual_seed(0)
    data = Items(x=(5, WIDTH), label=((5,), 7))
    return Workload("w", [Task("t", Net(run), 4, data)], (Block,))


def _shifted(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """As T5 shifts its labels to the right."""
    given = label.new_zeros(label.shape)
    given[..., 1:] = label[..., :-1].clone()
    given[..., 0] = 3
    given.masked_fill_(given == 2, 1)
    return self.second(self.first(x) * given.unsqueeze(-1)).pow(2).mean()


def _padded(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """As Wav2Vec2 blanks its padding."""
    x = self.first(x)
    hidden = self.dropout(x * 2)
    hidden[(label > 3).unsqueeze(-1).repeat(1, 1, WIDTH)] = 0.0
    return self.second(hidden).pow(2).mean()


def _added(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.first(x) + 0
    same = x
    x += self.offset
    x -= 0.5
    return (self.second(x) + same).pow(2).mean()


def _filled(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.first(x)
    mask = torch.zeros_like(x)
    mask.copy_(x.detach()).clamp_(min=0.0)
    other = torch.ones_like(x)
    other.fill_(0.5).mul_(mask)
    last = torch.ones_like(x)
    last.zero_()
    return self.second(x * mask + other + last).pow(2).mean()


def _of_the_batch(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """A field of the batch, which others have another of."""
    label[label == 0] = 1
    return (self.second(self.first(x)) * label.unsqueeze(-1)).pow(2).mean()


def _of_a_size(self: Net, x: Tensor, label: Tensor) -> Tensor:
    count = x.shape[0]
    twice = count
    count *= 2
    return self.second(self.first(x)).sum() / count * twice / x.shape[0]


def _positions_filled(self: Net, x: Tensor, label: Tensor) -> Tensor:
    """Made empty, of a size or like another, and filled position by position."""
    x = self.first(x)
    made, like, own = (
        torch.empty(x.shape[0], 5, WIDTH, dtype=x.dtype),
        torch.empty_like(x),
        x.new_empty(x.shape),
    )
    for position in range(x.shape[1]):
        made[:, position] = x[:, position] * position
        like[:, position] = x[:, -position]
        own[:, position] = x[:, position] + position
    return self.second(made + like * own).pow(2).mean()


def _detached(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.first(x)
    x.detach_()
    target = self.second(x)
    target.detach_()
    return (self.second(x * 2) - target).square().mean()


KEPT: dict[str, Forward] = {
    "what goes on without gradients": _detached,
    "positions that are filled one by one": _positions_filled,
    "labels that are shifted": _shifted,
    "padding that is blanked": _padded,
    "sums": _added,
    "what is filled": _filled,
    "a field of the batch": _of_the_batch,
    "a size is no tensor": _of_a_size,
}


@pytest.mark.parametrize("name", KEPT)
def test_a_change_that_nobody_else_sees_is_another_value(name: str) -> None:
    made = _workload(KEPT[name])
    task = made.tasks[0]
    task.module.double()
    graph = analysed(_workload(KEPT[name])).tasks["t"]
    assert not any(op.coupled for op in graph.ops)
    traced = graph.root.double()
    batch = {
        key: value.double() if value.is_floating_point() else value
        for key, value in Batches(task, seed=1).rows(0, 0, 4).items()
    }
    copies = {key: value.clone() for key, value in batch.items()}
    plain = run_plain(task, copies)
    expected = gradients_of(plain, dict(task.module.named_parameters()))
    cut = {op.index: [0, 1, 4] for op in graph.ops}
    loss = run_cut(graph, [batch], cut)
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
    for key, gradient in gradients_of(loss, dict(traced.named_parameters())).items():
        torch.testing.assert_close(gradient, expected[key])


def _through_a_view(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.first(x) + 0
    view = x[:, 1:]
    view[:, 0] = 5.0
    return self.second(x).mean()


def _of_what_a_view_is_of(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.first(x) + 0
    view = x.transpose(1, 2)
    x[:, 0] = 5.0
    return self.second(view.transpose(1, 2)).mean()


def _handed_through_by_a_module(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.first(x) + 0
    same = self.identity(x)
    same[:, 0] = 5.0
    return self.second(x).mean()


def _a_buffer(self: Net, x: Tensor, label: Tensor) -> Tensor:
    offset = self.offset
    offset += 1
    return self.second(self.first(x) + offset).mean()


def _a_view_of_a_buffer(self: Net, x: Tensor, label: Tensor) -> Tensor:
    self.offset.view(2, -1)[0] = 1.0
    return self.second(self.first(x) + self.offset).mean()


def _each_buffer(self: Net, x: Tensor, label: Tensor) -> Tensor:
    for buffer in self.buffers():
        buffer.mul_(0.5)
    return self.second(self.first(x) + self.offset).mean()


def _a_buffer_by_name(self: Net, x: Tensor, label: Tensor) -> Tensor:
    setattr(self, "off" + "set", self.offset * 0.9 + x.detach().mean())
    return self.second(self.first(x) + self.offset).mean()


def _to_another_type(self: Net, x: Tensor, label: Tensor) -> Tensor:
    label *= 0.5
    return (self.first(x) * label.unsqueeze(-1)).mean()


def _without_gradient(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.first(x) * 2
    with torch.no_grad():
        x.mul_(3)
    return self.second(x).mean()


def _to_the_end(self: Net, x: Tensor, label: Tensor) -> Tensor:
    loss = self.first(x).mean()
    same = loss.view(())
    loss.mul_(2)
    return same


def _detached_under_another_name(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.first(x)
    same = self.identity(x)
    same.detach_()
    return (self.second(x) + same).mean()


REFUSED: dict[str, tuple[Forward, int]] = {
    "of the gradient of what has another name": (_detached_under_another_name, 3),
    "through a view": (_through_a_view, 3),
    "of what a view is of": (_of_what_a_view_is_of, 3),
    "of what a module hands through": (_handed_through_by_a_module, 3),
    "to another type": (_to_another_type, 1),
    "without its gradient": (_without_gradient, 3),
    "of the loss": (_to_the_end, 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_others_see_is_refused_with_its_line(name: str) -> None:
    run, line = REFUSED[name]
    with pytest.raises(WorkloadError) as caught:
        analysed(_workload(run))
    place = f"{Path(__file__).name}:{run.__code__.co_firstlineno + line}"
    assert "in place" in str(caught.value) and place in str(caught.value)


@pytest.mark.parametrize("operation", [lambda a, b: a & b, lambda a, b: a | b, lambda a, b: a ^ b])
def test_pythons_operators_on_masks_change_nothing(operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        first, second = label > 2, label > 4
        both = operation(first, second)
        kept = both.unsqueeze(-1) * first.unsqueeze(-1) + second.unsqueeze(-1)
        return self.second(self.first(x) * kept).mean()

    assert not any(op.coupled for op in analysed(_workload(run)).tasks["t"].ops)


def _made(name: str, x: Tensor) -> Tensor:
    owner: Any = x if hasattr(x, name) else torch
    more = ((5 * WIDTH, WIDTH, 1),) if name.endswith("strided") else ()
    made: Tensor = getattr(owner, name)((x.shape[0], 5, WIDTH), *more)
    return made


@pytest.mark.parametrize("name", ["empty", "new_empty", "new_empty_strided"])
def test_what_memory_has_before_it_is_filled_says_nothing_of_samples(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it has other numbers for other sizes."""
    owner = Tensor if hasattr(Tensor, name) else torch
    original = getattr(owner, name)

    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = original(*args, **kwargs)
        return found.fill_(found.shape[0]) if type(found) is Tensor and not found.is_meta else found

    def forward(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.first(x)
        empty = _made(name, x)
        for position in range(5):
            empty[:, position] = x[:, position]
        return self.second(empty).pow(2).mean()

    monkeypatch.setattr(owner, name, made)
    assert not any(op.coupled for op in analysed(_workload(forward)).tasks["t"].ops)


@pytest.mark.parametrize("of", ["value", "parameter"])
def test_a_hook_between_operators_is_refused_with_what_to_write_in_its_place(of: str) -> None:
    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.first(x) + self.offset
        (x if of == "value" else self.head.weight).register_hook(lambda gradient: gradient * 0.5)
        return self.second(self.head(x)).mean()

    made = _workload(run)
    made.tasks[0].module.head = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(WorkloadError, match="forward calls register_hook between operators") as caught:
        analysed(made)
    assert "(1 - c) * x.detach()" in str(caught.value.hint)


def _by_out(net: Net, x: Tensor, label: Tensor) -> Tensor:
    more = torch.empty_like(x)
    torch.add(x, 1, out=more)
    return net.first(x + more).mean()


def _buffer_by_out(net: Net, x: Tensor, label: Tensor) -> Tensor:
    torch.mul(net.offset, 0.5, out=net.offset)
    return net.first(x).mean()


def _in_a_list(net: Net, x: Tensor, label: Tensor) -> Tensor:
    torch._foreach_mul_([net.offset], 0.5)
    return net.first(x).mean()


def _by_an_overload(net: Net, x: Tensor, label: Tensor) -> Tensor:
    more = x.clone()
    torch.ops.aten.add_.Tensor(more, x)
    return net.first(more).mean()


@pytest.mark.parametrize("run", [_by_out, _buffer_by_out, _in_a_list, _by_an_overload])
def test_what_is_written_by_other_ways_than_methods_is_refused_with_its_line(run: Forward) -> None:
    """A trace has the tensors as they were: nothing shows in what the call itself gives."""
    line = run.__code__.co_firstlineno + (2 if "more" in run.__code__.co_varnames else 1)
    with pytest.raises(WorkloadError, match="which writes into tensors that it is given") as caught:
        analysed(Workload("w", [Task("t", Net(run), 4, Items(x=(5, WIDTH), label=((), 3)))], (Block,)))
    assert f"test_changes_in_place.py:{line}: " in str(caught.value)


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x, _: net.first(x).mean() + 0 * net.offset.mul_(0.9).sum(),
        lambda net, x, _: (net.offset.data.mul_(0.9).add_(x.mean((0, 1))), net.first(x).mean())[1],
        lambda net, x, _: (net.offset.data.copy_(x.mean((0, 1))), net.first(x).mean())[1],
        lambda net, x, _: (net.offset.view(-1).fill_(2), net.first(x).mean())[1],
        _a_buffer,
        _a_view_of_a_buffer,
        _each_buffer,
        _a_buffer_by_name,
    ],
    ids=["itself", "its data", "a copy", "a view", "a local name", "an entry", "all", "by name"],
)
def test_a_buffer_that_is_moved_is_moved_once_by_who_reads_it(run: Forward) -> None:
    task = analysed(_workload(run)).tasks["t"]
    (moves,) = (op for op in task.ops if op.changes)
    assert moves.coupled and moves.changes == ("offset",)
    net = copy.deepcopy(task.root)
    for seed in (1, 2):
        x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(seed))
        known = {"x": x, "label": torch.ones(4, 5, dtype=torch.long)}
        right = net(x, known["label"])
        for op in task.ops:
            found = task.op_module(op)(*(known[name] for name in (*op.fields, *op.inputs)))
            known |= dict(zip(op.outputs, found, strict=True)) if op.outputs else {"loss": found}
        torch.testing.assert_close(known["loss"], right, rtol=0, atol=1e-6)
    holder, name = place_of_buffer(task.op_module(moves), task.root, "offset")
    torch.testing.assert_close(holder._buffers[name], net.offset, rtol=0, atol=1e-6)


def _counted(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.first(x)
    self.counts += x.detach().mean()
    return self.second(x).mean()


def _counted_by_index(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.first(x)
    self.counts[0] = x.detach().mean()
    return self.second(x * self.counts).mean()


@pytest.mark.parametrize("run", [_counted, _counted_by_index])
def test_what_is_written_into_an_attribute_that_is_no_buffer_is_refused_and_runs_where_it_is_one(
    run: Forward,
) -> None:
    made = _workload(run)
    net = made.tasks[0].module
    net.counts = torch.zeros(WIDTH)
    with pytest.raises(WorkloadError, match=r"forward changes 'self\.counts' between operators") as caught:
        analysed(made)
    assert f"{Path(__file__).name}:{run.__code__.co_firstlineno + 2}" in str(caught.value)
    assert "self.register_buffer(" in str(caught.value.hint)
    del net.counts
    net.register_buffer("counts", torch.zeros(WIDTH))
    assert analysed(made).tasks["t"].ops


def _backward_of_a_head(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.first(x)
    self.second(x.detach()).pow(2).mean().backward()
    return x.mean()


def _backward_by_name(self: Net, x: Tensor, label: Tensor) -> Tensor:
    x = self.first(x)
    torch.autograd.backward(self.second(x.detach()).pow(2).mean())
    return x.mean()


def _backward_twice(self: Net, x: Tensor, label: Tensor) -> Tensor:
    loss = self.second(self.first(x)).pow(2).mean()
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("run", [_backward_of_a_head, _backward_by_name, _backward_twice])
def test_a_backward_pass_in_the_middle_of_forward_is_refused_with_its_line(run: Forward) -> None:
    """Nobody reads what it gives, so a trace would lose it."""
    with pytest.raises(WorkloadError, match="forward calls backward between operators") as caught:
        analysed(_workload(run))
    assert f"{Path(__file__).name}:{run.__code__.co_firstlineno + 2}" in str(caught.value)
    assert "to the loss that forward returns" in str(caught.value.hint)


def test_what_a_head_is_trained_by_goes_into_the_loss() -> None:
    """As the refusal advises: gradients are those of a backward pass of its own."""

    def run(self: Net, x: Tensor, label: Tensor) -> Tensor:
        x = self.first(x)
        return x.mean() + self.second(x.detach()).pow(2).mean()

    made, copies = _workload(run), _workload(_backward_of_a_head)
    graph = analysed(made).tasks["t"]
    batch = Batches(made.tasks[0], seed=0).rows(0, 0, 4)
    loss = run_cut(graph, [batch], {op.index: [0, 2, 4] for op in graph.ops})
    trained = gradients_of(loss, dict(made.tasks[0].module.named_parameters()))
    module = copies.tasks[0].module
    run_plain(copies.tasks[0], batch).backward()
    for name, parameter in module.named_parameters():
        assert (trained[name] is None) == (parameter.grad is None)
        assert parameter.grad is None or torch.allclose(trained[name], parameter.grad, atol=1e-7)
