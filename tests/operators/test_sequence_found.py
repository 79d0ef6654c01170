"""Which layers' sequences are shared out, and why others are left whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from sequence_toys import HEADS, WIDTH, Texts, workload_of, workload_with
from torch import Tensor, nn
from torch.nn import functional

from helpers.analysed import analysed
from spindle_cli.operators.sequence.find import SplitParts, find_sequence
from spindle_cli.operators.sequence.recording import NotBySequenceError
from spindle_cli.operators.sequence.types import SequenceSplit
from spindle_cli.operators.tensor_parallel import kept_whole, layer_split
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Workload
from spindle_cli.zoo.layers import Attention

POSITIONS = 8


@cache
def analysed_by_name(name: str) -> tuple[Workload, TaskGraph]:
    workload = workload_of(name, POSITIONS)
    return workload, analysed(workload).tasks["task"]


def found(name: str, op: int, degree: int = 2) -> SequenceSplit:
    workload, task = analysed_by_name(name)
    split = layer_split(workload, task, task.ops[op], degree)
    assert split is not None
    assert split.sequence is not None
    return split.sequence


def test_what_all_devices_have_whole_and_use_for_their_positions_is_summed() -> None:
    norms = {
        f"layers.1.{norm}.{key}" for norm in ("attention_norm", "mlp_norm") for key in ("weight", "bias")
    }
    assert found("encoder", 1).partial == norms
    assert found("language", 1).partial == {name for name in norms if name.endswith("weight")}
    # The norm of single heads is in the plan; biases of rowwise maps are added by one device.
    assert found("direct", 1).partial == {
        f"layers.1.{name}" for name in ("norm.weight", "scale", "middle.weight", "middle.bias")
    }
    # Behind what is gathered, too.
    assert found("latent", 1).partial == {
        f"layers.1.{name}"
        for name in ("norm.weight", "attention.narrow.weight", "attention.narrow_norm.weight")
    }


def test_parts_are_gathered_before_the_largest_modules_that_are_split_as_a_whole() -> None:
    assert dict(found("encoder", 1).entries) == {"layers.1.attention": (0,), "layers.1.mlp": (0,)}
    assert set(found("language", 1).entries) == {f"layers.1.{name}" for name in ("attention", "gate", "up")}
    direct = found("direct", 1)
    assert set(direct.entries) == {f"layers.1.{name}" for name in ("query", "key", "value", "up")}
    assert direct.results == (0, 1)


def test_a_context_stays_whole_and_the_maps_that_take_it_sum_its_gradient() -> None:
    decoder = found("captions", 3)
    cross = "decoder.1.cross_attention"
    assert decoder.alike == {f"{cross}.key", f"{cross}.value"}
    assert decoder.entries[cross] == (0,)
    assert decoder.trunk == 0


def test_neighbouring_layers_hand_each_other_their_parts() -> None:
    first, middle, last = (found("language", op) for op in range(3))
    assert (first.taken, first.kept) == (None, {None})  # it makes its trunk of words
    assert (middle.taken, middle.kept) == (0, {None})
    assert (last.taken, last.kept) == (1, frozenset())  # a head comes behind it; words are its first argument
    # What else is computed of a result needs all of it.
    assert found("direct", 1).kept == {0}


def test_a_layer_needs_two_positions_for_each_device() -> None:
    for positions, is_shared in ((8, True), (7, False)):
        workload = workload_of("language", positions)
        task = analysed(workload).tasks["task"]
        split = layer_split(workload, task, task.ops[1], 4)
        assert split is not None
        assert (split.sequence is not None) is is_shared


def test_none_is_shared_out_where_the_workload_says_so() -> None:
    workload = workload_of("language", POSITIONS)
    workload.tp_sequence = False
    task = analysed(workload).tasks["task"]
    split = layer_split(workload, task, task.ops[1], 2)
    assert split is not None
    assert split.sequence is None


class Layer(nn.Module):
    """A layer with something else done to its trunk."""

    what: Callable[[Any, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(WIDTH, HEADS)
        self.position = nn.Parameter(torch.randn(POSITIONS, WIDTH))
        self.register_buffer("mask", torch.ones(1, POSITIONS, 1))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return type(self).what(self, x + self.attention(self.norm(x)))


def counted(layer: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.seen.add_(x.mean((0, 1)))
    return x


LOOKS_AROUND: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "neighbours": (lambda _, x: x + x.roll(1, 1), "another order"),
    "reversed": (lambda _, x: x.flip(1), "another order"),
    "summed up": (lambda _, x: x.cumsum(1), ""),
    "centred": (lambda _, x: x - x.mean(1, keepdim=True), ""),
    "largest": (lambda _, x: x - x.amax(1, keepdim=True), ""),
    "softmax": (lambda _, x: x.softmax(1), ""),
    "norm": (lambda _, x: functional.normalize(x, dim=1), ""),
    "shifted": (lambda _, x: torch.cat([x[:, 1:], x[:, :1]], 1), ""),
    "positions": (lambda layer, x: x + layer.position, "fails on 4 of 8 positions"),
    "numbered": (lambda _, x: x + torch.arange(x.shape[1])[:, None], "numbers"),
    "masked": (lambda layer, x: x * layer.mask, "fails on 4 of 8 positions"),
    "counted": (lambda _, x: x / x.shape[1], "size of the batch"),
    "long": (lambda _, x: x.tanh() if x.shape[1] > 4 else x, "others for another size"),
    "dropped": (lambda _, x: functional.dropout(x, 0.5), "draws random numbers for the trunk"),
    "noisy": (lambda _, x: x + torch.rand(x.shape), "draws random numbers for the trunk"),
    "turned": (lambda _, x: x.transpose(0, 1).reshape(x.shape), ""),
    "buffer": (counted, "it changes 'seen'"),
}


@pytest.mark.parametrize("name", LOOKS_AROUND)
def test_what_looks_at_several_positions_or_draws_stays_whole(name: str) -> None:
    what, why = LOOKS_AROUND[name]
    made = type("Layer", (Layer,), {"what": staticmethod(what)})
    refused = why_whole(made)
    assert why in refused


def test_the_layer_that_these_are_made_from_is_shared_out() -> None:
    made = type("Layer", (Layer,), {"what": staticmethod(lambda _, x: x.tanh())})
    assert split_found(made).partial == {"layers.1.norm.weight", "layers.1.norm.bias"}


def test_a_profile_says_why_a_sequence_stays_whole() -> None:
    what, why = LOOKS_AROUND["dropped"]
    made = type("Dropped", (Layer,), {"what": staticmethod(what)})
    task, _ = asked(made)
    workload = workload_with(task.root, POSITIONS, tp_plans={made: _PLAN})
    (note,) = kept_whole(analysed(workload))
    assert note.startswith("tensor parallelism: each device has the whole sequence in Dropped: ")
    assert why in note
    workload.tp_sequence = False
    assert kept_whole(analysed(workload)) == ()


class Hooked(Layer):
    @staticmethod
    def what(_: Any, x: Tensor) -> Tensor:
        return x


def test_a_layer_with_hooks_stays_whole() -> None:
    task, parts = asked(Hooked)
    handle = task.root.get_submodule("layers.1.norm").register_forward_hook(lambda *_: None)
    with pytest.raises(NotBySequenceError, match="hooks"):
        find_sequence(task, task.ops[1], parts, 2)
    handle.remove()


class Tied(Texts):
    """A layer's norm is used behind the layers, too."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__(layers, POSITIONS)
        self.norm = layers[2].norm  # type: ignore[assignment]


