"""What a forward finds of an earlier one in places where nobody sees it change, or past nn.Module's own
assignment; and hooks of the backward pass around operators.
"""

from __future__ import annotations

import functools
import queue
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.memo import HERE
from spindle_cli.analysis.tracing.behaviour import behaviour_of
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload

from .shares import assert_steps_as_plain
from .toy import WIDTH, Block, Items


class Net(nn.Module):
    def __init__(self, factor: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.head = Block(), Block(), nn.Linear(WIDTH, 1)
        self.factor, self.calls, self.rate = factor, 0, 0.5
        self.counts = bytearray(1)
        self.numbers: queue.Queue[int] = queue.Queue()
        for number in range(1, 30):
            self.numbers.put(number)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return self.head(h).square().mean() * self.factor(self, h)

    @functools.cached_property
    def norm(self) -> Tensor:
        return self.head.weight.detach().norm()

    @functools.cached_property
    def state(self) -> dict[str, int]:
        return {"calls": 0}

    @functools.cached_property
    def scale(self) -> float:
        return 1 / self.head.in_features

    @functools.cached_property
    def angles(self) -> Tensor:
        return torch.linspace(0, 1, WIDTH)


@functools.cache
def meter() -> dict[str, int]:
    return {"calls": 0}


@functools.lru_cache(maxsize=4)
def norm_of(module: nn.Linear) -> Tensor:
    return module.weight.detach().norm()


SEEN: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


class Only:
    """There is one of them, once somebody has asked for it."""

    it: Only | None = None
    calls = 0

    def __new__(cls) -> Only:
        if cls.it is None:
            cls.it = super().__new__(cls)
        return cls.it


def in_what_is_remembered(net: Net, h: Tensor) -> float:
    meter()["calls"] += 1
    return 1 / meter()["calls"]


def of_remembered_parameters(net: Net, h: Tensor) -> Tensor:
    return norm_of(net.head)


def in_a_cached_property(net: Net, h: Tensor) -> float:
    net.state["calls"] += 1
    return 1 / net.state["calls"]


def of_parameters_in_a_cached_property(net: Net, h: Tensor) -> Tensor:
    return net.norm


def in_a_queue(net: Net, h: Tensor) -> float:
    return 1 / net.numbers.get()


def in_bytes(net: Net, h: Tensor) -> float:
    net.counts[0] += 1
    return 1 / net.counts[0]


def by_weak_keys(net: Net, h: Tensor) -> float:
    SEEN[net] = SEEN.get(net, 0) + 1
    return 1 / SEEN[net]


def in_the_only_one(net: Net, h: Tensor) -> float:
    Only().calls += 1
    return 1 / Only().calls


def past_assignment(net: Net, h: Tensor) -> float:
    vars(net)["calls"] += 1
    return 1 / net.calls


def by_another_assignment(net: Net, h: Tensor) -> float:
    object.__setattr__(net, "calls", net.calls + 1)
    return 1 / net.calls


def the_last_batch(net: Net, h: Tensor) -> Any:
    last = vars(net).get("last")
    vars(net)["last"] = h.detach().mean()
    return 1.0 if last is None else last


FOUND = {
    in_what_is_remembered: "left in something that nobody sees change",
    of_remembered_parameters: "left in something that nobody sees change",
    in_a_cached_property: r"left in self\.state",
    of_parameters_in_a_cached_property: r"left in self\.norm",
    in_a_queue: "left in something that nobody sees change",
    in_bytes: "left in something that nobody sees change",
    by_weak_keys: "left in something that nobody sees change",
    in_the_only_one: "left in something that nobody sees change",
    past_assignment: r"sets self\.calls of Net between operators and reads",
    by_another_assignment: r"sets self\.calls of Net between operators and reads",
    the_last_batch: "sets last of Net between operators, past",
}


def workload(factor: Callable[[Any, Tensor], Any]) -> Workload:
    torch.manual_seed(0)
    return Workload("again", [Task("t", Net(factor), 6, Items(x=(WIDTH,)))], (Block,))


@pytest.mark.parametrize("factor", FOUND, ids=lambda factor: factor.__name__)
def test_what_goes_on_from_forward_to_forward_is_refused_wherever_it_is(
    factor: Callable[[Any, Tensor], Any],
) -> None:
    with pytest.raises(WorkloadError, match=FOUND[factor]) as raised:
        analysed(workload(factor))
    assert "`operators`" in str(raised.value.hint)
    meter.cache_clear()
    norm_of.cache_clear()


def a_number(net: Net, h: Tensor) -> float:
    return net.scale


def a_table(net: Net, h: Tensor) -> Tensor:
    return (h * net.angles).mean()


def counted_and_not_read(net: Net, h: Tensor) -> float:
    vars(net)["calls"] += 1
    return net.rate


@pytest.mark.parametrize("factor", [a_number, a_table, counted_and_not_read], ids=lambda f: f.__name__)
def test_what_is_the_same_in_every_forward_is_taken(factor: Callable[[Any, Tensor], Any]) -> None:
    assert_steps_as_plain(lambda: workload(factor), 2)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Hooked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before, self.body, self.head = nn.Linear(WIDTH, WIDTH), Body(), nn.Linear(WIDTH, 1)
        hooks: dict[str, Callable[..., Any]] = {
            "register_full_backward_hook": lambda _, given, __: (given[0] * 0.1,),
            "register_full_backward_pre_hook": lambda _, given: (given[0] * 0.1,),
            "register_backward_hook": lambda _, given, __: given,
        }
        getattr(self.body, kind)(hooks[kind])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.before(x))).square().mean()


