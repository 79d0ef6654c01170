"""What a launch refuses before anything starts, each with its exit code."""

from __future__ import annotations

import resource
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from helpers.cli import Ended, run_spindle
from helpers.plans import two_towers
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from helpers.toy_plan import write_toy
from spindle_cli.analysis import autograd
from spindle_cli.errors import InputError, UsageError, WorkloadError
from spindle_cli.launch.checks import (
    chunked_otherwise,
    compiled_otherwise,
    require_gradient_hooks,
    sampled_otherwise,
)
from spindle_cli.launch.devices import missing_devices, require_disk, require_open_files, threads_per_worker
from spindle_cli.launch.run import choose_run_dir
from spindle_cli.launch.starting.network import (
    interface_of,
    listen,
    parse_master,
    require_address,
    share_of_node,
)
from spindle_cli.launch.types import Address
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, ProfileRef
from spindle_cli.workload.building.load import locate
from spindle_cli.workload.file import TrainSettings


@pytest.fixture
def plan_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_toy(tmp_path)


def dry_run(plan_path: Path, *more: object) -> Ended:
    return run_spindle("launch", plan_path, "--dry-run", *more)


def test_another_workload_is_refused_and_both_are_named(plan_path: Path, tmp_path: Path) -> None:
    text = plan_path.read_text()
    fingerprint = read_plan(plan_path).workload.fingerprint
    plan_path.write_text(text.replace(fingerprint, "sha256:" + "0" * 64))
    ended = dry_run(plan_path)
    assert ended.code == 3
    assert "workload 'toy' (sha256:000000000000)" in ended.err
    assert f"{tmp_path / 'toy.yaml'} is 'toy' ({fingerprint[:19]})" in ended.err


def test_a_missing_workload_is_refused_with_where_it_was_looked_for(plan_path: Path) -> None:
    Path("toy.yaml").rename("moved.yaml")
    ended = dry_run(plan_path)
    assert ended.code == 3
    assert "the workload 'toy.yaml' is not there (looked in" in ended.err
    assert "--workload" in ended.err
    assert dry_run(plan_path, "--workload", "moved.yaml").code == 0


