"""What a probe of the device says: an object a line, at once, so that it is there whatever comes then."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping

from torch import Tensor

Check = Callable[[], str]


def report(checks: Mapping[str, Check]) -> int:
    """Make each check, and print what it says or how it failed; the exit code."""
    failed = 0
    for name, check in checks.items():
        begun_s = time.perf_counter()
        try:
            status, said = "ok", check()
        except Exception as error:  # a probe finds out what fails; the whole of it is in the log
            traceback.print_exc(file=sys.stderr)
            first = (str(error).splitlines() or [""])[0]
            status, said, failed = "failed", f"{type(error).__name__}: {first}"[:200], failed + 1
        seconds = time.perf_counter() - begun_s
        line = {"probe": name, "status": status, "said": said, "seconds": seconds}
        print(json.dumps(line), flush=True)
    return int(failed > 0)


def require(condition: bool | Tensor, said: str) -> None:
    """Go on only where it holds.

    Raises:
        RuntimeError: it does not.
    """
    if not bool(condition):
        raise RuntimeError(said)
