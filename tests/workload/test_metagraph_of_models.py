"""Which ops become one MetaOp, what MetaOps are called, and which share parameters; solved by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.metaops.contract import component_path, short_names
from spindle_cli.workload.graph import ParameterTable, WorkloadGraph
from spindle_cli.workload.types import Task, Workload

from . import shapes_of_models
from .toy import WIDTH, Block, Items


def graph_of(name: str) -> WorkloadGraph:
    return analysed(shapes_of_models.build(name))


def rows(graph: WorkloadGraph) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(metaop.name, len(metaop.ops), metaop.inputs) for metaop in graph.metaops]


class Chain(nn.Module):
    """Blocks, with whatever a test puts between them."""

    def __init__(self, depth: int, between: dict[int, object] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.between = between or {}

    def forward(self, x: Tensor) -> Tensor:
        for position, block in enumerate(self.blocks):
            x = block(x)
            if position in self.between:
                x = self.between[position](x)
        return x.pow(2).mean()


def runs_of(module: nn.Module, batch_size: int = 4) -> list[tuple[int, ...]]:
    task = Task("t", module, batch_size, Items(x=(6, WIDTH)))
    return [metaop.ops for metaop in analysed(Workload("w", [task], (Block,))).metaops]


def test_a_chain_is_one_metaop_whatever_glue_is_at_its_ends() -> None:
    assert rows(graph_of("two_tasks")) == [
        ("image_text/vision", 3, ()),
        ("image_text/text", 2, ()),
        ("image_text/loss", 1, ("image_text/vision", "image_text/text")),
        ("classify/tower", 3, ()),
    ]


def test_a_decoder_takes_the_encoders_output_in_every_op() -> None:
    encoder, decoder, _ = graph_of("encoder_decoder").metaops
    assert decoder.inputs == decoder.inputs_of_every_op == (encoder.name,)
    assert len(decoder.ops) == 3


def test_a_bias_made_by_the_first_layer_reaches_all_others() -> None:
    first, rest = graph_of("biased").metaops
    assert rest.inputs == rest.inputs_of_every_op == (first.name,)
    assert (first.ops, rest.ops) == ((0,), (1, 2, 3))


def test_a_shorter_sequence_is_other_work() -> None:
    assert runs_of(Chain(4, {1: lambda x: x[:, ::2]})) == [(0, 1), (2, 3)]


def test_glue_in_the_middle_of_a_chain_cuts_it_behind_the_glue() -> None:
    assert runs_of(Chain(5, {1: lambda x: x * 2})) == [(0, 1), (2, 3, 4)]


def test_the_same_glue_behind_every_layer_does_not_cut() -> None:
    assert runs_of(Chain(4, dict.fromkeys(range(4), lambda x: x * 2))) == [(0, 1, 2, 3)]


def test_a_value_that_skips_layers_cuts_at_its_ends() -> None:
    class Skip(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            kept = x
            for block in self.blocks[1:-1]:
                x = block(x)
            return self.blocks[-1](x + kept).mean()

    assert runs_of(Skip(5)) == [(0,), (1, 2, 3), (4,)]


def test_interleaved_towers_are_two_chains() -> None:
    class Zipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Chain(3).blocks, Chain(3).blocks

        def forward(self, x: Tensor) -> Tensor:
            y = x
            for left, right in zip(self.left, self.right, strict=True):
                x, y = left(x), right(y)
            return (x - y).abs().mean()

    assert runs_of(Zipped()) == [(0, 2, 4), (1, 3, 5), (6,)]


def test_layers_that_differ_in_width_dtype_or_training_are_not_one_metaop() -> None:
    chain = Chain(6)
    for parameter in chain.blocks[:2].parameters():
        parameter.requires_grad_(False)
    chain.blocks[4].linear = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH))
    assert runs_of(chain) == [(0, 1), (2, 3), (4,), (5,)]


def test_a_layers_number_and_its_dropout_rate_do_not_matter() -> None:
    chain = Chain(3)
    for position, block in enumerate(chain.blocks):
        block.layer_idx = position
        block.drop = nn.Dropout(0.01 * position)
    assert runs_of(chain) == [(0, 1, 2)]


def test_repeated_layers_share_a_block() -> None:
    graph = graph_of("albert")
    assert [(m.parameters, m.parameter_blocks) for m in graph.metaops] == [
        ("layer", (0, 0, 0)),
        (None, None),
        ("layer", (0, 0)),
    ]


def test_blocks_are_numbered_alike_in_tasks_that_use_some_of_them() -> None:
    chain = Chain(4)

    class Part(nn.Module):
        def __init__(self, *positions: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(chain.blocks[position] for position in positions)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.mean()

    data = Items(x=(6, WIDTH))
    tasks = [Task("late", Part(2, 3), 4, data), Task("own", Chain(2), 4, data), Task("all", chain, 4, data)]
    metaops = analysed(Workload("w", tasks, (Block,))).metaops
    assert [(m.parameters, m.parameter_blocks) for m in metaops] == [
        ("layers", None),
        ("blocks", None),
        ("layers", (2, 3, 0, 1)),
    ]


def test_parameters_are_called_as_the_first_task_calls_them() -> None:
    graph = graph_of("two_tasks")
    table = ParameterTable.of(graph)
    assert table.names["classify", "tower.embed.weight"] == "image_text.vision.embed.weight"
    assert table.users["image_text.vision.blocks.1.linear.weight"] == (("image_text", 1), ("classify", 1))
    assert table.users["image_text.scale"] == (("image_text", 5),)
    distinct = {id(p) for task in graph.workload.tasks for p in task.module.parameters()}
    assert {id(p) for p in table.parameters.values()} == distinct
    assert table.num_bytes("image_text.vision.embed.weight") == 6 * WIDTH * 8


def test_a_tied_weight_is_used_at_both_ends() -> None:
    table = ParameterTable.of(graph_of("encoder_decoder"))
    assert table.users["caption.table.weight"] == (("caption", 3), ("caption", 5))


def test_buffers_have_names_too() -> None:
    table = ParameterTable.of(graph_of("convnet"))
    assert table.users["t.blocks.0.norm.running_mean"] == (("t", 0),)
    assert table.users["t.norm.num_batches_tracked"] == (("t", 2),)
    assert not set(table.buffers) & set(table.parameters)


def test_the_fingerprint_is_of_the_structure_and_not_of_the_values() -> None:
    first = graph_of("two_tasks").fingerprint
    torch.manual_seed(7)
    again = shapes_of_models.ALL["two_tasks"]()
    for task in again.tasks:
        task.module.double()
        task.dataset.data.update(
            {k: v.double() for k, v in task.dataset.data.items() if v.is_floating_point()}
        )
    assert analysed(again).fingerprint == first
    again.tasks[0].batch_size *= 2
    changed = analysed(again).fingerprint
    assert changed != first
    again.tasks[1].weight = 0.25
    assert analysed(again).fingerprint not in (first, changed)


def test_analysing_leaves_the_model_as_it_was() -> None:
    workload = shapes_of_models.build("convnet")
    module = workload.tasks[0].module
    before = {name: value.clone() for name, value in module.state_dict().items()}
    modes = {name: part.training for name, part in module.named_modules()}
    state = torch.get_rng_state()
    analysed(workload)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert {name: part.training for name, part in module.named_modules()} == modes
    assert all(parameter.grad is None for parameter in module.parameters())


def test_short_names_are_the_fewest_parts_that_differ() -> None:
    assert short_names(["vision.blocks", "text.blocks", "loss"]) == ["vision", "text", "loss"]
    assert short_names(["model.vision.blocks", "model.text.blocks"]) == ["vision", "text"]
    assert short_names(["model.blocks"]) == ["model"]
    assert short_names(["model.encoder", "model.decoder", "loss"]) == [
        "model.encoder",
        "model.decoder",
        "loss",
    ]
    assert short_names(["blocks", "blocks", "blocks"]) == ["blocks", "blocks-2", "blocks-3"]
    assert short_names(["a", "a.b"]) == ["a", "a.b"]


def test_a_component_is_the_common_path_without_numbers() -> None:
    assert component_path(["vision.blocks.0", "vision.blocks.1"]) == "vision.blocks"
    assert component_path(["vision.blocks.3"]) == "vision.blocks"
    assert component_path(["vision.blocks.1", "vision.blocks.10"]) == "vision.blocks"
    assert component_path(["layer", "layer"]) == "layer"
    assert component_path([None]) == "loss"
