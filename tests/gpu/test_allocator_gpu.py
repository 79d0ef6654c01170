"""Workers' memory grows in segments that can, by what they are started with."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from spindle_cli.launch.build import worker_environment
from spindle_cli.launch.types import Address, NodeShare
from spindle_cli.process.environment import child_environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

SEGMENTS = """
import json, torch
held = torch.empty(2**26, device="cuda")
print(json.dumps([segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]))
"""


def test_segments_of_a_workers_memory_can_grow() -> None:
    own = worker_environment(1, "nccl", NodeShare(0, 1, 1, Address("127.0.0.1", 0), "lo"))
    said = subprocess.run(
        [sys.executable, "-c", SEGMENTS],
        env=child_environment(own),
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(said.stdout) == [True]
