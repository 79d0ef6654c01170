"""Inputs that are wrong in ways that the machine notices first: a message and the right exit code, no bug."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cli import run_spindle
from helpers.plans import two_towers
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import to_json, write_json
from spindle_cli.plan.file import write_plan
from spindle_cli.profile.types import Profile

LONG = "a" * 300
ESTIMATE = ("--estimate", "--device", "h100", "--nproc", "1", "-o", "p.json")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    profile, made = two_towers()
    write_plan(tmp_path / "plan.yaml", made)
    write_json(tmp_path / "profile.json", profile)
    return tmp_path / "plan.yaml"


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", LONG),
        ("launch", "plan.yaml", "--run-dir", LONG),
        ("launch", "plan.yaml", "--trace", LONG),
        ("report", "plan.yaml", "--run", LONG, "-o", "r.html"),
        ("export", LONG, "-o", "m.safetensors"),
        ("export", "loop", "-o", "m.safetensors"),
        ("check", "loop"),
        ("report", "plan.yaml", "--run", "loop", "-o", "r.html"),
        ("simulate", "plan.yaml", "--trace", "loop"),
        ("profile", f"{LONG}.py:build", *ESTIMATE),
        ("profile", "loop:build", *ESTIMATE),
        ("profile", "./models/mine:build", *ESTIMATE),
        ("profile", ".mine:build", *ESTIMATE),
        ("profile", "mine.:build", *ESTIMATE),
    ],
    ids=lambda arguments: " ".join(arguments).replace(LONG, "LONG"),
)
def test_names_that_cannot_be_are_wrong_input(arguments: tuple[str, ...], plan: Path) -> None:
    Path("loop").symlink_to("loop")
    ended = run_spindle(*arguments)
    assert (ended.code, "internal error" in ended.err) == (3, False), ended.err


def closed_output(*arguments: object, closed: str) -> subprocess.CompletedProcess[str]:
    words = " ".join(map(str, (sys.executable, "-m", "spindle_cli", *arguments)))
    return subprocess.run(
        ["/bin/sh", "-c", f"exec {words} {closed}"], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("options", [(), pytest.param(("--json",), marks=pytest.mark.long)])
def test_closed_output_is_no_bug(closed: str, options: tuple[str, ...], plan: Path) -> None:
    before = plan.read_bytes()
    assert closed_output("check", plan, *options, closed=closed).returncode == 0
    assert closed_output("check", "nosuch.yaml", closed=closed).returncode == 3
    assert plan.read_bytes() == before


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("curve", 0, "tp"), 10**12),
        (("curve", 0, "dp"), 10**12),
        (("curve", 0, "num_devices"), 10**12),
        (("batch_size",), 10**15),
    ],
)
def test_huge_numbers_are_refused_where_they_are_read(
    place: tuple[str | int, ...], value: int, tmp_path: Path
) -> None:
    data = json.loads(to_json(two_towers()[0]))
    inner = data["metaops"][0]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=str(place[-1])):
        Profile.read(path)


def test_a_batch_that_is_not_its_input_s_is_refused_by_plan_and_check(plan: Path, tmp_path: Path) -> None:
    data = json.loads(Path("profile.json").read_text())
    consumer = next(metaop for metaop in data["metaops"] if metaop["inputs"])
    batch = consumer["batch_size"]
    consumer["batch_size"] = 2 * batch
    Path("other.json").write_text(json.dumps(data))
    cluster = tmp_path / "cluster.yaml"
    write_json(cluster, two_towers()[1].cluster)
    said = f"other.json: metaops: '{consumer['name']}' has a batch_size of {2 * batch}, and its input "
    for arguments in (
        ("plan", "other.json", "--cluster", cluster, "-o", "x.yaml", "--assume-same-device"),
        ("check", plan, "--profile", "other.json"),
    ):
        ended = run_spindle(*arguments)
        assert (ended.code, said in ended.err) == (3, True), ended.err
    made = two_towers()[1]
    metaops = tuple(
        metaop.model_copy(update={"batch_size": 2 * batch}) if metaop.name == consumer["name"] else metaop
        for metaop in made.metaops
    )
    write_plan(plan, made.model_copy(update={"metaops": metaops}))
    for command in ("check", "simulate"):
        assert run_spindle(command, plan).code == 3


@pytest.mark.parametrize(
    ("length", "item", "said"),
    [
        ("0", "{}", "the dataset is empty"),
        ("-1", "{}", "the dataset fails to give its length: ValueError"),
        ("8", "{}['x']", "the dataset fails to give sample 0: KeyError: 'x'"),
    ],
)
def test_a_dataset_that_fails_is_named_with_its_task(
    length: str, item: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "work.py"
    source.write_text(
        "from torch import nn\nfrom spindle_cli import Task, Workload\n"
        "class Data:\n"
        f"    def __len__(self): return {length}\n    def __getitem__(self, i): return {item}\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(2, 2)\n"
        "    def forward(self, x): return self.layer(x).mean()\n"
        "def build(): return Workload('w', [Task('mine', Model(), 2, Data())])\n"
    )
    monkeypatch.chdir(tmp_path)
    ended = run_spindle("profile", f"{source}:build", *ESTIMATE)
    assert (ended.code, f"task 'mine': {said}" in ended.err) == (3, True), ended.err


@pytest.mark.parametrize("text", ["0", "-1", "x"])
@pytest.mark.parametrize("arguments", [("check", "plan.yaml"), ("simulate", "plan.yaml"), ("init",)])
def test_a_number_of_ranks_on_each_gpu_that_is_none_is_refused_where_there_is_no_gpu(
    text: str, arguments: tuple[str, ...], plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPINDLE_RANKS_PER_GPU", text)
    ended = run_spindle(*arguments)
    said = f"error: SPINDLE_RANKS_PER_GPU={text}: expected a number of ranks, 1 or more\n  Unset it.\n"
    assert (ended.code, ended.out, ended.err) == (2, "", said)
    for well in ("2", ""):
        monkeypatch.setenv("SPINDLE_RANKS_PER_GPU", well)
        assert run_spindle("check", plan).code == 0
