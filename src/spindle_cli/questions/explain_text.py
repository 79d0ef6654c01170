"""An explanation as text and tables for people."""

from __future__ import annotations

from rich import box
from rich.table import Table

from spindle_cli.questions.explain import Explanation
from spindle_cli.questions.explaining.chain import Cause, Link
from spindle_cli.questions.explaining.worth import Choice, OtherSize, Reason, Worth
from spindle_cli.units import counted, format_seconds

_CAUSES = {
    Cause.START: "starts the chain",
    Cause.INPUT: "waits for its input",
    Cause.OPS: "continues its MetaOp",
    Cause.GRADIENT: "waits for its gradient",
    Cause.FORWARD: "follows its forward pass",
    Cause.DEVICE: "waits for devices",
}


def headline(explanation: Explanation) -> str:
    """What the iteration is made of."""
    e = explanation
    over = e.compute_s / e.lower_bound_s - 1 if e.lower_bound_s else 0.0
    where = "above the lower bound" if over >= 0 else "below the bound of version 1,"
    of_island = f" of each of {e.islands} islands" if e.islands > 1 else ""
    of_set = f", of steps that run {', '.join(e.tasks)}" if e.tasks else ""
    return (
        f"{e.plan}: strategy {e.strategy} on {counted(e.num_devices, 'device')}{of_island}{of_set}\n"
        f"iteration {format_seconds(e.iteration_s)} = schedule {format_seconds(e.compute_s)} + transfers "
        f"{format_seconds(e.transfer_s)} + processor {format_seconds(e.processor_s)} "
        f"+ gradient sums {format_seconds(e.gradient_sum_s)} "
        f"+ optimizer {format_seconds(e.optimizer_s)}"
        + (f" + held up {format_seconds(e.held_up_s)}" if e.held_up_s else "")
        + "\n"
        f"the schedule is {abs(over):.1%} {where} {format_seconds(e.lower_bound_s)}; "
        f"devices are idle for {e.idle.share:.1%} of it"
    )


def chain_table(explanation: Explanation) -> Table:
    """The critical chain, in order."""
    table = _table("critical chain: shorten one of these, or the iteration stays")
    table.add_column("slice")
    for name in ("devices", "start", "end", "takes", "idle before"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why not earlier")
    for link in explanation.chain:
        table.add_row(*_chain_cells(link))
    return table


def _chain_cells(link: Link) -> tuple[str, ...]:
    return (
        f"{link.metaop}[{link.ops[0]}:{link.ops[1]}]{' ' * bool(link.micro_batch)}{link.micro_batch}"
        + (" backward" if link.is_backward else ""),
        str(link.num_devices),
        format_seconds(link.start_s),
        format_seconds(link.end_s),
        format_seconds(link.end_s - link.start_s),
        format_seconds(link.idle_s) if link.idle_s else "",
        _CAUSES[link.cause],
    )


def worth_text(worth: Worth | None) -> str:
    """What binds, and what devices are worth."""
    if worth is None:
        return (
            "what binds, and why each MetaOp got its devices, is in the curves: give --profile PROFILE.json"
        )
    lines = [
        f"what binds: {worth.device_part:.0%} of the lower bound is the number of devices, "
        f"{1 - worth.device_part:.0%} chains of MetaOps that more devices do not shorten",
    ]
    for each in worth.of_types:
        value = format_seconds(each.device_value_s)
        lines.append(f"one more {each.device} is worth {value} of the bound (dual value); solved again:")
        lines.append(f"  {_other(each.more, worth.lower_bound_s)}")
    if not worth.of_types:
        value = format_seconds(worth.device_value_s)
        lines.append(f"one more device is worth {value} of the bound (dual value); solved again:")
    for other in () if worth.of_types else (worth.fewer, worth.more):
        if other is not None:
            lines.append(f"  {_other(other, worth.lower_bound_s)}")
    return "\n".join(lines)


def _other(other: OtherSize, bound_s: float) -> str:
    if other.lower_bound_s is None or other.iteration_s is None:
        return f"{counted(other.num_devices, 'device')}: no plan"
    change_s = other.lower_bound_s - bound_s
    sign = "+" if change_s >= 0 else ""
    return (
        f"{counted(other.num_devices, 'device')}: bound {format_seconds(other.lower_bound_s)} "
        f"({sign}{format_seconds(change_s)}), planned iteration {format_seconds(other.iteration_s)}"
    )


def reason_table(explanation: Explanation) -> Table | str:
    """For each MetaOp, the taken numbers of devices and their neighbours, with what each wastes."""
    if not explanation.reasons:
        return ""
    table = _table("why these devices: each choice at the price that the program puts on seconds and devices")
    table.add_column("MetaOp")
    for name in (
        "critical",
        "devices",
        "one op",
        "device time",
        "wastes",
        "ops in the bound",
        "ops in the plan",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for reason in explanation.reasons:
        for position, choice in enumerate(_shown(reason)):
            name = reason.metaop if position == 0 else ""
            critical = (f"{reason.critical:.2f}" if reason.critical else "no") if position == 0 else ""
            table.add_row(name, critical, *_choice_cells(choice))
    return table


def _choice_cells(choice: Choice) -> tuple[str, ...]:
    return (
        str(choice.num_devices),
        format_seconds(choice.op_s),
        format_seconds(choice.device_s),
        f"{choice.priced:.1%}",
        f"{choice.bound_ops:.3g}" if choice.bound_ops else "",
        str(choice.plan_ops) if choice.plan_ops else "",
    )


def _shown(reason: Reason) -> list[Choice]:
    """The choices that are taken by the bound or the plan, and those next to them."""
    taken = [i for i, choice in enumerate(reason.choices) if choice.bound_ops or choice.plan_ops]
    near = {i + step for i in taken for step in (-1, 0, 1)}
    return [choice for i, choice in enumerate(reason.choices) if i in near]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
