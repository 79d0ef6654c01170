"""Memory that is freed stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource
import sys

import torch

from spindle_cli.process.devices import give_back_freed_memory, keep_freed_memory

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    give_back_freed_memory()
    keep_freed_memory()
elif sys.argv[1] == "give back":
    give_back_freed_memory()


def step():
    parts = [torch.ones(300_000) for _ in range(50)]
    del parts


step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS, how], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_step_does_not_get_again_what_the_one_before_has_freed() -> None:
    kept, handed_back = page_faults("keep"), page_faults("give back")
    assert kept < handed_back / 5
