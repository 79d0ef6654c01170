"""What an operator leaves on itself (a loss that balances experts), and what it or a hook of one leaves
elsewhere, is read by nobody else: a trace would have what was there before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items


class Router(nn.Module):
    """Keeps what a further loss is made of, as mixtures of experts do; `begin`: what is there before."""

    def __init__(self, begin: Any) -> None:
        super().__init__()
        self.block = Block()
        if begin is not None:
            self.kept = begin

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        if isinstance(getattr(self, "kept", None), list):
            self.kept.append(y.pow(2).mean())
        else:
            self.kept = y.pow(2).mean()
        return y


class Layer(nn.Module):
    def __init__(self, begin: Any) -> None:
        super().__init__()
        self.router = Router(begin)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.router(x)
        return out


class Net(nn.Module):
    def __init__(self, begin: Any, *, reads: bool) -> None:
        super().__init__()
        self.layers, self.reads = nn.ModuleList([Layer(begin), Layer(begin)]), reads

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        loss = x.pow(2).mean()
        if not self.reads:
            return loss
        kept = [layer.router.kept for layer in self.layers]  # type: ignore[union-attr]
        return loss + sum(sum(each) if isinstance(each, list) else each for each in kept)  # type: ignore[arg-type]


def workload(begin: Any, *, reads: bool) -> Workload:
    return Workload("w", [Task("t", Net(begin, reads=reads), 6, Items(x=(4, WIDTH)))], (Layer,))


@pytest.mark.parametrize("begin", [0.0, None, []], ids=["number", "nothing", "list"])
def test_reading_what_an_operator_leaves_on_itself_is_refused(begin: Any) -> None:
    with pytest.raises(WorkloadError, match=r"forward asks for kept of Router, which an operator") as refused:
        analysed(workload(begin, reads=True))
    assert re.search(r"test_left_by_operators\.py:\d+: task 't'", str(refused.value))


def test_what_an_operator_leaves_on_itself_stays_its_own() -> None:
    made = workload(0.0, reads=False)
    analysed(made)
    task = made.tasks[0]
    assert isinstance(task, Task) and isinstance(task.module, Net)
    assert [layer.router.kept for layer in task.module.layers] == [0.0, 0.0]  # type: ignore[union-attr]


class Shared(nn.Module):
    """Counts in what it is given."""

    def __init__(self, box: dict[str, int]) -> None:
        super().__init__()
        self.linear, self.box = nn.Linear(WIDTH, WIDTH), box

    def forward(self, x: Tensor) -> Tensor:
        self.box["calls"] += 1
        out: Tensor = self.linear(x)
        return out


class Moves:
    """An object that forward and an operator have."""

    steps, scale = 0, torch.ones(())


class Takes(nn.Module):
    def __init__(self, moves: Moves) -> None:
        super().__init__()
        self.linear, self.moves = nn.Linear(WIDTH, WIDTH), moves

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.moves.scale
        return out * 2 if self.moves.steps > 9 else out


class Hooked(nn.Module):
    """Two layers in a row; `run` is its forward, `hook` one of its first layer."""

    def __init__(self, run: Callable[..., Tensor], hook: Callable[..., None] | None = None) -> None:
        super().__init__()
        self.run, self.hook = run, hook
        self.count, self.noted, self.prev = 0, list[Any](), None
        self.box, self.moves = {"calls": 0}, Moves()
        self.first, self.second = Block(), Block()
        self.shared, self.takes = Shared(self.box), Takes(self.moves)
        self.tensor = torch.ones(())
        self.register_buffer("mean", torch.zeros(()))
        if hook is not None:
            self.first.register_forward_hook(self.hooked)

    def hooked(self, _: nn.Module, __: Any, result: Tensor) -> None:
        assert self.hook is not None
        self.hook(self, result)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).square().mean()

    def layers(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def own_hook(self: Hooked, x: Tensor) -> Tensor:
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    handle = self.first.register_forward_hook(count)
    y = self.layers(x)
    handle.remove()
    return y * calls[0]  # read


def own_hook_decides(self: Hooked, x: Tensor) -> Tensor:
    was_called = False

    def call(*_: Any) -> None:
        nonlocal was_called
        was_called = True

    handle = self.first.register_forward_pre_hook(call)
    y = self.layers(x)
    handle.remove()
    return y if was_called else 2 * y  # read


def own_hook_notes_sizes(self: Hooked, x: Tensor) -> Tensor:
    widths: list[int] = []
    handle = self.first.register_forward_hook(lambda *given: widths.append(given[2].shape[-1]))
    y = self.layers(x)
    handle.remove()
    return y / sum(widths)  # read


def own_hook_of_last_time(self: Hooked, x: Tensor) -> Tensor:
    """No step is wrong before the fourth."""
    late = self.count > 3  # read

    def count(*_: Any) -> None:
        self.count += 1

    handle = self.first.register_forward_hook(count)
    y = self.layers(x)
    handle.remove()
    return 2 * y if late else y


def late(self: Hooked, x: Tensor) -> Tensor:
    y = self.layers(x)
    return 2 * y if self.count > 9 else y  # read


def many(self: Hooked, x: Tensor) -> Tensor:
    """How many there are is asked of no number: the place is forward's."""
    return self.layers(x) * (2 if len(self.noted) > 9 else 1)


