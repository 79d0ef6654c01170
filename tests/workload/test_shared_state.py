"""What operators compute with and change is no other op's: each device would go on from its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.memory import drop
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items

KEPT: list[int] = []


class Layer(nn.Module):
    """Multiplies what its block gives by a number that `moves` makes of what it keeps."""

    def __init__(
        self, moves: Callable[[Any, Tensor], Any], memory: Any = None, linear: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH) if linear is None else linear
        self.moves, self.memory, self.calls = moves, memory, 0
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * self.moves(self, y)


class Memory:
    """An object that several layers hold."""

    def __init__(self) -> None:
        self.calls = 0


class Reverse(torch.autograd.Function):
    """Has a gradient by what is kept, and a result without it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def counts(layer: Any, y: Tensor) -> float:
    layer.calls += 1
    return float(0.9**layer.calls)


def counts_elsewhere(layer: Any, y: Tensor) -> float:
    layer.memory.calls += 1
    return float(0.9**layer.memory.calls)


def counts_in_the_file(layer: Any, y: Tensor) -> float:
    KEPT.append(1)
    return float(0.9 ** len(KEPT))


def keeps(layer: Any, y: Tensor) -> Tensor:
    before = getattr(layer, "kept", torch.ones(()))
    layer.kept = y.detach().mean()
    return before


@torch.no_grad()
def averages(layer: Any, y: Tensor) -> Tensor:
    layer.mean.lerp_(y.mean(0), 0.1)
    return layer.mean.clone()


def reverses(layer: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        layer.mean.mul_(0.9)
    return Reverse.apply(y, layer.mean)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def counts_what_nobody_reads(layer: Any, y: Tensor) -> float:
    layer.calls += 1
    layer.mean.lerp_(y.mean(0), 0.1)
    return 1.0


@torch.no_grad()
def fills(layer: Any, y: Tensor) -> Tensor:
    """What was there before is not read."""
    layer.mean.copy_(layer.linear.weight[0])
    return layer.mean.clone()


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def analyse(*nets: nn.Module) -> None:
    tasks = [Task(name, net, 4, Items(x=(WIDTH,))) for name, net in zip("ab", nets, strict=False)]
    kinds = {type(layer) for net in nets for layer in net.layers}  # type: ignore[union-attr]
    analysed(Workload("w", tasks, tuple(kinds)))


def normed(kind: str) -> nn.Module:
    made = {"hook": nn.utils.spectral_norm, "part": nn.utils.parametrizations.spectral_norm}
    linear: nn.Module = made[kind](nn.Linear(WIDTH, WIDTH))
    return linear


def one(layer: Any, y: Tensor) -> float:
    return 1.0


SHARED: dict[str, Callable[[], nn.Module]] = {
    "changes the buffer 'a.layers.1.linear.parametrizations.weight.0._v'": lambda: Layer(
        one, linear=normed("part")
    ),
    "changes the buffer 'a.layers.1.linear.weight_u'": lambda: Layer(one, linear=normed("hook")),
    "changes the buffer 'a.layers.1.mean'": lambda: Layer(averages),
    "changes the buffer 'a.layers.1.mean', from": lambda: Layer(reverses),
    "keeps layers.0.calls": lambda: Layer(counts),
    "keeps layers.0.kept": lambda: Layer(keeps),
}


@pytest.mark.parametrize("said", SHARED)
def test_what_two_tasks_go_on_from_is_refused(said: str) -> None:
    shared = SHARED[said]()
    with pytest.raises(WorkloadError, match=r"test_shared_state\.py:\d+: task '[ab]'") as refused:
        analyse(Net(Block(), shared), Net(shared))
    assert said in str(refused.value) and "of task" in str(refused.value)
    assert ("matrix_norm" in str(refused.value)) == ("linear" in said)


@pytest.mark.parametrize("said", SHARED)
def test_what_two_calls_go_on_from_is_refused(said: str) -> None:
    shared = SHARED[said]()
    with pytest.raises(WorkloadError, match="from which another call of it goes on"):
        analyse(Net(Block(), shared, shared))


@pytest.mark.parametrize(
    ("moves", "said"),
    [
        (counts_elsewhere, r"keeps layers.[01].memory"),
        (counts_in_the_file, r"keeps .*test_shared_state\.KEPT"),
    ],
)
def test_what_two_layers_keep_in_one_place_is_refused(moves: Callable[[Any, Tensor], Any], said: str) -> None:
    memory = Memory()
    with pytest.raises(WorkloadError, match=said):
        analyse(Net(Block(), Layer(moves, memory)), Net(Layer(moves, memory)))


class Settings:
    """A class as a place for numbers."""

    calls = 0


class Reads(nn.Module):
    """Multiplies by what `read` finds; it leaves nothing itself."""

    def __init__(self, read: Callable[[Any], Any], memory: Any = None) -> None:
        super().__init__()
        self.linear, self.read, self.memory = nn.Linear(WIDTH, WIDTH), read, memory

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.read(self)


def counts_in_a_class(layer: Any, y: Tensor) -> float:
    Settings.calls += 1
    return 1.0


def leaves_a_tensor(layer: Any, y: Tensor) -> float:
    layer.memory.kept = y
    return 1.0


READ: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "layers.1.memory.calls": (counts_elsewhere, lambda layer: layer.memory.calls),
    "layers.1.memory.kept": (leaves_a_tensor, lambda layer: getattr(layer.memory, "kept", 1.0)),
    "Settings.calls": (counts_in_a_class, lambda _: Settings.calls),
    "test_shared_state.KEPT": (counts_in_the_file, lambda _: len(KEPT)),
}


