"""`spindle init` as a user runs it: the files that it writes are a workload that can be profiled."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from helpers.cli import run_spindle
from spindle_cli.files.cluster import Cluster
from spindle_cli.workload.building.load import load

NUMBERS = itertools.count()  # a module is imported once by its name, so every test has one of its own
MODELS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.map = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + torch.relu(self.map(self.norm(x)))


class Centred(Block):
    def forward(self, x):
        return super().forward(x) - x.mean(0)


class Net(nn.Module):
    def __init__(self, width=8, depth=2, classes=3):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(x))


class Trained(Net):
    def forward(self, x, label):
        return {"loss": nn.functional.cross_entropy(super().forward(x), label)}


class Asked(Net):
    def forward(self, x, return_loss=False):
        scores = super().forward(x)
        return {"loss": scores.square().mean()} if return_loss else {"scores": scores}


class Reads(Net):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Counts(Trained):
    def forward(self, x, label):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x, label)


class Coupled(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Centred(8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.mean()


class Strange(Net):
    def forward(self, x):
        return x, x


def two(width=8):
    trunk = Net(width)
    return {"a": Trained(width), "b-2": trunk}


def nothing():
    return 3


def empty():
    return {}


ready = Net()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file of models, and a cluster file beside it, so that nothing is measured."""
    monkeypatch.chdir(tmp_path)
    name = f"init_models_{os.getpid()}_{next(NUMBERS)}.py"
    (tmp_path / name).write_text(MODELS)
    cluster = "schema: spindle.cluster/1\nname: c\nnodes: [{devices: 2, device: cpu, memory_gib: 1}]\n"
    link = "{latency_us: 1, bandwidth_gb_per_s: 1}"
    (tmp_path / "cluster.yaml").write_text(f"{cluster}links: {{intra_node: {link}, inter_node: {link}}}\n")
    yield name


def test_a_model_that_returns_its_loss_becomes_a_workload_that_can_be_profiled(models: str) -> None:
    ended = run_spindle(
        "init", f"{models}:Trained", "--field", "x=8", "--field", "label=int3", "--arg", "depth=4", "--json"
    )
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert [(block["name"], block["count"]) for block in report["operators"]] == [("Block", 4)]
    assert report["metaops"] == {"trained/blocks": 4}
    assert "kept cluster.yaml" in ended.err and Cluster.read(Path("cluster.yaml")).name == "c"
    loaded = load(report["workload"])
    assert [type(block).__name__ for block in loaded.workload.tasks[0].module.blocks] == ["Block"] * 4
    item = loaded.workload.tasks[0].dataset[5]
    assert (tuple(item["x"].shape), tuple(item["label"].shape)) == ((8,), ())
    profiled = run_spindle(
        "profile", report["workload"], "--estimate", "--cluster", "cluster.yaml", "-o", "p.json", "--no-check"
    )
    assert profiled.code == 0, profiled.err


@pytest.mark.parametrize(
    ("loss", "shape", "is_whole"),
    [
        ("cross_entropy", (), True),
        ("mse_loss", (3,), False),
        ("binary_cross_entropy_with_logits", (3,), False),
    ],
)
def test_a_loss_of_the_models_scores_gets_the_target_it_needs(
    models: str, loss: str, shape: tuple[int, ...], is_whole: bool
) -> None:
    ended = run_spindle("init", f"{models}:Net", "--field", "x=8", "--loss", loss)
    assert ended.code == 0, ended.err
    target = load("net_workload.yaml").workload.tasks[0].dataset[0]["target"]
    assert tuple(target.shape) == shape
    assert target.is_floating_point() is not is_whole
    if loss.startswith("binary"):
        assert set(target.tolist()) <= {0.0, 1.0}


def test_a_dict_of_models_becomes_a_task_each(models: str) -> None:
    ended = run_spindle(
        *("init", f"{models}:two", "--field", "x=8", "--field", "a.label=int3", "--loss", "mse_loss"),
        *("--batch-size", "6", "--arg", "width=8"),
    )
    assert ended.code == 0, ended.err
    tasks = load("two_workload.yaml").workload.tasks
    assert [(task.name, task.batch_size) for task in tasks] == [("a", 6), ("b-2", 6)]
    assert "the model's own" in ended.out and "mse_loss" in ended.out