def before(self: Hooked, x: Tensor) -> Tensor:
    """What it is given depends on what the last step's hook has kept."""
    return self.layers(x if self.prev is None else x + self.prev)


def of_operator(self: Hooked, x: Tensor) -> Tensor:
    return self.shared(x) * (2 if self.box["calls"] > 9 else 1)  # read


def _count(self: Hooked, _: Tensor) -> None:
    self.count += 1


def _note(self: Hooked, result: Tensor) -> None:
    self.noted.append(tuple(result.shape))


def _keep(self: Hooked, result: Tensor) -> None:
    self.prev = result.detach().mean(0)


def _all(self: Hooked, result: Tensor) -> None:
    _count(self, result), _note(self, result), _keep(self, result)


def hooked(run: Callable[..., Tensor], hook: Callable[..., None] | None = None) -> Workload:
    task = Task("t", Hooked(run, hook), 6, Items(x=(4, WIDTH)))
    used = [cls for cls, runs in USES.items() if run in runs]
    return Workload("w", [task], tuple(used or [Block]))


LEFT = {
    own_hook: (None, "calls"),
    own_hook_decides: (None, "was_called"),
    own_hook_notes_sizes: (None, "widths"),
    own_hook_of_last_time: (None, "count"),
    late: (_count, "count"),
    many: (_note, "noted"),
    before: (_keep, "prev"),
    of_operator: (None, "calls"),
}


@pytest.mark.parametrize("run", LEFT, ids=lambda run: run.__name__)
def test_what_operators_and_their_hooks_leave_is_read_by_no_forward(run: Callable[..., Tensor]) -> None:
    hook, name = LEFT[run]
    with pytest.raises(WorkloadError, match=rf"forward reads {name} between operators, which an") as refused:
        analysed(hooked(run, hook))
    found = re.search(r"test_left_by_operators\.py:(\d+): task 't'", str(refused.value))
    code = run.__code__
    lines = Path(__file__).read_text().splitlines()[: code.co_firstlineno + 20]
    read = [n for n, line in enumerate(lines, 1) if n > code.co_firstlineno and "# read" in line]
    assert found is not None and (int(found[1]) == read[0] or run in (many, before))


def test_what_hooks_leave_and_nobody_reads_is_no_matter() -> None:
    made = hooked(Hooked.layers, _all)
    (task,) = analysed(made).tasks.values()
    assert not any(op.coupled for op in task.ops)
    root = made.tasks[0].module  # type: ignore[union-attr]
    assert (root.count, root.noted, root.prev) == (0, [], None)


def moves_steps(self: Hooked, x: Tensor) -> Tensor:
    """No step is wrong before the tenth."""
    self.moves.steps += 1
    return self.takes(x)  # type: ignore[no-any-return]


def moves_scale(self: Hooked, x: Tensor) -> Tensor:
    self.moves.scale = x.mean()
    return self.takes(x)  # type: ignore[no-any-return]


USES = {Shared: [of_operator], Takes: [moves_steps, moves_scale]}  # classes of operators, else blocks


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (moves_steps, "sets self.moves.steps between operators, and 'takes' reads it"),
        (moves_scale, "an operator takes what forward has left somewhere"),
    ],
)
def test_what_forward_leaves_is_read_by_no_operator(run: Callable[..., Tensor], said: str) -> None:
    with pytest.raises(WorkloadError, match=rf"test_left_by_operators\.py:\d+: .*{said}") as refused:
        analysed(hooked(run))
    assert "as an argument" in str(refused.value.hint)


def _average(self: Hooked, result: Tensor) -> None:
    with torch.no_grad():
        self.mean.mul_(0.9).add_(result.mean(), alpha=0.1)


def _average_anew(self: Hooked, result: Tensor) -> None:
    self.mean = 0.9 * self.mean + 0.1 * result.mean().detach()


@pytest.mark.parametrize("hook", [_average, _average_anew])
def test_buffers_that_an_operator_does_not_hold_are_not_its_hooks_to_change(
    hook: Callable[..., None],
) -> None:
    with pytest.raises(WorkloadError, match="changes 'mean', which the operator does not hold"):
        analysed(hooked(lambda self, x: self.layers(x) + self.mean, hook))


def tensor_anew(self: Hooked, x: Tensor) -> Tensor:
    """The first forward is what is traced of it."""
    self.tensor = self.tensor * 0.9
    return self.layers(x) * self.tensor


