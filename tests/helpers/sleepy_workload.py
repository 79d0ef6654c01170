"""The toy workload, whose build takes until the test ends it: in the launcher, or in the workers alone.

It leaves a file `building` where it runs, and cannot be interrupted by an exception: it swallows every one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from helpers import toy_workload
from helpers.faulty_workload import is_worker
from spindle_cli.workload.types import Workload

VARIABLE = "SPINDLE_TEST_SLEEPS"  # 'launcher' or 'workers'


def build() -> Workload:
    who = "workers" if is_worker() else "launcher"
    if os.environ.get(VARIABLE) == who:
        Path("building").touch()
        give_up_at = time.monotonic() + 60
        while time.monotonic() < give_up_at:
            try:
                time.sleep(0.1)
            except BaseException:
                continue
    return toy_workload.build()