def hooked(kind: str, *operators: type[nn.Module]) -> Workload:
    torch.manual_seed(0)
    return Workload("hooked", [Task("t", Hooked(kind), 6, Items(x=(WIDTH,)))], operators)


@pytest.mark.parametrize(
    "kind", ["register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"]
)
def test_hooks_of_the_backward_pass_around_operators_are_refused(kind: str) -> None:
    """A trace goes through the module, whose hooks see no gradient of it (or never end)."""
    with pytest.raises(WorkloadError, match="'body', called between operators, has hooks of its backward"):
        analysed(hooked(kind, Block))


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_module_with_hooks_of_its_backward_pass_runs_with_them_as_an_operator(kind: str) -> None:
    """As the refusal advises."""
    assert_steps_as_plain(lambda: hooked(kind, Body), 2)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.rate = rate
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.rate * gradient, None


def reversed_by_a_rate(net: Any, h: Tensor) -> Tensor:
    made: Tensor = Reversed.apply(h, net.rates["now"])  # type: ignore[no-untyped-call]
    net.rates["now"] *= 2
    return made.mean()


def test_what_runs_as_it_is_written_may_not_read_what_moves_between_operators() -> None:
    made = workload(reversed_by_a_rate)
    made.tasks[0].module.rates = {"now": 0.1}
    with pytest.raises(WorkloadError, match=r"left in self\.rates|sets self\.rates between operators"):
        analysed(made)


NOW = {"weight": 1.0}
LOG: dict[str, float] = {}


class Plain(nn.Module):
    """One of two tasks over the same layers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).square().mean()


class Reads(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).square().mean() * NOW["weight"]


class Sets(Plain):
    def forward(self, x: Tensor) -> Tensor:
        NOW["weight"] = 2.0
        return self.head(self.body(x)).square().mean()


class SetsByValue(Plain):
    def forward(self, x: Tensor) -> Tensor:
        loss = self.head(self.body(x)).square().mean()
        NOW["weight"] = loss.item()
        return loss


class Logs(Plain):
    def forward(self, x: Tensor) -> Tensor:
        loss = self.head(self.body(x)).square().mean()
        LOG["loss"] = loss.item()
        return loss


class Counts(Plain):
    def forward(self, x: Tensor) -> Tensor:
        LOG["calls"] = LOG.get("calls", 0) + 1
        return self.head(self.body(x)).square().mean()


def two_tasks(*classes: type[Plain]) -> Workload:
    torch.manual_seed(0)
    body = Body()
    items = Items(x=(WIDTH,))
    made = [Task(f"t{number}", cls(body), 6, items) for number, cls in enumerate(classes)]
    return Workload("two", made, (Block,))


@pytest.mark.parametrize("classes", [(Sets, Reads), (Reads, Sets), (SetsByValue, Reads)])
def test_what_one_task_leaves_and_another_reads_is_refused(classes: tuple[type[Plain], ...]) -> None:
    """Each device runs its own tasks, and a trace has what was there when it was made."""
    with pytest.raises(
        WorkloadError, match=r"sets .*NOW.* between operators, which that of task 't\d' reads"
    ):
        analysed(two_tasks(*classes))


@pytest.mark.parametrize("classes", [(Logs, Logs), (Logs, Reads), (Counts, Reads), (Counts, Counts)])
def test_what_tasks_leave_and_no_other_reads_is_no_matter(classes: tuple[type[Plain], ...]) -> None:
    assert analysed(two_tasks(*classes)).tasks.keys() == {"t0", "t1"}


class WithBuffer(nn.Module):
    """Its buffer is written through numpy, which shares its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()
        self.register_buffer("steps", torch.zeros(1))
        self.view = self.steps.numpy()

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        self.view += 1.0
        return (h * self.steps.sum()).square().mean()