def tensor_in_place(self: Hooked, x: Tensor) -> Tensor:
    self.tensor *= 0.9
    return self.layers(x) * self.tensor


def tensor_made_once(self: Hooked, x: Tensor) -> Tensor:
    if self.prev is None:
        self.prev = torch.arange(WIDTH) / WIDTH
    return self.layers(x) * self.prev


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (tensor_anew, r"computes between operators with what an earlier forward has left in self\.tensor"),
        (tensor_in_place, r"changes 'self\.tensor' between operators"),
    ],
)
def test_a_tensor_that_goes_on_is_a_buffer(run: Callable[..., Tensor], said: str) -> None:
    made = hooked(run)
    with pytest.raises(WorkloadError, match=said) as refused:
        analysed(made)
    assert "self.register_buffer" in str(refused.value.hint)
    assert made.tasks[0].module.tensor == 1  # type: ignore[union-attr]
    analysed(hooked(tensor_made_once))


def seen_anew(self: Hooked, x: Tensor) -> Tensor:
    self.noted.clear()
    return self.layers(x) * self.noted[0].mean()


def test_what_a_hook_has_seen_is_said_to_be_that() -> None:
    with pytest.raises(WorkloadError, match="takes what a hook has seen of an operator"):
        analysed(hooked(seen_anew, lambda self, result: self.noted.append(result)))


class Writing(nn.Module):
    """Writes into a tensor that it does not hold as a parameter or buffer, and reads it if it is to."""

    def __init__(self, kept: Callable[[], Tensor], *, reads: bool = False, writes: bool = True) -> None:
        super().__init__()
        self.linear, self.kept, self.reads, self.writes = nn.Linear(WIDTH, WIDTH), kept, reads, writes

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.writes:
            with torch.no_grad():
                self.kept().mul_(0.5).add_(y.mean().abs(), alpha=0.5)
        return y * self.kept() if self.reads else y


class Holder:
    def __init__(self) -> None:
        self.tensor, self.teacher = torch.ones(()), nn.LayerNorm(())


OF_FILE = torch.ones(())


def _in_object() -> Callable[[], Tensor]:
    holder = Holder()
    return lambda: holder.tensor


def _in_dict() -> Callable[[], Tensor]:
    box = {"tensor": torch.ones(())}
    return lambda: box["tensor"]


def _in_file() -> Callable[[], Tensor]:
    OF_FILE.fill_(1.0)
    return lambda: OF_FILE


def _in_module_that_is_no_part() -> Callable[[], Tensor]:
    teacher = nn.Linear(1, 1).requires_grad_(False)
    teacher.weight.fill_(1.0)
    return lambda: teacher.weight


PLACES = [_in_object, _in_dict, _in_file, _in_module_that_is_no_part]


class Around(nn.Module):
    def __init__(self, run: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.run = nn.Sequential(*layers), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layers(x)).square().mean()


def around(run: Callable[..., Tensor], *layers: nn.Module) -> Workload:
    classes = tuple({type(layer) for layer in layers})
    return Workload("w", [Task("t", Around(run, *layers), 6, Items(x=(4, WIDTH)))], classes)


@pytest.mark.parametrize("place", PLACES[:3])
def test_what_an_operator_writes_into_nobody_else_reads(
    place: Callable[[], Callable[[], Tensor]],
) -> None:
    kept = place()
    with pytest.raises(WorkloadError, match="which an operator writes into") as refused:
        analysed(around(lambda y: y * kept(), Writing(kept)))
    assert re.search(r"test_left_by_operators\.py:\d+: task 't'", str(refused.value))
    kept = place()
    with pytest.raises(WorkloadError, match=r"'layers\.0' leaves .* which 'layers\.1' of task 't' reads"):
        analysed(around(lambda y: y, Writing(kept), Writing(kept, reads=True, writes=False)))
    assert kept().item() == 1.0


@pytest.mark.parametrize("place", PLACES)
def test_what_an_operator_writes_into_is_as_it_was_after_an_analysis(
    place: Callable[[], Callable[[], Tensor]],
) -> None:
    kept = place()
    (task,) = analysed(around(lambda y: y, Block(), Writing(kept, reads=True))).tasks.values()
    assert [op.coupled for op in task.ops] == [False, True]
    assert kept().item() == 1.0


@pytest.mark.parametrize("place", PLACES)
def test_forward_writes_into_parts_of_the_model_alone(place: Callable[[], Callable[[], Tensor]]) -> None:
    kept = place()

    def moved(y: Tensor) -> Tensor:
        kept().mul_(0.5)
        return y * kept()

    with pytest.raises(WorkloadError, match="forward changes a tensor between operators that is in no part"):
        analysed(around(moved, Block()))
    analysed(around(lambda y: y * torch.ones(2, 1, WIDTH).mul_(0.5).sum(0), Block()))  # one that it makes
