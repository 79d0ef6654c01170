"""Run the test suite, as `make test` does: `python scripts/run_tests.py [--all] [ARGUMENTS OF PYTEST]`.

Without `--all`, tests marked `long` are left out. How they are run is what `in_parts.py` says.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from in_parts import InParts, yield_to_others

ALL, BUT_LONG = "--all", "not long"
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"  # tests start many Pythons; each would compile all that it imports


def chosen(arguments: Sequence[str]) -> list[str]:
    """The arguments for pytest: they choose the tests."""
    more = [argument for argument in arguments if argument != ALL]
    return more if ALL in arguments else ["-m", BUT_LONG, *more]


def stop(number: int, _: object) -> None:
    """End all processes that run tests, then this one."""
    pytest.exit(f"ended by signal {number}", returncode=128 + number)


def main(arguments: Sequence[str], yielding: Callable[[], None] = yield_to_others) -> int:
    """Run the tests that the arguments choose."""
    # What waits for processors should not wait for its own threads too, at every small operation.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop(NO_BYTECODE, None)
    sys.dont_write_bytecode = False
    sys.path.insert(0, str(Path.cwd()))  # as `python -m pytest` does
    signal.signal(signal.SIGTERM, stop)
    return int(pytest.main(chosen(arguments), plugins=[InParts(yielding)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