def test_a_workload_is_found_beside_its_plan_from_another_folder(
    plan_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert locate("toy.yaml", (tmp_path,)) == str(tmp_path / "toy.yaml")
    assert locate("package.module:build") == "package.module:build"
    with pytest.raises(InputError, match="no_such"):
        locate("no_such.py:build")


def test_a_plan_that_was_edited_wrongly_is_refused(plan_path: Path) -> None:
    plan_path.write_text(plan_path.read_text().replace("ops: [0, 2]", "ops: [0, 1]", 1))
    ended = dry_run(plan_path)
    assert ended.code == 3
    assert "the plan is not valid" in ended.err
    assert "[coverage]" in ended.err


def test_a_taken_run_dir_is_refused_and_the_default_goes_on_counting(plan_path: Path) -> None:
    Path("runs/toy-1").mkdir(parents=True)
    Path("runs/toy-1/metrics.jsonl").write_text("")
    assert choose_run_dir("toy", None, resume=False, node_rank=0, run="mine") == Path("runs/toy-2")
    ended = dry_run(plan_path, "--run-dir", "runs/toy-1")
    assert ended.code == 2
    assert "--resume" in ended.err


@pytest.mark.usefixtures("ready_here")
@pytest.mark.parametrize(
    ("folder", "code", "said"),
    [
        ("toy.yaml", 2, "it is a file, not a folder"),
        ("toy.yaml/run", 3, "toy.yaml is a file"),
        ("/proc/run", 3, "the run's folder cannot be made: No such file or directory"),
    ],
)
def test_a_run_dir_that_cannot_be_is_refused_with_the_reason(
    plan_path: Path, folder: str, code: int, said: str
) -> None:
    ended = run_spindle("launch", plan_path, "--run-dir", folder)
    assert (ended.code, said in ended.err) == (code, True), ended.err


@pytest.mark.parametrize(
    ("begin_from", "said"),
    [
        ("nosuch", "nosuch: there is no such folder"),
        ("toy.yaml", "toy.yaml: a file, not the folder of a run"),
    ],
)
def test_a_run_to_begin_from_that_is_not_there_is_refused_by_a_dry_run_too(
    plan_path: Path, begin_from: str, said: str
) -> None:
    ended = dry_run(plan_path, "--from", begin_from)
    assert (ended.code, said in ended.err) == (3, True), ended.err
    exported = run_spindle("export", begin_from, "-o", "model.safetensors")
    assert (exported.code, said in exported.err) == (3, True), exported.err


def test_resume_without_a_run_is_refused(plan_path: Path) -> None:
    ended = dry_run(plan_path, "--resume")
    assert ended.code == 2
    assert "there is no run in runs/toy-*" in ended.err


@pytest.mark.parametrize("text", ["10.0.0.1", ":29500", "host:", "host:0", "host:65536", "host:x"])
def test_a_master_without_host_or_port_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_master(text)


def test_a_master_is_read_with_ipv4_ipv6_and_names() -> None:
    assert str(parse_master("10.0.0.1:29500")) == "10.0.0.1:29500"
    assert str(parse_master("[fe80::1]:29500")) == "[fe80::1]:29500"
    assert parse_master("node0.cluster:1").host == "node0.cluster"


def test_nodes_and_master_must_fit_the_cluster(tmp_path: Path) -> None:
    one = read_plan(write_toy(tmp_path)).cluster
    two = read_plan(write_toy(tmp_path, devices_per_node=1)).cluster
    for cluster, rank, master in [
        (one, 1, None),
        (one, 0, "h:1"),
        (two, None, None),
        (two, 2, "127.0.0.1:1"),
    ]:
        with pytest.raises(UsageError):
            share_of_node(cluster, rank, master)
    share = share_of_node(two, 1, "127.0.0.1:29500")
    assert (share.rank, share.num_nodes, share.processes) == (1, 2, 1)


def test_a_name_that_is_loopback_on_every_node_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = read_plan(write_toy(tmp_path, devices_per_node=1)).cluster
    address = (2, 2, 17, "", ("127.0.1.1", 29500))
    monkeypatch.setattr("socket.getaddrinfo", lambda *arguments, **options: [address])
    with pytest.raises(UsageError, match="no other node can reach"):
        share_of_node(two, 0, "node0:29500")


def test_node_0_must_be_able_to_listen_at_the_master(tmp_path: Path) -> None:
    two = read_plan(write_toy(tmp_path, devices_per_node=1)).cluster
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        share = share_of_node(two, 0, f"127.0.0.1:{port}")
        with pytest.raises(UsageError, match="in use"):
            require_address(share)
        require_address(share_of_node(two, 1, f"127.0.0.1:{port}"))
    require_address(share)
    elsewhere = replace(share, master=Address("192.0.2.1", port))  # kept free for documentation
    with pytest.raises(UsageError, match="cannot listen there"):
        require_address(elsewhere)


def test_the_users_own_interface_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert interface_of("127.0.0.1") == "ib0"


def test_devices_at_hand_are_compared_with_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = two_towers()
    monkeypatch.setattr("spindle_cli.launch.devices.usable_cores", lambda: 2)
    assert missing_devices(plan, 2) == ()
    assert missing_devices(plan, 4) == (
        "4 workers on 2 cores: they share them, and predicted times hold only if they were measured so",
    )
    with pytest.raises(InputError, match="a worker process each"):
        missing_devices(plan, 100_000)
    node = plan.cluster.nodes[0].model_copy(update={"device": "h100"})
    gpus = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"nodes": (node,)})})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(InputError, match=r"4 devices \(h100\) on this node; found 1"):
        missing_devices(gpus, 4)
    by_gloo = gpus.model_copy(update={"cluster": gpus.cluster.model_copy(update={"backend": "gloo"})})
    with pytest.raises(InputError, match=r"GPUs \(h100\) and `backend: gloo`"):
        missing_devices(by_gloo, 1)


