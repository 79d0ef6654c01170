"""The example of Hugging Face's own classes: what is split, shared, frozen and tied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.analysed import analysed
from spindle_cli.workload.building.load import load
from spindle_cli.workload.graph import WorkloadGraph

pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_multi_task"


@pytest.fixture(scope="module")
def graph() -> WorkloadGraph:
    return analysed(load(str(EXAMPLE / "toy.yaml")).workload)


def test_all_is_split_and_the_contrastive_loss_gathers_what_it_compares(graph: WorkloadGraph) -> None:
    contrasting = [(name, op.index) for name, task in graph.tasks.items() for op in task.ops if op.contrasts]
    assert contrasting == [("match", graph.tasks["match"].ops[-1].index)]
    assert not any(metaop.coupled for metaop in graph.metaops)
    assert {metaop.name: len(metaop.ops) for metaop in graph.metaops} == {
        "match/loss": 1,
        "match/clip.vision_model": 3,
        "match/clip.text_model": 3,
        "caption/vision": 3,
        "caption/captioner.model.encoder": 2,
        "caption/captioner.model.decoder": 2,
        "write/model": 4,
    }


def test_two_tasks_share_a_vision_tower_that_none_trains(graph: WorkloadGraph) -> None:
    towers = [
        metaop for metaop in graph.metaops if metaop.name in ("match/clip.vision_model", "caption/vision")
    ]
    assert len({metaop.parameters for metaop in towers}) == 1
    for name, task in graph.tasks.items():
        frozen = {key for key, parameter in task.root.named_parameters() if not parameter.requires_grad}
        assert all("vision" in key for key in frozen), name
    trained = graph.tasks["caption"].root.get_submodule("project")
    assert all(parameter.requires_grad for parameter in trained.parameters())


def test_heads_are_tied_to_embeddings(graph: WorkloadGraph) -> None:
    writer = graph.tasks["write"].root
    assert writer.get_parameter("lm_head.weight") is writer.get_parameter("model.embed_tokens.weight")


def test_padding_has_labels_that_no_loss_counts(graph: WorkloadGraph) -> None:
    for name in ("write", "caption"):
        loss = graph.tasks[name].ops[-1]
        assert loss.shares is not None and loss.shares.num_counts == 1
        labels = torch.stack([graph.tasks[name].task.dataset[index]["labels"] for index in range(8)])
        counted = (labels != -100).sum(1)
        assert 0 < counted.min() < counted.max() <= labels.shape[1]
