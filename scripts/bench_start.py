"""Memory that workers take until they could train, with parameters whole on every device and shared out.

    python scripts/bench_start.py [--devices N] [--workloads NAME ...] [--variants NAME ...]

Starts N processes of this machine and reads how much their resident memory grows at most (Linux). Profiles
are estimated. Prints a table; the parameters' own bytes are for one device that holds all of them.
"""

from __future__ import annotations

from memory_bench.alone import Told, measured, parser, print_table

from spindle_cli.costs.memory import op_param_bytes, parameter_block
from spindle_cli.profile.types import Profile
from spindle_cli.units import MIB

NAMES = ("as it is", "gradients shared out", "parameters shared out")
COLUMNS = ("workload", "devices", "variant", "parameters, MiB", "at most until a step could begin, MiB")


def main() -> None:
    """Parse, measure, print."""
    made = parser(__doc__, devices=2, workloads=("llama-laptop", "llama-300m"), variants=NAMES)
    print_table(COLUMNS, map(row, measured(made.parse_args(), "start", steps=1)))


def row(told: Told) -> tuple[object, ...]:
    """Of the rank that takes most."""
    taken = max(peak for (peak,) in told.numbers)
    sizes = [f"{size / MIB:.0f}" for size in (parameter_bytes(told.profile), taken)]
    return told.workload, told.plan.cluster.num_devices, told.variant, *sizes


def parameter_bytes(profile: Profile) -> int:
    """Of all parameters, each once."""
    found: dict[tuple[str, int], int] = {}
    for metaop in profile.metaops:
        for op in range(metaop.num_ops):
            block = parameter_block(metaop, op)
            found[block] = max(found.get(block, 0), op_param_bytes(metaop, op))
    return sum(found.values())


if __name__ == "__main__":
    main()