def test_gpus_are_of_the_types_that_the_plan_has_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = two_towers()[1]
    cluster = cluster_of_types({"h100-80gb": 2, "a100-80gb": 2})
    mixed = plan.model_copy(update={"cluster": cluster})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    assert missing_devices(mixed, 2, node_rank=1) == ()
    message = r"device 0 of the plan, GPU 0 of this node \(rank 0\), is a 'h100-80gb'; found 'NVIDIA A100"
    with pytest.raises(InputError, match=message):
        missing_devices(mixed, 2, node_rank=0)
    monkeypatch.setattr(
        "torch.cuda.get_device_name", lambda gpu: f"NVIDIA {('A100-SXM4-80GB', 'H100 80GB HBM3')[gpu]}"
    )
    with pytest.raises(InputError, match=r"device 3 of the plan, GPU 1 of this node \(rank 1\)"):
        missing_devices(mixed, 2, node_rank=1)


def test_a_node_whose_cpu_another_type_was_measured_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = two_towers()[1]
    cluster = cluster_of_types({"cpu-old": 2, "cpu-new": 2})
    models = {"cpu-old": "Xeon 5", "cpu-new": "EPYC 9"}
    ref = ProfileRef(sha256=plan.profile.sha256, processors=models)
    mixed = plan.model_copy(update={"cluster": cluster, "profile": ref})
    monkeypatch.setattr("spindle_cli.launch.devices.usable_cores", lambda: 2)
    monkeypatch.setattr("spindle_cli.launch.devices.cpu_model", lambda: "EPYC 9")
    assert missing_devices(mixed, 2, node_rank=1) == ()
    message = (
        r"node 0 of the plan has devices 'cpu-old', measured on 'Xeon 5'; "
        r"this machine is 'EPYC 9', on which 'cpu-new' was"
    )
    with pytest.raises(InputError, match=message):
        missing_devices(mixed, 2, node_rank=0)
    assert missing_devices(mixed, 2, node_rank=None) == ()  # all of them here
    monkeypatch.setattr("spindle_cli.launch.devices.cpu_model", lambda: "Another 7")
    (line,) = missing_devices(mixed, 2, node_rank=1)
    assert "'cpu-new', measured on 'EPYC 9'; this machine is 'Another 7': predicted times may be off" in line
    alike = mixed.model_copy(update={"profile": ref.model_copy(update={"processors": {}})})
    assert missing_devices(alike, 2, node_rank=1) == ()


def test_the_plan_says_on_which_cpus_its_types_were_measured() -> None:
    net = metaop_on_types("t/net", 4, {"cpu-old": 3.0, "cpu-new": 1.0})
    profile = profile_on_types(net)
    models = ("Xeon 5", "EPYC 9")
    devices = tuple(
        each.model_copy(update={"name": name}) for each, name in zip(profile.devices, models, strict=True)
    )
    profile = profile.model_copy(update={"device": devices[0], "devices": devices})
    several = make_plan(profile, cluster_of_types({"cpu-new": 1, "cpu-old": 1}), effort=0)
    assert several.profile.processors == {"cpu-new": "EPYC 9", "cpu-old": "Xeon 5"}
    assert make_plan(profile, cluster_of_types({"cpu-new": 2}), effort=0).profile.processors == {}
    gpus = profile_on_types(metaop_on_types("t/net", 4, {"v100-32gb": 3.0, "a100-80gb": 1.0}))
    planned = make_plan(gpus, cluster_of_types({"v100-32gb": 1, "a100-80gb": 1}), effort=0)
    assert planned.profile.processors == {}


