"""What a script under torchrun does not catch of our errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import torch.distributed as dist
from spindle_cli.errors import InputError
from spindle_cli.process.worker_session import show_errors_plainly

show_errors_plainly()
if {joins}:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
raise InputError("plan.yaml: no such file", hint="Make it first.")
"""


@pytest.mark.parametrize("joins", [False, True])
def test_they_end_it_with_their_message_and_exit_code_also_in_a_process_group(joins: bool) -> None:
    """There torch prints errors by a hook of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(joins=joins)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 3
    assert ended.stderr.endswith("error: plan.yaml: no such file\n  Make it first.\n")
    assert "Traceback" not in ended.stderr
