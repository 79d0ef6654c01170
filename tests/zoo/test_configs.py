"""The files under configs/: every one loads, and is what its name says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spindle_cli.files.cluster import Cluster
from spindle_cli.workload.building.load import load_abstract
from spindle_cli.workload.file import WorkloadFile

CONFIGS = Path(__file__).parents[2] / "configs"
WORKLOADS = sorted((CONFIGS / "workloads").glob("*.yaml"))
CLUSTERS = sorted((CONFIGS / "clusters").glob("*.yaml"))
MIXED = [path for path in CLUSTERS if Cluster.read(path).is_mixed]


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_workload_files_build_what_their_name_says(path: Path) -> None:
    loaded = load_abstract(str(path))
    assert loaded.workload.name == path.stem
    assert hasattr(torch.optim, WorkloadFile.read(path).train.optimizer)


def test_every_workload_of_the_paper_has_a_file_at_both_sizes() -> None:
    names = {path.stem for path in WORKLOADS}
    paper = {"clip-4", "clip-7", "clip-10", "ofasys-4", "ofasys-7", "qwen-val"}
    of_hap = {"vgg19", "vgg-laptop", "vit", "vit-laptop", "bert-base", "bert-laptop"}
    ours = {"digits", "senses-1", "senses-6", "generalist-5", "bert-moe"}
    ours |= {"llama-70b", "llama-300m", "llama-laptop"}
    assert names == ours | of_hap | paper | {f"{name}-laptop" for name in (*paper, "bert-moe")}


@pytest.mark.parametrize("path", MIXED, ids=lambda path: path.stem)
def test_clusters_of_several_types_have_as_many_of_each_as_their_name_says(path: Path) -> None:
    cluster = Cluster.read(path)
    words = path.stem.split("-")
    assert cluster.name == path.stem
    assert [kind.partition("-")[0] for kind in cluster.types] == words[::2]
    assert list(cluster.num_of_type.values()) == [int(count) for count in words[1::2]]
    assert set(cluster.node_sizes) == {8} or cluster.node_sizes == (8, 4)


def test_there_are_clusters_of_each_pair_of_types_and_one_of_8_and_4_devices() -> None:
    types = {tuple(kind.partition("-")[0] for kind in Cluster.read(path).types) for path in MIXED}
    assert types >= {("a100", "v100"), ("h100", "a100"), ("h800", "h20"), ("h800", "a800", "h20")}
    assert [8, 4] in [list(Cluster.read(path).num_of_type.values()) for path in MIXED]


@pytest.mark.parametrize("path", [p for p in CLUSTERS if p not in MIXED], ids=lambda path: path.stem)
def test_clusters_have_as_many_devices_as_their_name_says(path: Path) -> None:
    cluster = Cluster.read(path)
    family, _, shape = path.stem.partition("-")
    assert cluster.name == path.stem
    assert cluster.device_type.startswith(family)
    nodes, _, devices = shape.rpartition("x")
    assert cluster.node_sizes == (int(devices),) * int(nodes or 1)
