"""Resident memory of workers that share out a model, against what the account says that they take.

    python scripts/bench_resident.py [--devices N] [--workloads NAME ...] [--variants NAME ...] [--steps N]

Trains in N processes of this machine and reads how much their resident memory grows at most (Linux), from
when they have joined each other: what torch and Python take before is not counted, nor are files that are
mapped (libraries' code, which processes share); everything else is.
Profiles are estimated, so sizes are exact and times are not. Prints a table.
"""

from __future__ import annotations

from memory_bench.alone import Told, measured, parser, print_table

from spindle_cli.units import MIB

NAMES = ("parameters shared out",)
COLUMNS = (
    "workload",
    "devices",
    "variant",
    "predicted, MiB",
    "until a step could begin",
    "in training",
    "measured / predicted",
)


def main() -> None:
    """Parse, measure, print."""
    made = parser(__doc__, devices=4, workloads=("llama-300m",), variants=NAMES)
    made.add_argument("--steps", type=int, default=2, metavar="N")
    asked = made.parse_args()
    print_table(COLUMNS, map(row, measured(asked, "resident", steps=asked.steps)))


def row(told: Told) -> tuple[object, ...]:
    """Of the rank that takes most of what is said of it."""
    found = [
        (max(peaks) / predicted, predicted, peaks[0], max(peaks[1:]))
        for predicted, peaks in zip(told.plan.predicted.peak_memory_bytes, told.numbers, strict=True)
    ]
    ratio, *sizes = max(found)
    shown = [f"{size / MIB:.0f}" for size in sizes]
    return told.workload, told.plan.cluster.num_devices, told.variant, *shown, f"{ratio:.3f}"


if __name__ == "__main__":
    main()
