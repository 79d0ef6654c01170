"""The paper's workloads on one GPU: curves at full size, share of the peak, predicted against measured.

    python scripts/bench_gpu.py [--workloads clip-4 ...] [--steps N] [--time-limit SECONDS]

Measures each workload's profile on the first CUDA device (compute at every per-device share that a cluster of
64 such devices uses), keeps it under configs/profiles/<device>/, plans it for one device, trains it, and
writes configs/profiles/<device>/README.md with what came out. Without a CUDA device it says so and ends.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from gpu_bench.record import share_of_peak
from paper_profiles import ROOT, WORKLOADS

from spindle_cli.costs.flops import Arithmetic
from spindle_cli.files.run_files import PREDICTED_FILE, Comparison, PredictedVsMeasured
from spindle_cli.files.writing import write_text
from spindle_cli.profile.machine.devices import cluster_device_name
from spindle_cli.profile.machine.machine import describe_device
from spindle_cli.profile.types import Profile
from spindle_cli.units import GIB, format_seconds

NO_PLAN = 4


@dataclass(frozen=True)
class Trained:
    """A workload on one device. `iteration`: None where it does not fit the device's memory."""

    workload: str
    profile: Profile
    iteration: Comparison | None


def main() -> None:
    """Measure everything and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--time-limit", type=float, default=0.5)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench-gpu: skipped, torch finds no CUDA device")
        return
    device = describe_device("cuda", 1)
    name = cluster_device_name(device)
    folder = ROOT / "configs" / "profiles" / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        clusters = {count: _cluster(Path(scratch), name, device.memory_bytes, count) for count in (1, 64)}
        results = []
        for workload in chosen.workloads:
            profile = folder / f"{workload}.json"
            source = ROOT / "configs" / "workloads" / f"{workload}.yaml"
            limit = ("--time-limit", str(chosen.time_limit))
            reach = ("--cluster", clusters[64], "--nproc", "1")
            _spindle("profile", source, "-o", profile, *reach, *limit)
            iteration = _train(profile, clusters[1], Path(scratch) / workload, chosen.steps)
            results.append(Trained(workload, Profile.read(profile), iteration))
    write_text(folder / "README.md", "\n".join(_page(name, results)) + "\n")


def _cluster(folder: Path, name: str, memory_bytes: int, count: int) -> Path:
    """A cluster file of nodes of up to 8 such devices, NVLink inside and 400 Gb/s InfiniBand between them.

    Links: 8 H200s one way 396 GB/s (stas00/ml-engineering network/README.md), one network card 46 GB/s
    (NVIDIA/nccl-tests issue 290).
    """
    per_node = min(count, 8)
    cluster = {
        "schema": "spindle.cluster/1",
        "name": f"{name}-{count}",
        "nodes": [
            {
                "count": count // per_node,
                "devices": per_node,
                "device": name,
                # What the driver and the libraries take is not there for tensors.
                "memory_gib": round(0.93 * memory_bytes / GIB, 1),
            }
        ],
        "links": {
            "intra_node": {"latency_us": 2.8, "bandwidth_gb_per_s": 396},
            "inter_node": {"latency_us": 14, "bandwidth_gb_per_s": 46},
        },
    }
    path = folder / f"{count}.yaml"
    path.write_text(yaml.safe_dump(cluster), encoding="utf-8")
    return path


def _train(profile: Path, cluster: Path, scratch: Path, steps: int) -> Comparison | None:
    """Plan for one device and train; None where no plan fits."""
    scratch.mkdir()
    plan, run_dir = scratch / "plan.yaml", scratch / "run"
    if _spindle("plan", profile, "--cluster", cluster, "-o", plan, allowed=(NO_PLAN,)) == NO_PLAN:
        return None
    _spindle("launch", plan, "--run-dir", run_dir, "--steps", str(steps))
    return PredictedVsMeasured.read(run_dir / PREDICTED_FILE).iteration


def _spindle(*arguments: str | Path, allowed: Sequence[int] = ()) -> int:
    """Run a command; exits with its code unless it is 0 or allowed."""
    code = subprocess.run(
        [sys.executable, "-m", "spindle_cli", *map(str, arguments)], cwd=ROOT, check=False
    ).returncode
    if code not in (0, *allowed):
        sys.exit(code)
    return code


def _page(name: str, results: Sequence[Trained]) -> Iterator[str]:
    environment = results[0].profile.environment
    yield f"# {results[0].profile.device.name}, measured"
    yield ""
    versions = f"torch {environment['torch']}, CUDA {environment['cuda']}, {environment['precision']}"
    yield f"By `make bench-gpu`; {versions}."
    yield ""
    yield "## One iteration on one device"
    yield ""
    yield "| workload | predicted | measured | off by |"
    yield "|---|---:|---:|---:|"
    for each in results:
        if each.iteration is None:
            yield f"| {each.workload} | does not fit one device | | |"
            continue
        predicted, measured = each.iteration.predicted_s, each.iteration.measured_s
        yield (
            f"| {each.workload} | {format_seconds(predicted)} | {format_seconds(measured)} "
            f"| {predicted / measured - 1:+.1%} |"
        )
    yield ""
    yield "## Share of the device's peak"
    yield ""
    yield "Of an op on its whole batch, both ways, counting three times the operations of a forward pass."
    yield ""
    yield "| MetaOp | seconds of an op | share of the peak |"
    yield "|---|---:|---:|"
    for each in results:
        yield from _shares(name, each)


def _shares(name: str, trained: Trained) -> Iterator[str]:
    precision: Arithmetic = "float32" if trained.profile.environment["precision"] == "float32" else "bfloat16"
    for metaop in trained.profile.metaops:
        point = metaop.curve[0]
        share = share_of_peak(name, precision, metaop, point.num_devices, point.op_s)
        if share is not None:
            yield f"| {trained.workload} {metaop.name} | {format_seconds(point.op_s)} | {share:.0%} |"


if __name__ == "__main__":
    main()
