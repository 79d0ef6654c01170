"""Two types of CPU, from two profiles to a verified run; and what `spindle profile --merge` refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.cli import run_spindle
from spindle_cli.account.device_memory import device_memory, host_memory
from spindle_cli.plan.file import plan_text, read_plan
from spindle_cli.plan.types import Plan

pytestmark = pytest.mark.processes

TINY = str(Path(__file__).parent.parent / "profile" / "tiny_workload.py") + ":build"
CLUSTER = {
    "schema": "spindle.cluster/1",
    "name": "two types",
    "nodes": [
        {"devices": 1, "device": "cpu-new", "memory_gib": 4},
        {"devices": 1, "device": "cpu-old", "memory_gib": 4},
    ],
    "links": {
        "intra_node": {"latency_us": 50, "bandwidth_gb_per_s": 1},
        "inter_node": {"latency_us": 50, "bandwidth_gb_per_s": 1},
    },
}


def timed(profile: dict[str, Any], device: str, sample_s: float) -> dict[str, Any]:
    """A profile as of CPUs on which every sample of an op takes so many seconds a pass."""
    for metaop in profile["metaops"]:
        for entry in (*metaop["curve"], *metaop["shares"]):
            samples = entry["samples"] if "samples" in entry else metaop["batch_size"] / entry["dp"]
            entry["forward_s"] = entry["backward_s"] = samples * sample_s
    return profile | {"device": profile["device"] | {"type": device}}


def profile_both(workload: str | Path, folder: Path, prefix: str = "") -> None:
    """Profiles of a workload, `new.json` and `old.json` behind the prefix, whose times are made up."""
    new = folder / f"{prefix}new.json"
    arguments = ("--cluster", folder / "cluster.yaml", "--device", "cpu-new", "--time-limit", 0.02)
    made = run_spindle("profile", workload, "-o", new, *arguments, "--accept-noise")
    assert made.code == 0, made.err
    profile = json.loads(new.read_text())
    assert profile["device"]["type"] == "cpu-new"
    for name, sample_s in (("new", 0.01), ("old", 0.025)):
        made_up = timed(profile, f"cpu-{name}", sample_s)
        (folder / f"{prefix}{name}.json").write_text(json.dumps(made_up))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two profiles, whose times are made up, and the cluster."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    profile_both(TINY, folder)
    return folder


def test_a_plan_for_two_types_trains_the_same_model(folder: Path) -> None:
    merged = ("--merge", folder / "new.json", "--merge", folder / "old.json")
    assert run_spindle("profile", *merged, "-o", folder / "both.json").code == 0
    plan = ("plan", folder / "both.json", "--cluster", folder / "cluster.yaml", "--strategy", "sequential")
    ended = run_spindle(*plan, "-o", folder / "plan.yaml")
    assert ended.code == 0, ended.err
    rows = {piece.rows for piece in read_plan(folder / "plan.yaml").slices if piece.dp == 2}
    assert rows == {(0, 6, 8), (0, 12, 16)}  # 6 samples on the new one take 0.06 s, 2 on the old one 0.05
    ended = run_spindle("check", folder / "plan.yaml", "--profile", folder / "both.json")
    assert ended.code == 0, ended.out
    verified = run_spindle("verify", folder / "plan.yaml", "--dtype", "float64", "--steps", 2)
    assert verified.code == 0, verified.out + verified.err


def moving(plan: Plan, *, recompute: bool) -> Plan:
    """The same with the first and the last op of every slice over both types in host memory, and with the
    others recomputed, in twice the time.
    """
    waves = []
    for wave in plan.waves:
        slices = []
        for piece in wave.slices:
            first, last = piece.ops
            ends = ((first, first + 1), (last - 1, last)) if last - first > 1 else ((first, last),)
            times = ("start_s", "end_s", "backward_start_s", "backward_end_s")
            update = {name: 2 * getattr(piece, name) for name in times}
            if piece.dp == 2:
                update |= {"offload": ends, "recompute": recompute}
            slices.append(piece.model_copy(update=update))
        later = {"start_s": 2 * wave.start_s, "end_s": 2 * wave.end_s, "slices": tuple(slices)}
        waves.append(wave.model_copy(update=later))
    moved = plan.model_copy(update={"waves": tuple(waves)})
    needs = device_memory(moved.metaops, moved.slices, moved.cluster, moved)
    predicted = {
        "peak_memory_bytes": tuple(need.total_bytes for need in needs),
        "host_memory_bytes": host_memory(needs, moved.cluster),
        "compute_s": 2 * plan.predicted.compute_s,
        "iteration_s": plan.predicted.compute_s + plan.predicted.iteration_s,
    }
    return moved.model_copy(update={"predicted": plan.predicted.model_copy(update=predicted)})


@pytest.mark.usefixtures("ready_here")
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_in_host_memory_of_shares_on_two_types_train_the_same_model(
    folder: Path, recompute: bool
) -> None:
    merged = ("--merge", folder / "new.json", "--merge", folder / "old.json")
    assert run_spindle("profile", *merged, "-o", folder / "both.json").code == 0
    plan = ("plan", folder / "both.json", "--cluster", folder / "cluster.yaml", "--strategy", "sequential")
    assert run_spindle(*plan, "-o", folder / "kept.yaml").code == 0
    made = moving(read_plan(folder / "kept.yaml"), recompute=recompute)
    pieces = [piece for piece in made.slices if piece.dp == 2]
    assert {(piece.num_ops, piece.num_offloaded, piece.num_recomputed) for piece in pieces} >= {
        (4, 2, 2 * recompute)
    }
    # One node of each type, with three times as much of the fast one's samples.
    fast, slow = made.predicted.host_memory_bytes
    assert 0 < slow <= fast
    (folder / "moved.yaml").write_text(plan_text(made))
    verified = run_spindle("verify", folder / "moved.yaml", "--dtype", "float64", "--steps", 2)
    assert verified.code == 0, verified.out + verified.err


@pytest.mark.usefixtures("ready_here")
def test_micro_batches_over_two_types_that_share_out_parameters_train_the_same_model(folder: Path) -> None:
    merged = ("--merge", folder / "new.json", "--merge", folder / "old.json")
    assert run_spindle("profile", *merged, "-o", folder / "both.json").code == 0
    tasks = {metaop["task"] for metaop in json.loads((folder / "both.json").read_text())["metaops"]}
    counts = [text for task in tasks - {"spread"} for text in ("--micro-batches", f"{task}=2")]
    plan = ("plan", folder / "both.json", "--cluster", folder / "cluster.yaml", "--strategy", "sequential")
    ended = run_spindle(*plan, *counts, "--shard", "layers=parameters", "-o", folder / "cut.yaml")
    assert ended.code == 0, ended.err
    made = read_plan(folder / "cut.yaml")
    assert made.sharding == {"layers": "parameters"}
    pieces = [piece for piece in made.slices if piece.micro_batches == 2]
    assert {(piece.micro_batch, piece.rows) for piece in pieces} == {(0, (0, 6, 8)), (1, (0, 6, 8))}
    verified = run_spindle("verify", folder / "cut.yaml", "--dtype", "float64", "--steps", 2)
    assert verified.code == 0, verified.out + verified.err


@pytest.mark.usefixtures("ready_here")
def test_sets_of_tasks_over_two_types_train_the_same_model(folder: Path) -> None:
    sampling = {"every": {"spread": 2}}
    train = {"optimizer": "AdamW", "lr": 0.01, "seed": 3, "steps": 4, "sampling": sampling}
    content = {"schema": "spindle.workload/1", "model": TINY, "train": train}
    (folder / "sampled.yaml").write_text(yaml.safe_dump(content))
    profile_both(folder / "sampled.yaml", folder, "sampled-")
    made = folder / "sampled.json"
    merged = ("--merge", folder / "sampled-new.json", "--merge", folder / "sampled-old.json")
    assert run_spindle("profile", *merged, "-o", made).code == 0
    plan = ("plan", made, "--cluster", folder / "cluster.yaml", "-o", folder / "sampled-plan.yaml")
    ended = run_spindle(*plan)
    assert ended.code == 0, ended.err
    planned = read_plan(folder / "sampled-plan.yaml")
    assert [len(each.tasks) for each in planned.task_sets] == [1, 2]
    rows = {piece.rows for each in planned.set_plans.values() for piece in each.slices if piece.dp == 2}
    assert rows and None not in rows
    ended = run_spindle("check", folder / "sampled-plan.yaml", "--profile", made)
    assert ended.code == 0, ended.out
    verified = run_spindle("verify", folder / "sampled-plan.yaml", "--dtype", "float64", "--steps", 4)
    assert verified.code == 0, verified.out + verified.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--merge", "new.json"), 2, "--merge: one profile; expected two or more"),
        (("--merge", "new.json", "--merge", "new.json"), 3, "it has curves of 'cpu-new', which"),
        (("--merge", "new.json", "--merge", "none.json"), 3, "none.json: no such file"),
        (("--merge", "new.json", "--merge", "cluster.yaml"), 3, "cluster.yaml"),
        (("--merge", "new.json", "--merge", "old.json", "--estimate"), 2, "nothing is profiled"),
        ((TINY, "--merge", "new.json", "--merge", "old.json"), 2, "nothing is profiled"),
        ((), 2, "a WORKLOAD to profile is missing"),
        ((TINY, "--cluster", "cluster.yaml"), 2, "CPUs of several types: cpu-new, cpu-old"),
        ((TINY, "--cluster", "cluster.yaml", "--device", "cpu-odd"), 2, "the cluster has cpu-new, cpu-old"),
        ((TINY, "--device", "h100"), 2, "--device but for CPUs, belong to --estimate"),
    ],
)
def test_what_cannot_be_put_together_is_said_and_nothing_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, message: str
) -> None:
    monkeypatch.chdir(folder)
    ended = run_spindle("profile", *arguments, "-o", "out.json")
    assert ended.code == code
    assert message in " ".join(ended.err.split())
    assert not (folder / "out.json").exists()


def test_a_merge_is_not_written_over_what_it_reads(folder: Path) -> None:
    own = (folder / "new.json").read_bytes()
    merged = ("--merge", folder / "new.json", "--merge", folder / "old.json")
    assert run_spindle("profile", *merged, "-o", folder / "new.json").code == 2
    assert (folder / "new.json").read_bytes() == own


def test_a_type_without_curves_is_told(folder: Path) -> None:
    ended = run_spindle("plan", folder / "new.json", "--cluster", folder / "cluster.yaml", "-o", folder / "n")
    assert ended.code == 3
    said = f"{folder / 'new.json'}: the cluster has devices 'cpu-old', of which the profile has no curves"
    assert said in ended.err
    for command in ("check", "explain", "report"):
        to = ("-o", folder / "n") if command == "report" else ()
        ended = run_spindle(command, folder / "plan.yaml", "--profile", folder / "new.json", *to)
        assert (ended.code, said in ended.err) == (3, True)
