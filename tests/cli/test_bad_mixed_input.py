"""What is wrong with files of several types of device gets one message: code 3, or a violation of a check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.cli import Ended, run_spindle
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.profile.types import Profile, ShareTime

TYPES = {"cpu-new": 1.0, "cpu-old": 2.0}
CLUSTER = cluster_of_types(dict.fromkeys(TYPES, 2))

Data = dict[str, Any]


def share_of(data: Data, kind: str) -> Data:
    return next(each for each in data["metaops"][0]["shares"] if each["device"] == kind)  # type: ignore[no-any-return]


def halves(kind: str) -> ShareTime:
    """A share of all 12 samples, which two devices hold together."""
    return ShareTime(samples=12, tp=2, forward_s=4.0, backward_s=8.0, source="measured", device=kind)


def profile() -> Profile:
    net = metaop_on_types("t/net", 1, TYPES, batch_size=12)
    return profile_on_types(net.model_copy(update={"shares": (*net.shares, *map(halves, TYPES))}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A profile, a cluster file, and a plan that cuts 12 samples into 4, 4, 2 and 2."""
    write_plan(tmp_path / "plan.yaml", make_plan(profile(), CLUSTER))
    (tmp_path / "profile.json").write_text(json.dumps(profile().model_dump(mode="json", by_alias=True)))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER.model_dump(mode="json", by_alias=True)))
    return tmp_path


def require_one_message(ended: Ended, said: str) -> None:
    assert ended.code == 3, ended.err
    assert "Traceback" not in ended.err and ended.out == ""
    assert ended.err.count("error:") == 1
    assert said in " ".join(ended.err.split())


def overlap(data: Data, piece: Data) -> None:
    piece["rows"] = [0, 8, 4, 10, 12]


def miss_a_sample(data: Data, piece: Data) -> None:
    piece["rows"] = [0, 4, 8, 10, 11]


def be_empty(data: Data, piece: Data) -> None:
    piece["rows"] = [0, 4, 8, 8, 12]


def be_held_by_both_types(data: Data, piece: Data) -> None:
    del piece["rows"]
    known = [each.model_dump(mode="json", exclude_none=True) for each in map(halves, TYPES)]
    data["metaops"][0]["shares"] += known
    piece |= {"devices": [1, 2], "dp": 1, "tp": 2}
    piece |= {"end_s": 4.0, "backward_start_s": 4.0, "backward_end_s": 12.0}
    data["waves"][0]["end_s"] = data["predicted"]["compute_s"] = data["predicted"]["iteration_s"] = 12.0
    data["waves"][0]["end_s"] = 4.0


def be_timed_by_the_other_type(data: Data, piece: Data) -> None:
    """Large shares on slow devices, in the time that fast ones take."""
    known = profile().metaops[0].shares
    data["metaops"][0]["shares"] = [
        share.model_dump(mode="json", exclude_none=True) for share in known if share.samples in (2, 4)
    ]
    piece["devices"] = [2, 3, 0, 1]


def have_no_curve(data: Data, piece: Data) -> None:
    shares = data["metaops"][0]["shares"]
    shares[:] = [share for share in shares if share["device"] == "cpu-new"]


def be_of_another_type(data: Data, piece: Data) -> None:
    share_of(data, "cpu-old")["device"] = "cpu-odd"


def be_of_no_type(data: Data, piece: Data) -> None:
    del share_of(data, "cpu-old")["device"]


def be_of_types_where_there_is_one(data: Data, piece: Data) -> None:
    data["cluster"]["nodes"][1]["device"] = "cpu-new"


