"""Which classes are candidates for operators: by the structure of hand-made models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spindle_cli.init.run import repeated_blocks


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))


def names(**models: nn.Module) -> dict[str, tuple[int, int, str, int]]:
    found = repeated_blocks(models)
    return {block.name: (block.count, block.equal, block.first, block.parameters) for block in found}


def test_layers_of_a_list_are_counted_with_their_parameters() -> None:
    assert names(text=Stage(2, 3)) == {"Layer": (3, 3, "text.layers.0", 3 * (4 + 2))}


def test_of_equal_stages_the_stages_are_found_and_not_what_is_in_them() -> None:
    assert names(a=nn.Sequential(Stage(2, 3), Stage(2, 3))) == {"Stage": (2, 2, "a.0", 36)}


def test_of_stages_of_other_widths_the_layers_are_found() -> None:
    found = names(a=nn.Sequential(Stage(2, 3), Stage(4, 2)))
    assert found == {"Layer": (5, 3, "a.0.layers.0", 3 * 6 + 2 * 20)}


def test_two_equal_ones_suffice_and_one_does_not() -> None:
    assert names(a=nn.Sequential(Layer(2), Layer(2)))["Layer"][:2] == (2, 2)
    assert names(a=nn.Sequential(Layer(2), Layer(3))) == {}
    assert names(a=nn.Sequential(Layer(2))) == {}


def test_maps_and_norms_alone_are_no_blocks() -> None:
    assert names(a=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2), nn.LayerNorm(2))) == {}


def test_a_sequence_inside_a_sequence_is_looked_into() -> None:
    inner = nn.Sequential(Layer(2), Layer(2))
    assert names(a=nn.Sequential(inner, nn.Sequential(Layer(2), Layer(2))))["Layer"][0] == 4


def test_what_tasks_share_is_counted_once() -> None:
    trunk = Stage(2, 2)
    assert names(a=nn.Sequential(trunk), b=nn.Sequential(trunk))["Layer"] == (2, 2, "a.0.layers.0", 12)


def test_parameters_that_blocks_share_are_counted_once() -> None:
    first, second = Layer(2), Layer(2)
    second.map = first.map
    assert names(a=nn.Sequential(first, second))["Layer"] == (2, 2, "a.0", 6)


def test_a_block_that_is_used_elsewhere_alone_is_of_the_class_too() -> None:
    class Model(Stage):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.last = Layer(2)

    assert names(a=Model())["Layer"][0] == 3


def test_a_class_that_cannot_be_imported_is_no_candidate() -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.map(x))

    assert names(a=nn.Sequential(Local(), Local())) == {}


def test_torchs_own_layers_that_hold_others_are_blocks() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False)
    assert names(a=encoder)["TransformerEncoderLayer"][:3] == (2, 2, "a.layers.0")
