"""Finding and building a workload, from YAML files, modules and Python files; and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from spindle_cli.analysis.analyse import analyse
from spindle_cli.errors import InputError, WorkloadError
from spindle_cli.workload.building.checks import check_workload
from spindle_cli.workload.building.load import load, load_abstract
from spindle_cli.workload.types import Task, Workload

from . import init_toys

MODEL = """
import torch
from torch import nn
from spindle_cli import Task, Workload
from beside import WIDTH

class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))

    def forward(self, x):
        return self.layers(x).pow(2).mean()

def build(depth=1):
    task = Task("t", Net(depth), 2, [{"x": torch.zeros(WIDTH)}] * 4)
    return Workload("mine", [task], operators=(nn.Linear,))

def fails():
    return 1 / 0

def returns_nothing():
    pass
"""

RECURRENT = """
import torch
from torch import nn
from spindle_cli import Task, Workload

def build():
    gru = nn.GRU(2, 2, batch_first=True)
    assert gru.bias_ih_l0.abs().max().item() < 1, "values that the meta device does not have"
    return Workload("recurrent", [Task("t", gru, 2, [{"input": torch.zeros(3, 2)}] * 4)])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "beside.py").write_text("WIDTH = 3\n")
    (tmp_path / "models" / "mine.py").write_text(MODEL)
    return tmp_path


def write(folder: Path, text: str, name: str = "w.yaml") -> str:
    (folder / name).write_text("schema: spindle.workload/1\n" + text)
    return name


def test_a_yaml_file_names_the_function_its_arguments_and_the_training(folder: Path) -> None:
    name = write(folder, "model: models/mine.py:build\nargs: {depth: 3}\ntrain: {lr: 0.5, steps: 7}\n")
    loaded = load(name, relative_to=folder)
    assert len(loaded.workload.tasks[0].module.layers) == 3
    assert (loaded.train.lr, loaded.train.steps, loaded.train.optimizer) == (0.5, 7, "AdamW")
    assert loaded.source == name


def test_a_yaml_files_model_is_relative_to_it_not_to_the_current_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    name = write(folder / "models", "model: mine.py:build\n")
    assert load(str(folder / "models" / name)).workload.name == "mine"


def test_a_function_of_a_file_or_a_module(folder: Path) -> None:
    assert load("models/mine.py:build", relative_to=folder).workload.name == "mine"
    assert load(f"{__package__}.toy:two_tasks").workload.name == "toy"


def test_a_copied_file_is_the_same_workload(folder: Path) -> None:
    own = "class Own(nn.Linear):\n    pass\n\nclass Net"
    text = MODEL.replace("nn.Linear(W", "Own(W").replace("(nn.Linear,)", "(Own,)").replace("class Net", own)
    for place in (folder, folder / "models"):
        (place / "copied.py").write_text(text)
    prints = {
        analyse(load_abstract("copied.py:build", relative_to=place).workload).fingerprint
        for place in (folder, folder / "models")
    }
    assert len(prints) == 1


def test_the_seed_gives_the_initial_values(folder: Path) -> None:
    def weight(seed: int) -> torch.Tensor:
        name = write(folder, f"model: models/mine.py:build\ntrain: {{seed: {seed}}}\n")
        torch.rand(3)
        return load(name, relative_to=folder).workload.tasks[0].module.layers[0].weight

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))


