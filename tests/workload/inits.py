"""Workloads whose layers are initialised in the ways that torch and its users do it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload

from .toy import Items


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(8) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.scale


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, x, x, need_weights=False)[0]


class Custom(nn.Module):
    """orthogonal_, trunc_normal_, sparse_, an odd number of elements, a random mask."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
        self.c = nn.Parameter(torch.empty(8))
        self.table = nn.Embedding(7, 8)
        self.register_buffer("noise", torch.randn(8))
        nn.init.orthogonal_(self.a.weight)
        nn.init.trunc_normal_(self.b.weight, std=0.02)
        nn.init.sparse_(self.b.weight, sparsity=0.3)
        nn.init.uniform_(self.c)
        with torch.no_grad():
            self.a.weight.mul_(torch.bernoulli(torch.full((8, 8), 0.9)))
            self.c.data = self.c.data.clone().normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.c + self.table.weight[0] + self.noise


class Net(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class Reading(nn.Module):
    """Initialised from the values of another parameter, which cannot be done without them."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        with torch.no_grad():
            self.linear.weight.copy_(other.weight / other.weight.norm().item())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _workload(layers: list[nn.Module], *classes: type[nn.Module]) -> Workload:
    task = Task("only", Net(layers), 4, Items(x=(4, 8)))
    return Workload("inits", [task], operators=classes)


def mixed() -> Workload:
    return _workload(
        [Plain(), Convolution(), Attention(), Custom(), Plain()], Plain, Convolution, Attention, Custom
    )


def copied() -> Workload:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layers = [*nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).layers, Plain()]
    layers.append(copy.deepcopy(layers[-1]))
    return _workload(layers, nn.TransformerEncoderLayer, Plain)


def reading() -> Workload:
    plain = Plain()
    return _workload([plain, Reading(plain.linear), Plain()], Plain, Reading)


class OfOne(nn.Module):
    """Two parameters in one piece of memory, which is filled after they are made."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.empty(16, 8)
        self.up, self.down = (nn.Parameter(part) for part in both.chunk(2))
        self.last = nn.Linear(8, 8)
        with torch.no_grad():
            both.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x @ self.up @ self.down)


def parts_of_one() -> Workload:
    return _workload([OfOne(), Plain()], OfOne, Plain)


def tied() -> Workload:
    first, second = Plain(), Plain()
    second.linear.weight = first.linear.weight
    return _workload([first, second, Plain()], Plain)


def normed() -> Workload:
    """weight_norm keeps what it has computed of its parameters, and autograd has them for that until the next
    forward pass.
    """
    layers: list[nn.Module] = [Plain() for _ in range(3)]
    for layer in layers:
        nn.utils.weight_norm(layer.get_submodule("linear"))  # type: ignore[no-untyped-call]
    return _workload(layers, Plain)


def parametrized() -> Workload:
    """The same by parametrizations, which register what they compute of a weight in its place."""
    layers: list[nn.Module] = [Plain() for _ in range(3)]
    for layer in layers:
        nn.utils.parametrizations.weight_norm(layer.get_submodule("linear"))
    return _workload(layers, Plain)


def _load_beside_new() -> Plain:
    """As `from_pretrained` does: born on the meta device, where initialising draws nothing; the weight is
    loaded, the bias, which the file has not, drawn.
    """
    with torch.device("meta"):
        born = Plain()
        nn.init.normal_(born.linear.weight)
        born.linear.weight.data.uniform_()
    born.linear.weight = nn.Parameter(torch.linspace(0, 1, 64).reshape(8, 8))
    born.linear.bias = nn.Parameter(torch.empty_like(born.linear.bias, device="cpu"))
    nn.init.normal_(born.linear.bias)
    with torch.no_grad():
        born.linear.bias.add_(torch.empty_like(born.linear.bias).normal_())
    return born


def loaded() -> Workload:
    return _workload([Plain(), _load_beside_new(), Plain(), Plain()], Plain)