def test_a_model_that_returns_its_loss_when_asked_is_asked(models: str) -> None:
    ended = run_spindle("init", f"{models}:Asked", "--field", "x=8")
    assert ended.code == 0, ended.err
    assert "return_loss=True" in Path("asked_workload.py").read_text()


def test_ops_that_couple_samples_are_named_with_the_reason(models: str) -> None:
    ended = run_spindle("init", f"{models}:Coupled", "--field", "x=8", "--json")
    assert ended.code == 0, ended.err
    coupled = json.loads(ended.out)["coupled"]
    assert [(op["task"], op["op"]) for op in coupled] == [("coupled", "blocks.0"), ("coupled", "blocks.1")]
    assert all(op["because"] for op in coupled)


def test_what_profile_would_refuse_is_said_once_the_files_are_there(models: str) -> None:
    ended = run_spindle("init", f"{models}:Counts", "--field", "x=8", "--field", "label=int3")
    assert (ended.code, "wrote counts_workload.py" in ended.err) == (3, True), ended.err
    assert f"{models}:" in ended.err  # the place in the user's file
    assert Path("counts_workload.yaml").exists()


def test_a_model_that_reads_values_cannot_be_looked_at(models: str) -> None:
    ended = run_spindle("init", f"{models}:Reads", "--field", "x=8", "--loss", "mse_loss")
    assert (ended.code, "forward fails for x (2, 8)" in ended.err) == (3, True), ended.err
    assert not Path("reads_workload.py").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("Net",), 2, "forward needs x"),
        (("Net", "--field", "x=8"), 2, "expected a scalar loss"),
        (("Net", "--field", "x=9", "--loss", "mse_loss"), 3, "forward fails for x (2, 9)"),
        (("Net", "--field", "y=8"), 2, "no forward takes 'y'"),
        (("Net", "--arg", "width"), 2, "not NAME=VALUE"),
        (("Net", "--arg", "width=[1"), 2, "--arg width"),
        (("Net", "--arg", "size=1"), 2, "size"),
        (("Net", "--arg", "width=a"), 3, "building"),
        (("Strange", "--field", "x=8", "--loss", "mse_loss"), 2, "a tuple"),
        (("nothing",), 3, "gives a int"),
        (("empty",), 3, "gives a dict"),
        (("ready", "--field", "x=8"), 3, "what builds one"),
        (("missing",), 3, "no function 'missing'"),
        (("Net", "-o", "elsewhere", "--field", "x=8", "--loss", "mse_loss"), 2, "-o elsewhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_use_is_said_and_nothing_is_written(
    models: str, arguments: tuple[str, ...], code: int, says: str
) -> None:
    before = sorted(path.name for path in Path().iterdir())
    ended = run_spindle("init", f"{models}:{arguments[0]}", *arguments[1:])
    assert (ended.code, says in ended.err) == (code, True), ended.err
    assert sorted(path.name for path in Path().iterdir() if path.name != "__pycache__") == before


def test_torch_prints_no_traceback_for_shapes_that_do_not_fit(
    models: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = run_spindle("init", f"{models}:Net", "--field", "x=9", "--loss", "mse_loss")
    assert ended.code == 3
    assert "Traceback" not in ended.err + capfd.readouterr().err


def test_files_that_are_there_stay_unless_forced(models: str) -> None:
    command = ("init", f"{models}:Net", "--field", "x=8", "--loss", "mse_loss")
    Path("net_workload.py").write_text("mine")
    ended = run_spindle(*command)
    assert (ended.code, "there already" in ended.err) == (2, True), ended.err
    assert Path("net_workload.py").read_text() == "mine"
    assert not Path("net_workload.yaml").exists()


def test_a_workload_is_no_model() -> None:
    ended = run_spindle("init", "spindle_cli.zoo.digits:build")
    assert (ended.code, "a workload already" in ended.err) == (3, True), ended.err


@pytest.mark.processes
def test_the_cluster_file_has_the_link_of_this_machine(models: str) -> None:
    command = ("init", f"{models}:Net", "--field", "x=8", "--loss", "mse_loss", "--nproc", "3", "--force")
    ended = run_spindle(*command)
    assert ended.code == 0, ended.err
    cluster = Cluster.read(Path("cluster.yaml"))
    assert (cluster.num_devices, cluster.device_type) == (3, "cpu")
    assert cluster.links.intra_node.curve is not None
    assert "null" not in yaml.safe_dump(Path("cluster.yaml").read_text())