@pytest.mark.parametrize("said", READ)
@pytest.mark.parametrize("order", [1, -1])
def test_what_one_operator_leaves_and_another_reads_is_refused(said: str, order: int) -> None:
    memory = Memory()
    leaves, reads = READ[said]
    pair = [Layer(leaves, memory), Reads(reads, memory)][::order]
    said = said.replace("1", "2") if order < 0 else said
    with pytest.raises(
        WorkloadError, match=r"test_shared_state\.py:\d+: task 'a': the forward of"
    ) as refused:
        analyse(Net(Block(), *pair))
    assert f"{said}, which 'layers.{2 if order > 0 else 1}' of task 'a' reads" in str(refused.value)


def test_what_nobody_else_reads_may_be_left() -> None:
    memory = Memory()
    reads = Reads(lambda layer: len(str(layer.memory.__class__)), memory)
    analyse(Net(Block(), Layer(leaves_a_tensor, memory), Layer(one)), Net(reads))
    analyse(Net(Block(), Layer(leaves_a_tensor, Memory())), Net(Reads(lambda _: 1.0, Memory())))


def test_what_a_hook_counts_keeps_its_layer_whole() -> None:
    counted = [0]

    def halves(*given: Any) -> Any:
        counted[0] += 1
        return given[-1] * 0.5 ** counted[0]

    layer = Layer(one)
    layer.register_forward_hook(halves)
    graph = analysed(Workload("w", [Task("a", Net(Block(), layer), 4, Items(x=(WIDTH,)))], (Block, Layer)))
    assert [op.kept for op in graph.tasks["a"].ops[:2]] == [(), ("layers.1._forward_hooks[0]: counted",)]


class Tied(nn.Module):
    """Computes with another layer's parameter."""

    def __init__(self, other: nn.Module, *, hides: bool) -> None:
        super().__init__()
        self.linear, self.hidden = nn.Linear(WIDTH, WIDTH), [other]
        self.tied = None if hides else other

    def forward(self, x: Tensor) -> Tensor:
        other: Any = self.tied or self.hidden[0]
        return self.linear(x) @ other.linear.weight


