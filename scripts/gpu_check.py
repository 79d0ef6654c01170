"""Everything that only a GPU can show, in nine minutes: a table, the same as JSON, and all logs in one file.

    python scripts/gpu_check.py [--device cuda|cpu] [--size full|toy] [--only SECTION ...] [--slower TIMES]
                                [--budget SECONDS] [-o FOLDER]

In FOLDER: gpu-check.txt, gpu-check.json and logs.tar.gz, written anew after each step, so that they stand
whenever it is stopped; running.out and running.err, what the command says that runs just then; trace.json.gz,
one step of a plain loop of wide layers. Steps come in the order of what they are worth, each with a limit of
its own (scripts/gpu_bench/steps.py). What the time does not suffice for is said, not left out. `--only` takes
the steps of the sections that it names, such as those that were not reached the last time.

`--device cpu --size toy` takes the same way with toys, so that it is known to work before a GPU is there.
Each step, and all of it, then has three times as long, or as many times as `--slower` says.
Exit codes: 0, nothing failed; 1, something did; 3, there is no such device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gpu_bench.commands import LEAST_S, ROOT, SCRIPTS, CommandFailedError, Commands
from gpu_bench.record import Line, document, passed, table
from gpu_bench.steps import SECTIONS, Machine, Step, steps_of, taken

from spindle_cli.files.writing import write_text

FAILED, NO_DEVICE = 1, 3
TRACE = "trace.json.gz"
# Limits are those of a machine with a GPU; on others commands have so many times as long.
BUDGET_S, SLOWER = 540.0, {"cuda": 1.0, "cpu": 3.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at everything; the exit code."""
    asked = _parse(arguments)
    _find_ours()
    output = asked.output.absolute()
    slower = SLOWER[asked.device] if asked.slower is None else asked.slower
    commands = Commands(slower * BUDGET_S if asked.budget is None else asked.budget)
    try:
        machine = Machine.read(commands.python("-m", "gpu_bench.machine", "describe", asked.device))
    except CommandFailedError as error:
        if error.code != NO_DEVICE:
            raise
        print("gpu-check: there is no GPU here: torch finds no CUDA device. Nothing was looked at.")
        print("`--device cpu --size toy` takes the same way on the CPU, to see that it works.")
        return NO_DEVICE
    output.mkdir(parents=True, exist_ok=True)
    commands.folder = output
    lines: list[Line] = []
    steps = [
        replace(step, limit_s=slower * step.limit_s)
        for step in steps_of(machine, asked.size, output / TRACE)
        if not asked.only or step.section in asked.only
    ]
    keep = partial(write, output, machine.said, machine.memory_bytes)
    with tempfile.TemporaryDirectory() as scratch:
        for number, step in enumerate(steps):
            for line in taken(commands, Path(scratch), step):
                spent_s = commands.spent_s
                print(f"{spent_s:5.0f} s  {line.section:9} {line.subject}: {line.status}", flush=True)
                lines.append(line)
                keep(spent_s, lines, steps[number:])
            keep(commands.spent_s, lines, steps[number + 1 :])
    print()
    print(table(machine.said, lines))
    print(f"written: {output}")
    return 0 if passed(lines) else FAILED


def write(
    output: Path,
    device: str,
    memory_bytes: int,
    spent_s: float,
    lines: Sequence[Line],
    rest: Sequence[Step],
) -> None:
    """What has been found by now; steps that have not ended are there as such."""
    ahead = [Line(each.section, each.subject, "not reached", "not ended yet", {}) for each in rest]
    everything = [*lines, *ahead]
    write_text(output / "gpu-check.txt", table(device, everything) + "\n")
    found = document(device, memory_bytes, spent_s, everything)
    write_text(output / "gpu-check.json", json.dumps(found, indent=1) + "\n")


def _find_ours() -> None:
    """Let commands find our packages, also where they are not installed."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [str(ROOT / "src"), str(SCRIPTS), *(str(Path(each).absolute()) for each in known if each)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "toy"), default="full")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--slower", type=float, metavar="TIMES", help="3 on a CPU")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=f"{BUDGET_S:.0f} on a GPU")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "gpu-check")
    asked = parser.parse_args(arguments)
    if asked.budget is not None and asked.budget < LEAST_S:
        parser.error(f"--budget {asked.budget:g}: expected {LEAST_S:.0f} seconds or more")
    return asked


if __name__ == "__main__":
    sys.exit(main())