def test_layers_compiled_otherwise_than_measured_are_said() -> None:
    plan = two_towers()[1]
    compiled = plan.model_copy(update={"compile": "inductor"})
    plain, inductor = TrainSettings(), TrainSettings(compile="inductor")
    assert compiled_otherwise(plan, plain) == compiled_otherwise(compiled, inductor) == ()
    (line,) = compiled_otherwise(plan, inductor)
    assert "layers as they are, and they run compiled by inductor" in line
    (line,) = compiled_otherwise(compiled, plain)
    assert "layers compiled by inductor, and they run as they are" in line


def sampled(**sampling: Any) -> Any:
    """A workload of tasks a and b."""
    tasks = tuple(SimpleNamespace(name=name) for name in "ab")
    train = TrainSettings.model_validate({"sampling": sampling or None})
    return SimpleNamespace(train=train, graph=SimpleNamespace(workload=SimpleNamespace(tasks=tasks)))


def test_tasks_that_run_more_or_less_often_than_planned_are_said() -> None:
    whole = two_towers()[1]

    def planned(*shares: tuple[str, float]) -> Plan:
        sets = [SimpleNamespace(tasks=tuple(tasks), share=share) for tasks, share in shares]
        return whole.model_copy(update={"task_sets": tuple(sets)})

    halves = planned(("ab", 0.5), ("a", 0.5))
    assert sampled_otherwise(halves, sampled(every={"b": 2})) == ()
    assert sampled_otherwise(halves, sampled(every={"b": {"every": 2, "offset": 1}})) == ()
    assert sampled_otherwise(planned(), sampled()) == ()
    thirds = "the workload's steps run a (66.7%); a + b (33.3%) (train.sampling)"
    (line,) = sampled_otherwise(halves, sampled(every={"b": 3}))
    assert line == (
        f"the plan's times are for steps that run a + b (50.0%); a (50.0%), and {thirds}: predictions will "
        "be off; profile and plan again"
    )
    (line,) = sampled_otherwise(planned(), sampled(every={"b": 3}))
    assert f"run a + b (100.0%), and {thirds}" in line
    (line,) = sampled_otherwise(halves, sampled())
    assert "and the workload's steps run a + b (100.0%)" in line
    drawn = planned(("a", 0.75), ("b", 0.25))
    assert sampled_otherwise(drawn, sampled(draw={"weights": {"a": 3, "b": 1}})) == ()
    assert sampled_otherwise(drawn, sampled(draw={"weights": {"a": 3.1, "b": 1}})) != ()


def test_losses_in_other_chunks_than_planned_are_said() -> None:
    plan = two_towers()[1]
    auto, four = TrainSettings(), TrainSettings(loss_chunks=4)
    first = plan.metaops[0].model_copy(update={"loss_chunks": {8: 2}})
    chunked = plan.model_copy(update={"loss_chunks": "auto", "metaops": (first, *plan.metaops[1:])})
    small = plan.model_copy(update={"loss_chunks": "auto"})
    # An earlier plan says nothing, and a small loss is in one go either way.
    assert chunked_otherwise(plan, auto) == chunked_otherwise(chunked, auto) == ()
    assert chunked_otherwise(small, TrainSettings(loss_chunks=1)) == ()
    (line,) = chunked_otherwise(plan, four)
    assert "for loss_chunks: 1, and the workload has loss_chunks: 4" in line
    (line,) = chunked_otherwise(chunked, TrainSettings(loss_chunks=1))
    assert "for loss_chunks: auto, and the workload has loss_chunks: 1" in line