def test_a_layer_that_hides_another_is_told_to_hold_it() -> None:
    """`profile` has parameters on the meta device, but for those that it knows a layer to have."""
    other = Layer(one)
    net = Net(Block(), other, Tied(other, hides=True))
    drop(net.parameters())
    with pytest.raises(WorkloadError, match=r"'layers\.2' \(Tied\) fails .* meta") as refused:
        analyse(net)
    assert "self.tied = other" in str(refused.value.hint)
    net.layers[2] = Tied(other, hides=False)
    drop(net.parameters())
    analyse(net)


def test_each_may_keep_its_own() -> None:
    analyse(
        Net(Block(), Layer(counts_elsewhere, Memory())),
        Net(Layer(counts_elsewhere, Memory()), Layer(averages)),
    )


@pytest.mark.parametrize("moves", [counts_what_nobody_reads, fills])
def test_what_nobody_goes_on_from_may_be_shared(moves: Callable[[Any, Tensor], Any]) -> None:
    shared = Layer(moves)
    analyse(Net(Block(), shared), Net(shared))


class Spectral(nn.Module):
    """As the refusal of a shared spectral norm has it."""

    def forward(self, w: Tensor) -> Tensor:
        return w / torch.linalg.matrix_norm(w.flatten(1), 2)  # type: ignore[no-any-return]


def test_a_norm_without_memory_may_be_shared() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(linear, "weight", Spectral())
    assert torch.linalg.matrix_norm(linear.weight, 2).item() == pytest.approx(1.0)
    shared = Layer(one, linear=linear)
    analyse(Net(Block(), shared), Net(shared))


def test_a_variable_that_two_functions_share_is_one_place() -> None:
    calls = 0

    def count() -> float:
        nonlocal calls
        calls += 1
        return 1.0

    pair = Layer(lambda layer, y: layer.memory(), count), Reads(lambda layer: layer.memory(), lambda: calls)
    with pytest.raises(WorkloadError, match=r"leaves layers\.1\.memory: calls, which 'layers\.2'"):
        analyse(Net(Block(), *pair))


def test_a_name_that_is_made_when_it_runs_may_be_anybodys() -> None:
    def name(y: Tensor) -> str:
        return f"of_{y.dim()}"

    memory = Memory()
    leaves = Layer(lambda layer, y: setattr(layer.memory, name(y), 2.0) or 1.0, memory)
    reads = Reads(lambda layer: getattr(layer.memory, name(layer.linear.weight), 1.0), memory)
    with pytest.raises(WorkloadError, match=r"leaves layers\.1\.memory\.of_2, which 'layers\.2'"):
        analyse(Net(Block(), leaves, reads))


def test_a_list_that_nobody_reads_may_be_shared() -> None:
    """As people look at norms of activations."""
    shared = Layer(lambda layer, y: layer.memory.append(y.detach().norm()) or 1.0, [])
    analyse(Net(Block(), shared), Net(shared))
    assert shared.memory == []


class Counting(nn.Module):
    """Two layers whose outputs its own hook multiplies, once for both."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.calls, self.noted = 0, [0]
        self.layers = nn.ModuleList([Block(), Block()])
        meter = Meter()
        hooks = {
            "a method": self.scales,
            "an object": meter,
            "a function": lambda *given: self.scaled(*given),
        }
        for layer in self.layers:
            layer.register_forward_hook(hooks[kind])

    def scales(self, _: nn.Module, __: Any, result: Tensor) -> Tensor:
        self.calls += 1
        return result * 0.9**self.calls

    def scaled(self, _: nn.Module, __: Any, result: Tensor) -> Tensor:
        self.noted[0] += 1
        return result * 0.9 ** self.noted[0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Meter:
    calls = 0

    def __call__(self, _: nn.Module, __: Any, result: Tensor) -> Tensor:
        self.calls += 1
        return result * 0.9**self.calls


@pytest.mark.parametrize("kind", ["a method", "an object", "a function"])
def test_what_one_hook_of_two_layers_counts_is_refused(kind: str) -> None:
    with pytest.raises(WorkloadError, match=r"keeps layers\.[01]\._forward_hooks\[0\].*, from which"):
        analyse(Counting(kind))
