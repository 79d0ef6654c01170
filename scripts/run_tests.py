"""Run the test suite, as `make test` does: `python scripts/run_tests.py [--all] [ARGUMENTS OF PYTEST]`.

Without `--all`, tests marked `long` are left out.

Tests that start workers leave half of two cores idle: they wait for messages, for processes that start, for
what has to be found hanging. Those that start none run beside them, where they get what is left: workers that
shared their cores with others by halves would wait for each message ten times as long. Tests whose workers
send each other many messages run one by one, the others two at a time. All have what they start forked by one
process, which has imported torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from helpers.ready_python import ADDRESS, started  # below `tests`

PYTEST = (sys.executable, "-m", "pytest")
TWO_AT_A_TIME = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
# The others go first; a test that hangs is found, but only late: it may have waited for its turn.
BESIDE = (*PYTEST, *TWO_AT_A_TIME, "--timeout=1200", "-m", "not processes")
IN_TURN = (
    (*PYTEST, *TWO_AT_A_TIME, "-m", "processes and not alone"),
    (*PYTEST, "-m", "processes and alone"),
)
ALL, BUT_LONG = "--all", " and not long"
NO_SUCH_TESTS = 5
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"  # each process would compile all tests that it collects
YIELDING = 10  # nice: a tenth of a core where others want all of it
AUTOGROUP = Path("/proc/self/autogroup")  # Linux: each session has a share of its own, whatever is nice in it


def yield_to_others() -> None:
    """Let this process, and what it starts, give way to others."""
    os.nice(YIELDING)
    with suppress(OSError):  # not everywhere; without it tests take longer
        AUTOGROUP.write_text(str(YIELDING), encoding="ascii")


def run_all(
    beside: Sequence[str], in_turn: Sequence[Sequence[str]], yielding: Callable[[], None] = yield_to_others
) -> int:
    """Run one command beside the others, which run one after the other, and print what it says behind what
    they say; 0 if all went well, else the code of the first that did not.

    Args:
        yielding: what the command that runs beside the others does first.
    """
    # What waits for processors should not wait for its own threads too, at every small operation.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop(NO_BYTECODE, None)
    with tempfile.TemporaryFile() as said, started() as address:
        environment[ADDRESS] = address.hex()
        other = subprocess.Popen(
            beside,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            preexec_fn=yielding,
        )
        try:
            codes = [subprocess.run(command, env=environment, check=False).returncode for command in in_turn]
            codes.append(other.wait())
        finally:
            if other.poll() is None:
                os.killpg(other.pid, signal.SIGTERM)
                other.wait()
            said.seek(0)
            sys.stdout.write(said.read().decode(errors="replace"))
            sys.stdout.flush()
    return next((code for code in codes if code not in (0, NO_SUCH_TESTS)), 0)


def chosen(arguments: Sequence[str]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """The command that runs beside the others, and these, of the tests that arguments choose."""
    but = "" if ALL in arguments else BUT_LONG
    more = [argument for argument in arguments if argument != ALL]

    def tests(command: Sequence[str]) -> Sequence[str]:
        return [*command[:-1], command[-1] + but, *more]

    return tests(BESIDE), [tests(command) for command in IN_TURN]


def main() -> int:
    """Run the tests that the arguments choose."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run_all(*chosen(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