def test_workers_get_the_threads_that_the_curves_were_measured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = two_towers()
    monkeypatch.setattr("spindle_cli.launch.devices.usable_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_worker(plan, 4) == 4
    assert threads_per_worker(plan.model_copy(update={"threads_per_process": 1}), 4) == 1


def test_workers_get_no_more_threads_than_their_host_has_cores_for_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = two_towers()[1].model_copy(update={"threads_per_process": 8})
    monkeypatch.setattr("spindle_cli.launch.devices.usable_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_worker(plan, 2) == 2
    (line,) = missing_devices(plan, 2)
    assert line == "workers have 2 threads each; the plan's times are of 8, and will be off"


def test_the_users_number_of_threads_goes_before_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = two_towers()[1].model_copy(update={"threads_per_process": 1})
    monkeypatch.setattr("spindle_cli.launch.devices.usable_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert threads_per_worker(plan, 2) == 3
    assert missing_devices(plan, 2) == (
        "2 workers of 3 threads each on 4 cores: they share them, and predicted times hold only if they were "
        "measured so",
        "workers have 3 threads each; the plan's times are of 1, and will be off",
    )
    for wrong in ("0", "many", "-1"):
        monkeypatch.setenv("OMP_NUM_THREADS", wrong)
        with pytest.raises(UsageError, match=f"OMP_NUM_THREADS={wrong}"):
            threads_per_worker(plan, 2)


def test_a_disk_that_a_run_would_fill_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(10**9, 0, 10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    require_disk(tmp_path / "not" / "there" / "yet")
    with pytest.raises(InputError, match="the run needs"):
        require_disk(tmp_path, needed_bytes=10**8)


def test_train_settings_that_cannot_be_are_said_with_their_file(plan_path: Path) -> None:
    workload = plan_path.with_name("toy.yaml")
    workload.write_text(workload.read_text().replace("steps: 4", "steps: 4\n  optimizer: Adan"))
    ended = dry_run(plan_path)
    assert (ended.code, "toy.yaml: train.optimizer: " in ended.err) == (3, True), ended.err


@pytest.mark.parametrize(
    ("limits", "raised_to"),
    [
        ((176, 1000), None),
        ((175, 176), (176, 176)),
        ((16, resource.RLIM_INFINITY), (176, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_as_many_open_files_are_allowed_as_workers_need(
    limits: tuple[int, int], raised_to: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128, 4 for each of 4 workers here, 8 for each of 4 in all."""
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, made: set_to.append(made))
    require_open_files(4, 4)
    assert set_to == ([] if raised_to is None else [raised_to])


def test_too_few_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 175))
    with pytest.raises(InputError, match=r"may have 175 files open; .* may need 176"):
        require_open_files(4, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"offload": ((0, 1),)}, "moves activations to host memory"),
        ({"recompute": True}, "recomputes activations"),
        ({"loss_chunks": {4: 2}}, "computes losses in chunks"),
        ({}, None),
    ],
)
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("is_hooked", [True, False])
def test_hooks_on_gradients_are_refused_where_torch_loses_them(
    changes: dict[str, Any], said: str | None, keeps: bool, is_hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, "KEEPS_GRADIENT_HOOKS", keeps)
    (_, plan), layer = two_towers(), nn.Linear(2, 2)
    first = plan.waves[0]
    of_metaop = {key: changes[key] for key in changes if key == "loss_chunks"}
    metaops = (*plan.metaops[:-1], plan.metaops[-1].model_copy(update=of_metaop))
    plan = plan.model_copy(update={"metaops": metaops})
    pieces = (first.slices[0].model_copy(update={} if of_metaop else changes), *first.slices[1:])
    plan = plan.model_copy(update={"waves": (first.model_copy(update={"slices": pieces}), *plan.waves[1:])})
    if is_hooked:
        layer.weight.register_hook(lambda gradient: 0 * gradient)  # type: ignore[no-untyped-call]
    task: Any = SimpleNamespace(task=SimpleNamespace(name="pairs"), root=layer)
    graph: Any = SimpleNamespace(tasks={"pairs": task})
    if keeps or not is_hooked or said is None:
        require_gradient_hooks(plan, graph)
        return
    with pytest.raises(
        WorkloadError, match=f"task 'pairs': the parameter 'weight' has a hook .* plan {said}"
    ):
        require_gradient_hooks(plan, graph)
    layer.weight.requires_grad_(False)
    require_gradient_hooks(plan, graph)
