"""torch's own stacks of layers: run as one layer, unless the layers in them are operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.workload.types import Task, Workload

from .shares import assert_trains_as_plain

WIDTH, BATCH, LENGTH, LAYERS = 8, 4, 5, 3
SHAPE: dict[str, int | float | bool] = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True}


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, **SHAPE)  # type: ignore[arg-type]  # by name
    return nn.TransformerEncoder(layer, LAYERS, norm=nn.LayerNorm(WIDTH))


def decoder() -> nn.TransformerDecoder:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, **SHAPE), LAYERS)  # type: ignore[arg-type]


class Encoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x).square().mean()


class Masked(Encoded):
    """Without what comes later, and without the padding of each sample."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return self.trunk(x, mask, padding, is_causal=True).square().mean()


class Looking(Encoded):
    """torch looks at the mask's values for whether it is causal, where nobody says so."""

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x, nn.Transformer.generate_square_subsequent_mask(LENGTH)).square().mean()


class Decoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.writer = encoder(), decoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.writer(x, self.trunk(x)).square().mean()


class Headed(nn.Module):
    """One layer, which has linear maps inside, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = encoder().layers[0], nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)).square().mean()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(WIDTH, 2, 2, LAYERS, **SHAPE)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, x).square().mean()


ENCODER, DECODER = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer


@pytest.mark.parametrize(
    ("module", "operators", "ops"),
    [
        (Encoded, (ENCODER,), [LAYERS]),
        (Masked, (ENCODER,), [LAYERS]),
        (Decoded, (ENCODER, DECODER), [LAYERS, LAYERS]),
        (Both, (ENCODER, DECODER), [2, LAYERS]),
        (Encoded, (nn.TransformerEncoder,), [1]),
        (Decoded, (ENCODER,), [LAYERS]),
        (Headed, (nn.Linear,), [1]),
    ],
)
def test_layers_of_a_stack_are_operators_where_they_are_listed(
    module: type[nn.Module], operators: tuple[type[nn.Module], ...], ops: list[int]
) -> None:
    torch.manual_seed(0)
    sample = {"x": torch.randn(LENGTH, WIDTH)}
    if module is Masked:
        sample["padding"] = torch.tensor([False] * (LENGTH - 1) + [True])
    task = Task("task", module(), BATCH, dataset=[sample] * BATCH)  # type: ignore[arg-type]  # items
    graph = analysed(Workload("stacks", (task,), operators=operators))
    assert [len(metaop.ops) for metaop in graph.metaops] == ops
    assert not graph.metaops[0].coupled


@pytest.mark.parametrize("operator", [ENCODER, nn.TransformerEncoder])
def test_a_stack_that_looks_at_values_runs_whole(operator: type[nn.Module]) -> None:
    torch.manual_seed(0)
    items = [{"x": torch.randn(LENGTH, WIDTH)} for _ in range(BATCH)]
    task = Task("task", Looking(), BATCH, dataset=items)  # type: ignore[arg-type]
    graph = analysed(Workload("stacks", (task,), operators=(operator,))).tasks["task"]
    assert [op.coupled for op in graph.ops] == [True]
    assert_trains_as_plain(task, graph, torch.utils.data.default_collate(items), [0, 1, BATCH])