def test_a_norm_that_is_used_behind_its_layer_by_the_same_name_keeps_the_sequence_whole() -> None:
    model = Tied(nn.ModuleList(Hooked() for _ in range(3)))
    task = analysed(workload_with(model, POSITIONS, tp_plans={Hooked: _PLAN})).tasks["task"]
    whole = {}
    for op in task.ops:
        split = layer_split(workload_with(model, POSITIONS, tp_plans={Hooked: _PLAN}), task, op, 2)
        assert split is not None
        whole[op.target] = split.sequence is None
    assert whole == {"layers.0": False, "layers.1": False, "layers.2": True}


_PLAN = {f"attention.{name}": "colwise" for name in ("query", "key", "value")} | {"attention.out": "rowwise"}


def asked(made: type[nn.Module]) -> tuple[TaskGraph, SplitParts]:
    layers = nn.ModuleList(made() for _ in range(3))
    workload = workload_with(Texts(layers, POSITIONS), POSITIONS, tp_plans={made: _PLAN})
    task = analysed(workload).tasks["task"]
    split = layer_split(workload, task, task.ops[1], 2)
    assert split is not None
    return task, SplitParts(split.added_once | split.dims.keys(), split.partial, split.entered, split.summed)


def split_found(made: type[nn.Module]) -> SequenceSplit:
    task, parts = asked(made)
    return find_sequence(task, task.ops[1], parts, 2)


def why_whole(made: type[nn.Module]) -> str:
    with pytest.raises(NotBySequenceError) as refused:
        split_found(made)
    return str(refused.value)


class Recalling(nn.Module):
    """Attends to what it remembers, which its norm goes over as over the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(WIDTH, HEADS)
        self.remembered = nn.Parameter(torch.randn(1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        remembered = self.recalled().expand(len(x), -1, -1)
        return x + self.attention(self.norm(x), remembered)

    def recalled(self) -> Tensor:
        return self.norm(self.remembered)


class RecallingApart(Recalling):
    """The same with another norm."""

    def __init__(self) -> None:
        super().__init__()
        self.other_norm = nn.LayerNorm(WIDTH)

    def recalled(self) -> Tensor:
        return self.other_norm(self.remembered)


def test_a_norm_that_is_used_for_a_part_and_for_what_all_have_alike_keeps_the_sequence_whole() -> None:
    assert "both for a part of the positions and for all of them" in why_whole(Recalling)
    split = split_found(RecallingApart)
    assert split.partial == {"layers.1.norm.weight", "layers.1.norm.bias"}
    assert split.alike == {"layers.1.attention.key", "layers.1.attention.value"}