def test_the_seed_is_numpys_and_pythons_too(folder: Path) -> None:
    drawn = (
        "import random; import numpy as np; nn.init.constant_(net.weight, random.random() + np.random.rand())"
    )
    text = MODEL.replace("    task =", f"    net = nn.Linear(1, 1); {drawn}\n    task =").replace(
        "Net(depth)", "net"
    )
    (folder / "models" / "drawn.py").write_text(text.replace("from beside import WIDTH", "WIDTH = 1"))
    weights = [
        load(write(folder, f"model: models/drawn.py:build\ntrain: {{seed: {seed}}}\n"), relative_to=folder)
        .workload.tasks[0]
        .module.weight.item()
        for seed in (1, 1, 2)
    ]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "model: models/mine.py:build\ntrain: {learning_rate: 1}\n",
            "unknown key 'learning_rate'; known are",
        ),
        (
            "model: a:b\ntrain: {loader: {worker: 2}}\n",
            "train.loader: unknown key 'worker'; known are workers, prefetch, tasks",
        ),
        (
            "model: a:b\ntrain: {loader: {tasks: {t: {worker: 2}}}}\n",
            "train.loader.tasks.t: unknown key 'worker'; known are workers, prefetch",
        ),
        (
            "model: a:b\ntrain: {callbacks: [{callback: a:B, arg: {c: 1}}]}\n",
            "train.callbacks[0]: unknown key 'arg'; known are callback, args",
        ),
        ("model: models/mine.py:build\ntrain: {lr: -1}\n", "train.lr"),
        ("model: models/mine.py:build\ntrain: {lr: .nan}\n", "train.lr"),
        ("args: {}\n", "model: this key is missing"),
        (
            "model: a:b\ntrain: {sampling: a}\n",
            "train.sampling: expected a mapping of keys to values (found 'a')",
        ),
        (
            "model: a:b\ntrain: {sampling: {every: [a]}}\n",
            "train.sampling.every: expected a mapping of keys to values (found ['a'])",
        ),
        (
            "model: a:b\ntrain: {sampling: {every: {a: 1.5}}}\n",
            "every.a: expected a whole number of steps, or {every: ..., offset: ...} (found 1.5)",
        ),
        (
            "model: a:b\ntrain: {sampling: {every: {3: 1}}}\n",
            "train.sampling.every[3]: expected a text",
        ),
        ("model: models/mine.py\n", "is not a workload"),
        ("model: models/other.py:build\n", "no such file"),
        ("model: no_such_package.mine:build\n", "no module 'no_such_package.mine'"),
        ("model: models/mine.py:buidl\n", "no function 'buidl'"),
        ("model: models/mine.py:build\nargs: {dept: 3}\n", "unexpected keyword argument 'dept'"),
        ("model: models/mine.py:fails\n", "mine.py:20: building"),
        ("model: models/mine.py:returns_nothing\n", "returned a NoneType, expected a spindle_cli.Workload"),
    ],
)
def test_what_is_wrong_in_a_workload_file_is_named(folder: Path, text: str, found: str) -> None:
    with pytest.raises(InputError) as caught:
        load(write(folder, text), relative_to=folder)
    assert found in str(caught.value)


def test_a_file_that_cannot_be_imported_names_the_place(folder: Path) -> None:
    (folder / "broken.py").write_text("import torch\n\ntorch.no_such_thing\n")
    with pytest.raises(WorkloadError, match=r"broken\.py:3: importing .* AttributeError"):
        load("broken.py:build", relative_to=folder)
    (folder / "typo.py").write_text("def build(:\n")
    with pytest.raises(WorkloadError, match=r"typo\.py:1: importing .* SyntaxError"):
        load("typo.py:build", relative_to=folder)


TASKS = {
    "[]": "has no tasks",
    "[1]": "found a int",
    "[task('a'), task('a')]": "2 tasks are named 'a'",
    "[task('a/b')]": "without '/'",
    "[task('')]": "without '/'",
    "[task('a', batch_size=0)]": "batch_size is 0",
    "[task('a', batch_size=True)]": "batch_size is True",
    "[task('a', weight=float('nan'))]": "weight is nan",
    "[task('a', weight=True)]": "weight is True, expected a finite number",
    "[task('a', reduction='average')]": "reduction is 'average'",
    "[Task('a', 'module', 2, [])]": "module is a str",
    "[Task('a', torch.jit.script(nn.Linear(1, 1)), 2, [])]": "module is compiled by torch.jit, and hides",
    "[Task('a', nn.ModuleList(), 2, [])]": "ModuleList, whose class defines no forward",
    "[task('a', collate='pad')]": "collate is 'pad', expected a function",
    "task('a')": "tasks: found Task(name='a'",
    "{'a': task('a')}": "expected a list of tasks",
    "[task('a')], evaluated=[1]": "evaluated: found a int",
    "[task('a')], evaluated=task('e')": "evaluated: found Task(name='e'",
    "[task('a')], evaluated=None": "evaluated: found None, expected a list of tasks",
    "[task('a')], operators=nn.Linear": "expected a list of classes",
    "[task('a')], contrastive=[nn.Linear(1, 1)]": "contrastive: found Linear",
    "[task('a')], tp_plans={'Linear': {}}": "tp_plans: found {'Linear': {}}, expected a plan by class",
    "[task('a')], tp_plans=None": "tp_plans: found None",
    "[task('a')], tp_vocabulary=0": "tp_vocabulary is 0, expected a whole number of words, at least 1",
    "[task('a')], tp_vocabulary=True": "tp_vocabulary is True",
    "[task('a')], tp_vocabulary=1.5": "tp_vocabulary is 1.5",
    "[task('a')], tp_vocabulary='all'": "tp_vocabulary is 'all'",
    "[task('a')], tp_sequence='long'": "tp_sequence is 'long', expected True or False",
    "[task('a')], tp_sequence=None": "tp_sequence is None",
}


