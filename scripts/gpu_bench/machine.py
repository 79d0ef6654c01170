"""What is on a machine: versions, free memory, and whether every module of ours can be imported.

    python -m gpu_bench.machine [describe cuda|cpu]

The check asks a process of its own what the device is, so that it takes none of the device's memory itself.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

import spindle_cli
from gpu_bench.probe import report, require
from spindle_cli.profile.machine.devices import cluster_device_name
from spindle_cli.profile.machine.machine import describe_device
from spindle_cli.units import GIB

PACKAGES = ("pydantic", "pulp", "highspy", "torchdata", "numpy", "safetensors", "transformers", "triton")


def versions() -> str:
    """Of Python, torch and what is installed beside it."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    nccl = ""
    if torch.cuda.is_available():
        nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]  # torch: untyped
    return f"Python {sys.version.split()[0]}, torch {torch.__version__}{nccl}; {', '.join(found)}"


def memory() -> str:
    """Of the device and of the host, free now."""
    host = f"host {psutil.virtual_memory().available / GIB:.1f} GiB free, {psutil.cpu_count()} cores"
    if not torch.cuda.is_available():
        return host
    free, total = torch.cuda.mem_get_info()
    return f"{torch.cuda.get_device_name()}: {free / GIB:.1f} of {total / GIB:.1f} GiB free; {host}"


def imports() -> str:
    """Every module of the package."""
    names = [each.name for each in pkgutil.walk_packages(spindle_cli.__path__, "spindle_cli.")]
    failed = []
    for name in names:
        if not name.endswith("__main__"):
            try:
                importlib.import_module(name)
            except ImportError as error:
                failed.append(f"{name}: {error}")
    require(not failed, "; ".join(failed))
    return f"{len(names)} modules"


def main() -> int:
    """Print what was asked for; the exit code: 3, there is no such device."""
    if sys.argv[1:2] != ["describe"]:
        return report({"versions": versions, "memory": memory, "imports": imports})
    kind = sys.argv[2]
    if kind == "cuda" and not torch.cuda.is_available():
        return 3
    found = describe_device("cuda" if kind == "cuda" else "cpu", 1)
    known = {"said": found.name, "name": cluster_device_name(found), "memory_bytes": found.memory_bytes}
    print(json.dumps({"kind": kind, **known}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