def be_there_twice(data: Data, piece: Data) -> None:
    data["metaops"][0]["shares"].append(share_of(data, "cpu-old"))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            be_of_another_type,
            "an entry for 'cpu-odd'; expected entries for the cluster's devices: cpu-new, cpu",
        ),
        (
            be_of_no_type,
            "an entry without `device`; expected entries for the cluster's devices: cpu-new, cpu",
        ),
        (
            be_of_types_where_there_is_one,
            "an entry for 'cpu-old'; expected entries for the cluster's devices",
        ),
        (
            be_there_twice,
            "entries in another order, or one twice; expected ascending samples, then tp, each",
        ),
    ],
)
@pytest.mark.parametrize("key", ["shares", "curve"])
def test_times_of_a_plan_are_of_its_clusters_types(
    folder: Path, edit: Callable[[Data, Data], None], said: str, key: str
) -> None:
    path = folder / "plan.yaml"
    data = yaml.safe_load(path.read_text())
    metaop = data["metaops"][0]
    edit(data, data["waves"][0]["slices"][0])
    if key == "curve":
        shares = [dict(share) for share in metaop.pop("shares")]
        degrees = [12 // share.pop("samples") for share in shares]
        sizes = [{"dp": dp, "num_devices": dp} for dp in degrees]
        metaop["curve"] = [share | size for share, size in zip(shares, sizes, strict=True)]
        said = said.replace("samples", "num_devices")
    path.write_text(yaml.safe_dump(data))
    ended = run_spindle("check", path)
    assert ended.code == 1
    (violation,) = ended.out.splitlines()[1:]
    assert f"metaops, t/net.{key}: {said}" in violation and violation.endswith("[types]")
    require_one_message(run_spindle("simulate", path), f"the plan is not valid: metaops, t/net.{key}: {said}")


@pytest.mark.parametrize(
    ("edit", "rule", "said"),
    [
        (overlap, "rows", "rows [0, 8, 4, 10, 12]; expected 5 ascending offsets from 0 to 12"),
        (miss_a_sample, "rows", "rows [0, 4, 8, 10, 11]; expected 5 ascending offsets from 0 to 12"),
        (be_empty, "rows", "rows [0, 4, 8, 8, 12]; expected 5 ascending offsets from 0 to 12"),
        (be_held_by_both_types, "tensor-parallel", "on nodes 0, 1, of cpu-new and cpu-old; expected the 2"),
        (
            be_timed_by_the_other_type,
            "duration",
            "forward lasts 1.33333334 s (1.33 s) and backward lasts 2.66666667 s (2.67 s), as on a cpu-new; "
            "expected at least 2.66666667 s (2.67 s) and 5.33333333 s (5.33 s) for 1 op on the curve of "
            "cpu-old and cpu-new, its devices [duration]",
        ),
        (have_no_curve, "allocation", "share 2, of 2 samples, tp 1, on a cpu-old; expected within"),
    ],
)
def test_a_plan_that_is_wrong_about_types_is_one_violation_and_not_run(
    folder: Path, edit: Callable[[Data, Data], None], rule: str, said: str
) -> None:
    path = folder / "plan.yaml"
    data = yaml.safe_load(path.read_text())
    edit(data, data["waves"][0]["slices"][0])
    path.write_text(yaml.safe_dump(data))
    ended = run_spindle("check", path, "--json")
    assert ended.code == 1, ended.err
    # Shares of other sizes take other memory, which is said as well.
    found = [each for each in json.loads(ended.out)["violations"] if "memory" not in each["rule"]]
    assert [(each["rule"], each["where"]) for each in found] == [(rule, "wave 0, t/net[0:1]")]
    told = " ".join(run_spindle("check", path).out.split())
    assert said in told
    on_node = ("--node-rank", 0, "--master", "127.0.0.1:29599", "--dry-run")
    require_one_message(run_spindle("launch", path, *on_node), said)


def test_the_profile_tells_by_which_type_a_slice_was_timed_where_the_plan_has_no_such_share(
    folder: Path,
) -> None:
    """4 samples on an old device, in the time of a new one, whose shares of 2 are all that the plan has."""
    path = folder / "plan.yaml"
    data = yaml.safe_load(path.read_text())
    be_timed_by_the_other_type(data, piece := data["waves"][0]["slices"][0])
    shares = data["metaops"][0]["shares"]
    shares[:] = [each for each in shares if (each["device"], each["samples"]) != ("cpu-new", 4)]
    path.write_text(yaml.safe_dump(data))
    assert "as on a" not in run_spindle("check", path).out
    assert (
        "(2.67 s), as on a cpu-new; expected"
        in run_spindle("check", path, "--profile", folder / "profile.json").out
    )
    piece["end_s"] -= 0.1  # which is as on neither
    path.write_text(yaml.safe_dump(data))
    ended = run_spindle("check", path, "--profile", folder / "profile.json")
    assert "as on a" not in ended.out
    assert "for 1 op on its curve [duration]" in ended.out


@pytest.mark.parametrize("edit", [overlap, be_empty, be_held_by_both_types, have_no_curve])
def test_what_no_device_can_run_is_not_simulated(folder: Path, edit: Callable[[Data, Data], None]) -> None:
    path = folder / "plan.yaml"
    data = yaml.safe_load(path.read_text())
    edit(data, data["waves"][0]["slices"][0])
    path.write_text(yaml.safe_dump(data))
    for command in (("simulate", path), ("show", path, "--rank", 0)):
        require_one_message(run_spindle(*command), f"{path}: the plan is not valid: wave 0, t/net[0:1]")


def test_a_share_held_across_types_is_said_with_its_devices_and_types(folder: Path) -> None:
    path = folder / "plan.yaml"
    data = yaml.safe_load(path.read_text())
    be_held_by_both_types(data, data["waves"][0]["slices"][0])
    path.write_text(yaml.safe_dump(data))
    require_one_message(
        run_spindle("simulate", path),
        "wave 0, t/net[0:1], devices 1, 2: hold share 0 together, on nodes 0, 1, of cpu-new and cpu-old; "
        "expected the 2 devices of a tensor-parallel share on one node, of one type [tensor-parallel] "
        "`spindle check` lists every violation; put them right, or make the plan again.",
    )


def test_a_type_without_a_curve_is_one_message(folder: Path) -> None:
    """In the whole profile, or of one MetaOp."""
    path = folder / "profile.json"
    other = yaml.safe_load((folder / "cluster.yaml").read_text())
    other["nodes"][1]["device"] = "cpu-odd"
    (folder / "other.yaml").write_text(yaml.safe_dump(other))
    plan = ("plan", path, "-o", folder / "new.yaml", "--cluster")
    require_one_message(
        run_spindle(*plan, folder / "other.yaml"), "the cluster has devices 'cpu-odd', of which"
    )
    data = json.loads(path.read_text())
    for key in ("curve", "shares"):
        entries = data["metaops"][0][key]
        entries[:] = [entry for entry in entries if entry["device"] == "cpu-new"]
    path.write_text(json.dumps(data))
    said = "t/net: no point of its curve is of 'cpu-old'"
    require_one_message(run_spindle(*plan, folder / "cluster.yaml"), said)
    assert not (folder / "new.yaml").exists()


def test_a_merged_profile_of_another_workload_is_one_message(folder: Path) -> None:
    data = json.loads((folder / "profile.json").read_text())
    data["workload"] |= {"name": "other", "fingerprint": "sha256:" + "1" * 64}
    (folder / "other.json").write_text(json.dumps(data))
    merge = ("profile", "--merge", folder / "profile.json", "--merge", folder / "other.json")
    ended = run_spindle(*merge, "-o", folder / "both.json")
    require_one_message(ended, "other.json: a profile of the workload 'other'")
    assert not (folder / "both.json").exists()


def test_groups_of_equal_names_are_one_message(folder: Path) -> None:
    path = folder / "cluster.yaml"
    data = yaml.safe_load(path.read_text())
    plan = ("plan", folder / "profile.json", "--cluster", path, "-o", folder / "new.yaml")
    for names, said in (
        (("a", "a"), "nodes[1].name: 'a', as nodes[0] is named; expected each name once: rename one of them"),
        (
            ("cpu-old", None),
            "nodes[0].name: 'cpu-old', as a group without a name is called by its devices; expected",
        ),
    ):
        for group, name in zip(data["nodes"], names, strict=True):
            group["name"] = name
        path.write_text(yaml.safe_dump(data))
        require_one_message(run_spindle(*plan), said)


@pytest.mark.parametrize("command", ["check", "simulate", "show", "explain"])
def test_groups_of_equal_names_in_a_plan_are_one_line(folder: Path, command: str) -> None:
    path = folder / "plan.yaml"
    data = yaml.safe_load(path.read_text())
    for group in data["cluster"]["nodes"]:
        group["name"] = "a"
    path.write_text(yaml.safe_dump(data))
    ended = run_spindle(command, path)
    assert ended.code == 3
    said = "cluster.nodes[1].name: 'a', as nodes[0] is named; expected each name once: rename one of them"
    assert ended.err == f"error: {path}: {said}\n"
