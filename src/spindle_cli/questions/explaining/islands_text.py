"""What islands would take with other settings, for people."""

from __future__ import annotations

from rich import box
from rich.table import Table

from spindle_cli.plan.islands.other_settings import OtherSettings, OuterSteps
from spindle_cli.units import format_bytes, format_seconds


def islands_table(found: OtherSettings | None) -> Table | str:
    """A row for each number of steps between outer steps, and columns for each number of bits; the plan's
    are marked.
    """
    if found is None:
        return ""
    sums = "summing in every step" if found.without_s is not None else "an outer step after every step"
    table = Table(
        title=f"outer steps of {found.islands} islands: what an iteration takes in the mean, what a device "
        f"sends in it at most, and what it saves against {sums}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("every", *(n for own in found.of_bits for n in (f"{own.bits} bits", "sends", "saves"))):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for rows in zip(*(own.steps for own in found.of_bits), strict=True):
        every = rows[0].every
        mark = f"<- the plan, in {found.bits} bits" if every == found.every else ""
        table.add_row(str(every), *(cell for row in rows for cell in _cells(row)), mark)
    return table


def _cells(row: OuterSteps) -> tuple[str, str, str]:
    saved_s = row.saved_to_every_step_s if row.saved_s is None else row.saved_s
    return format_seconds(row.iteration_s), format_bytes(row.bytes_per_iteration), format_seconds(saved_s)


def islands_text(found: OtherSettings | None) -> str:
    """From where on islands save time, and who says these settings."""
    if found is None:
        return ""
    inner = f"an iteration takes {format_seconds(found.inner_s)} without outer steps"
    if found.without_s is None:
        lines = [f"{inner}; with gradients summed over all devices in every step there is no plan"]
    else:
        lines = [f"{inner}, {format_seconds(found.without_s)} with gradients summed over all devices"]
        lines += [_from(found)]
    lines.append(
        "`every` and `bits` are part of what is trained, so the workload file says them (train.local_sgd); "
        "`steps` and `eval_every` are multiples of `every`"
    )
    return "\n".join(lines)


def _from(found: OtherSettings) -> str:
    """From which `every` on each number of bits saves time."""
    known = [f"{own.saves_from} in {own.bits} bits" for own in found.of_bits if own.saves_from is not None]
    if not known:
        return "islands save no time, however seldom they average"
    return f"islands save time if `every` is at least {', '.join(known)}"