@pytest.mark.parametrize("tasks", TASKS)
def test_a_workload_that_cannot_be_meant_is_refused(tmp_path: Path, tasks: str) -> None:
    (tmp_path / "w.py").write_text(
        "import torch\nfrom torch import nn\nfrom spindle_cli import Task, Workload\n"
        "def task(name, batch_size=2, **rest):\n"
        "    return Task(name, nn.Linear(1, 1), batch_size, [], **rest)\n"
        f"def build():\n    return Workload('w', {tasks})\n"
    )
    with pytest.raises(WorkloadError) as caught:
        load("w.py:build", relative_to=tmp_path)
    assert TASKS[tasks] in str(caught.value)


def test_the_least_vocabulary_that_is_split_may_be_any_number_or_none() -> None:
    task = Task("t", nn.Linear(1, 1), 1, [{"x": torch.zeros(1)}])
    for words in (1, 1024, None):
        assert check_workload(Workload("w", [task], tp_vocabulary=words), "w.py").tp_vocabulary == words
    assert check_workload(Workload("w", (task,), operators=frozenset({nn.Linear})), "w.py")  # type: ignore[arg-type]


def test_operators_are_module_classes(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text(
        "from torch import nn\nfrom spindle_cli import Task, Workload\n"
        "def build():\n    task = Task('t', nn.Linear(1, 1), 2, [])\n"
        "    return Workload('w', [task], operators=(nn.Linear(1, 1),))\n"
    )
    with pytest.raises(WorkloadError, match="operators: found Linear"):
        load("w.py:build", relative_to=tmp_path)


def of_tasks(trained: Sequence[Task], evaluated: Sequence[Task]) -> Workload:
    return check_workload(Workload("w", trained, evaluated=evaluated), "w.py:build")


def test_a_task_is_either_trained_or_only_evaluated() -> None:
    net, data = nn.Linear(1, 1), [{"x": torch.zeros(1)}]
    trained, evaluated = Task("t", net, 1, data), Task("e", net, 1, eval_dataset=data)
    assert of_tasks([trained], [evaluated]).all_tasks == (trained, evaluated)
    with pytest.raises(WorkloadError, match=r"task 'e' has no dataset to be trained on") as caught:
        of_tasks([evaluated], [])
    assert caught.value.hint is not None
    assert "`evaluated`" in caught.value.hint
    with pytest.raises(WorkloadError, match=r"evaluated: task 't' has no eval_dataset"):
        of_tasks([trained], [trained])
    with pytest.raises(WorkloadError, match=r"evaluated: task 'both' has a dataset, and is never trained"):
        of_tasks([trained], [Task("both", net, 1, data, eval_dataset=data)])
    with pytest.raises(WorkloadError, match="2 tasks are named 't'"):
        of_tasks([trained], [Task("t", net, 1, eval_dataset=data)])
    with pytest.raises(WorkloadError, match="has no tasks"):
        of_tasks([], [evaluated])


def test_a_task_that_is_only_evaluated_changes_nothing_of_what_is_planned() -> None:
    one, other = analyse(init_toys.build()), analyse(init_toys.build_evaluated(), evaluates=True)
    assert (one.fingerprint, one.metaops, list(one.tasks)) == (
        other.fingerprint,
        other.metaops,
        list(other.tasks),
    )
    assert list(other.evaluations) == ["probe"]
    assert [metaop.name for metaop in other.evaluated_metaops] == ["probe/encoder"]


def test_layers_with_weak_references_to_their_weights_go_to_the_meta_device(folder: Path) -> None:
    (folder / "recurrent.py").write_text(RECURRENT)
    workload = load_abstract("recurrent.py:build", relative_to=folder).workload
    assert all(parameter.is_meta for parameter in workload.tasks[0].module.parameters())