def test_a_buffer_that_numpy_writes_is_refused() -> None:
    task = Task("t", WithBuffer(), 4, Items(x=(WIDTH,)))
    with pytest.raises(WorkloadError, match="writes into the tensor 'steps' past torch"):
        analysed(Workload("numpy", [task], (Block,)))


class WithParts(nn.Module):
    """A part that runs as it is written has a function inside of it, and forward leaves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = Block(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.a(x)).square().mean() + 0.1 * sum(p.square().sum() for p in self.parameters())


def test_a_part_with_a_function_inside_is_the_same_in_another_trace() -> None:
    def make() -> Workload:
        torch.manual_seed(0)
        return Workload("parts", [Task("t", WithParts(), 4, Items(x=(WIDTH,)))], (Block,))

    assert_steps_as_plain(make, 2)


class WithAPartial(Net):
    """A part runs as it is written with an object that nothing can look into, and each forward makes anew."""

    def forward(self, x: Tensor) -> Tensor:
        losses = self.head(self.b(self.a(x))).square().squeeze(1)
        scaled = functools.partial(self.scaled, object())
        if (losses > 0.1).sum() > 3:
            losses = scaled(losses)
        return losses.mean() * self.factor(self, losses)

    def scaled(self, _: object, losses: Tensor) -> Tensor:
        return 0.5 * losses


def with_a_partial(factor: Callable[[Any, Tensor], Any]) -> Workload:
    torch.manual_seed(0)
    return Workload("partial", [Task("t", WithAPartial(factor), 6, Items(x=(WIDTH,)))], (Block,))


def test_a_part_that_is_made_anew_hides_nothing() -> None:
    assert analysed(with_a_partial(a_number)).tasks["t"].ops
    with pytest.raises(WorkloadError, match="left in something that nobody sees change"):
        analysed(with_a_partial(in_what_is_remembered))
    meter.cache_clear()


def around(model: nn.Module) -> Workload:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    return Workload("around", [Task("t", Whole(), 4, Items(x=(WIDTH,)))], (Block,))


HOOKS: dict[str, Callable[..., Any]] = {
    "register_forward_pre_hook": lambda _, given: (0.7 * given[0],),
    "register_forward_hook": lambda _, __, made: 0.5 * made,
    "register_full_backward_hook": lambda _, given, __: given,
    "register_full_backward_pre_hook": lambda _, given: given,
}


def net_with_hooks(*kinds: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net(lambda _net, _h: 1.0)
    for kind in kinds:
        getattr(net, kind)(HOOKS[kind])
    return net


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_the_whole_model_are_refused(kind: str) -> None:
    with pytest.raises(WorkloadError, match=rf"Net, has hooks \({kind}\), which no plan runs"):
        analysed(Workload("hooked", [Task("t", net_with_hooks(kind), 4, Items(x=(WIDTH,)))], (Block,)))


def test_hooks_of_a_model_that_another_calls_run() -> None:
    """As the refusal advises."""
    assert_steps_as_plain(
        lambda: around(net_with_hooks("register_forward_pre_hook", "register_forward_hook")), 2
    )


def test_layers_with_what_cannot_be_looked_into_are_alike_in_one_process_alone() -> None:
    """However deep it lies: its text is quoted by those around it."""
    layer = Block()
    assert not behaviour_of(layer).startswith(HERE)
    layer.held = [[functools.partial(print, object())]]
    assert behaviour_of(layer).startswith(HERE)


@functools.cache
def counts() -> dict[str, float]:
    return {"calls": 0.0}


class CountsUnseen(Block):
    """An operator that counts in what `functools.cache` has kept for it."""

    def forward(self, x: Tensor) -> Tensor:
        counts()["calls"] += 1.0
        return super().forward(x) * counts()["calls"]


class LooksUp(Block):
    """An operator that looks up there what nobody changes, and a number that is none."""

    def forward(self, x: Tensor) -> Tensor:
        scale = meter().get("scale", 0.5)
        return super().forward(x).masked_fill(x > 1e6, float("nan")) * scale


@pytest.mark.parametrize(("cls", "is_whole"), [(CountsUnseen, True), (LooksUp, False)])
def test_an_operator_that_counts_where_nobody_sees_it_is_not_split(cls: type[Block], is_whole: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(cls(), nn.Linear(WIDTH, 1))
    task = Task("t", Mean(net), 4, Items(x=(WIDTH,)))
    graph = analysed(Workload("unseen in operators", [task], (cls,)))
    assert graph.tasks["t"].ops[0].coupled == is_whole


class Mean(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()
