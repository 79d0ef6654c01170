"""Why a plan is as long as it is, and why each MetaOp got its devices: the answer, and how it is printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from rich import box
from rich.table import Table

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.plan.islands.said import OtherSettings, OuterSteps, other_settings
from spindle_cli.plan.reasons import (
    Choice,
    OnTypes,
    Reason,
    Taken,
    TypeReason,
    TypeReasons,
    TypeShares,
    reasons,
    type_reasons,
)
from spindle_cli.plan.types import Plan, bounds_of_any_cut, describe_bounds
from spindle_cli.profile.types import Profile
from spindle_cli.questions.critical import Cause, Link, OtherSize, Worth, critical_chain, worth_of
from spindle_cli.units import counted, format_bytes, format_seconds


class Idle(Model):
    """Device-seconds of the schedule in which no slice runs.

    Attributes:
        device_s: How many.
        share: Their share of all device-seconds of the schedule.
    """

    device_s: float
    share: float


class Explanation(Artifact):
    """The document of `spindle explain --json`.

    Attributes:
        plan: The plan.
        strategy: Its strategy.
        num_devices: Devices of the plan; with islands, of each of them.
        islands: How many islands there are; all else is of one.
        tasks: Where not every step runs all tasks, those of the steps that it is about.
        iteration_s: Seconds of an iteration; the parts below add up to it.
        compute_s: End of the schedule.
        lower_bound_s: Seconds that no schedule can be shorter than.
        lower_bound_any_s: The same however batches are cut, where the plan says it.
        lower_bound_with_memory_s: The same of schedules that fit the devices' memory.
        lower_bound_with_links_s: The same of iterations, with what messages and sums take.
        transfer_s: What transfers add.
        processor_s: What communication and reading take of processors that compute.
        gradient_sum_s: What gradient sums add.
        optimizer_s: What the optimizer's step adds.
        held_up_s: What runs have shown beyond all that.
        idle: Device-seconds in which nothing runs.
        chain: The slices that the end of the schedule waits for, each with what it waited for itself.
        worth: What devices are worth; null without the profile.
        reasons: Why each MetaOp has its devices; empty without the profile.
        type_reasons: Why each MetaOp has its types; null without the profile, and on devices of one type.
        outer_steps: With islands, what outer steps take as they are and otherwise.
    """

    KIND: ClassVar[str] = "explanation"

    schema_: Annotated[Literal["spindle.explanation/1"], Field(alias="schema")] = "spindle.explanation/1"
    plan: str
    strategy: str
    num_devices: int
    islands: int = 1  # each with as many devices; all else is of one
    tasks: tuple[str, ...] = ()
    iteration_s: float
    compute_s: float
    lower_bound_s: float
    lower_bound_any_s: float | None = None
    lower_bound_with_memory_s: float | None = None
    lower_bound_with_links_s: float | None = None
    transfer_s: float
    processor_s: float = 0.0
    gradient_sum_s: float
    optimizer_s: float
    held_up_s: float = 0.0
    idle: Idle
    chain: tuple[Link, ...]
    worth: Worth | None
    reasons: tuple[Reason, ...]
    type_reasons: TypeReasons | None = None
    outer_steps: OtherSettings | None = None


def explain(plan: Plan, profile: Profile | None, *, plan_name: str) -> Explanation:
    """Explain a plan, or that of a set of its tasks (`Plan.set_plans`); with the profile also by the dual
    values of the program.

    Raises:
        InputError: the profile is not the one that the plan was made from.
    """
    if profile is not None and profile.sha256() != plan.profile.sha256:
        raise InputError(
            f"{plan_name}: made from the profile {plan.profile.sha256[:19]}..., "
            f"but the one given is {profile.sha256()[:19]}...",
            hint="Give the profile that the plan was made from, or plan again.",
        )
    profile = None if profile is None else profile.of_an_island()
    tasks = tuple(dict.fromkeys(metaop.task for metaop in plan.metaops)) if plan.turn is not None else ()
    if profile is not None and tasks:
        profile = profile.of_tasks(tasks)
    predicted = plan.predicted
    total_s = plan.cluster.num_devices * predicted.compute_s
    busy_s = sum(len(slice_.devices) * slice_.busy_s for slice_ in plan.slices)
    return Explanation(
        plan=plan_name,
        strategy=plan.strategy,
        num_devices=plan.cluster.num_devices,
        islands=1 if plan.local_sgd is None else plan.local_sgd.islands,
        tasks=tasks,
        iteration_s=predicted.iteration_s,
        compute_s=predicted.compute_s,
        lower_bound_s=predicted.lower_bound_s,
        **bounds_of_any_cut(predicted),
        transfer_s=predicted.transfer_s,
        processor_s=predicted.processor_s,
        gradient_sum_s=predicted.gradient_sum_s,
        optimizer_s=predicted.optimizer_s,
        held_up_s=predicted.held_up_s,
        idle=Idle(device_s=max(0.0, total_s - busy_s), share=max(0.0, 1 - busy_s / total_s)),
        chain=critical_chain(plan),
        worth=None if profile is None else worth_of(plan, profile),
        reasons=() if profile is None else reasons(plan, profile),
        type_reasons=None if profile is None else type_reasons(plan, profile),
        outer_steps=other_settings(plan),
    )


_CAUSES = {
    Cause.START: "starts the chain",
    Cause.INPUT: "waits for its input",
    Cause.OPS: "continues its MetaOp",
    Cause.GRADIENT: "waits for its gradient",
    Cause.FORWARD: "follows its forward pass",
    Cause.DEVICE: "waits for devices",
}
# Of seconds and costs: what differs by less is as fast, or costs as much.
SAME = 1e-6


def headline(explanation: Explanation) -> str:
    """Return what the iteration is made of."""
    e, least = explanation, describe_bounds(explanation)
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
        f"devices are idle for {e.idle.share:.1%} of it" + ("" if least is None else f"\nat least {least}")
    )


def chain_table(explanation: Explanation) -> Table:
    """Return the critical chain, in order."""
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
    """Return what binds, and what devices are worth."""
    if worth is None:
        return (
            "what binds, and why each MetaOp got its devices, is in the curves: give --profile PROFILE.json"
        )
    lines = [
        f"what binds: {worth.device_part:.0%} of the lower bound is the number of devices, "
        f"{1 - worth.device_part:.0%} chains of MetaOps that more devices do not shorten",
    ]
    for of_type in worth.of_types:
        value = format_seconds(of_type.device_value_s)
        lines.append(f"one more {of_type.device} is worth {value} of the bound (dual value); solved again:")
        lines.append(f"  {_other(of_type.more, worth.lower_bound_s)}")
    if not worth.of_types:
        value = format_seconds(worth.device_value_s)
        lines.append(f"one more device is worth {value} of the bound (dual value); solved again:")
    for size in () if worth.of_types else (worth.fewer, worth.more):
        if size is not None:
            lines.append(f"  {_other(size, worth.lower_bound_s)}")
    return "\n".join(lines)


def _other(size: OtherSize, bound_s: float) -> str:
    if size.lower_bound_s is None or size.iteration_s is None:
        return f"{counted(size.num_devices, 'device')}: no plan"
    change_s = size.lower_bound_s - bound_s
    sign = "+" if change_s >= 0 else ""
    return (
        f"{counted(size.num_devices, 'device')}: bound {format_seconds(size.lower_bound_s)} "
        f"({sign}{format_seconds(change_s)}), planned iteration {format_seconds(size.iteration_s)}"
    )


def reason_table(explanation: Explanation) -> Table | str:
    """Make a table of each MetaOp's taken numbers of devices and their neighbours, with what each wastes."""
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
    """Return the choices that are taken by the bound or the plan, and those next to them."""
    taken = [i for i, choice in enumerate(reason.choices) if choice.bound_ops or choice.plan_ops]
    near = {i + step for i in taken for step in (-1, 0, 1)}
    return [choice for i, choice in enumerate(reason.choices) if i in near]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def islands_table(settings: OtherSettings | None) -> Table | str:
    """Return a row for each number of steps between outer steps, and columns for each number of bits; the
    plan's are marked.
    """
    if settings is None:
        return ""
    sums = "summing in every step" if settings.without_s is not None else "an outer step after every step"
    table = Table(
        title=f"outer steps of {settings.islands} islands: what an iteration takes in the mean, what a "
        f"device sends in it at most, and what it saves against {sums}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in (
        "every",
        *(n for of_bits in settings.of_bits for n in (f"{of_bits.bits} bits", "sends", "saves")),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for rows in zip(*(of_bits.steps for of_bits in settings.of_bits), strict=True):
        every = rows[0].every
        mark = f"<- the plan, in {settings.bits} bits" if every == settings.every else ""
        table.add_row(str(every), *(cell for row in rows for cell in _cells(row)), mark)
    return table


def _cells(row: OuterSteps) -> tuple[str, str, str]:
    saved_s = row.saved_to_every_step_s if row.saved_s is None else row.saved_s
    return format_seconds(row.iteration_s), format_bytes(row.bytes_per_iteration), format_seconds(saved_s)


def islands_text(settings: OtherSettings | None) -> str:
    """Say from where on islands save time, and what says these settings."""
    if settings is None:
        return ""
    inner = f"an iteration takes {format_seconds(settings.inner_s)} without outer steps"
    if settings.without_s is None:
        lines = [f"{inner}; with gradients summed over all devices in every step there is no plan"]
    else:
        lines = [f"{inner}, {format_seconds(settings.without_s)} with gradients summed over all devices"]
        lines += [_from(settings)]
    lines.append(
        "`every` and `bits` are part of what is trained, so the workload file says them (train.local_sgd); "
        "`steps` and `eval_every` are multiples of `every`"
    )
    return "\n".join(lines)


def _from(settings: OtherSettings) -> str:
    """Say from which `every` on each number of bits saves time."""
    from_which = [
        f"{of_bits.saves_from} in {of_bits.bits} bits"
        for of_bits in settings.of_bits
        if of_bits.saves_from is not None
    ]
    if not from_which:
        return "islands save no time, however seldom they average"
    return f"islands save time if `every` is at least {', '.join(from_which)}"


def type_reasons_text(type_reasons: TypeReasons | None) -> str:
    """Return a heading with what types are worth, and the lines of each MetaOp."""
    if type_reasons is None:
        return ""
    lines = [f"why these types: {_worths(type_reasons.prices)}"]
    lines += ["'wastes' is what an op costs by these prices over the cheapest allocation"]
    for reason in type_reasons.metaops:
        lines += _lines(reason)
    return "\n".join(lines)


def _worths(prices: Mapping[str, float]) -> str:
    """Return what a second of each type is worth, in seconds of the one that is worth least but something."""
    priced = {kind: price for kind, price in prices.items() if price > 0}
    if not priced:
        return "by the program's prices no device is worth anything: chains of MetaOps hold up all"
    unit = min(priced, key=lambda kind: priced[kind])
    worth = [
        f"of {kind} {priced[kind] / priced[unit]:.3g}" if kind in priced else f"of {kind} nothing"
        for kind in prices
        if kind != unit
    ]
    return f"by the program's prices a second of {unit} is worth 1, {', '.join(worth)}"


def _lines(reason: TypeReason) -> Iterator[str]:
    taken, *others = reason.in_plan
    critical = f" (critical {reason.critical:.2f})" if reason.critical else ""
    yield f"{reason.metaop}{critical}: {_ops(taken, reason)}"
    if reason.shares_out:
        yield "    its devices share out its parameters, so it cannot run on others alone"
    instead = _instead(taken, reason)
    if instead:
        yield f"    instead {instead}"
    yield f"    {_shares(taken, reason)}{_one_more(taken)}"
    for further in others:
        yield f"    also {_ops(further, reason)}; {_shares(further, reason)}"


def _ops(taken: Taken, reason: TypeReason) -> str:
    ops = f"{taken.ops:.3g} of {reason.num_ops} ops"
    return f"{ops} on {on_types(taken)} in {format_seconds(taken.op_s)} each, wastes {taken.priced:.1%}"


def _instead(taken: Taken, reason: TypeReason) -> str:
    """Return the allocations that it is compared with, each once, with how many times as long an op takes."""
    named = [("on", alone) for alone in taken.alone]
    if reason.fastest.op_s < taken.op_s * (1 - SAME):
        named.append(("fastest on", reason.fastest))
    if reason.cheapest.priced < taken.priced - SAME:
        named.append(("wasting least on", reason.cheapest))
    once = {(*allocation.of_types.items(), allocation.tp): (name, allocation) for name, allocation in named}
    return "; ".join(
        f"{name} {on_types(allocation)} {format_seconds(allocation.op_s)} "
        f"({allocation.op_s / taken.op_s:.3g}x), wastes {allocation.priced:.1%}"
        for name, allocation in once.values()
    )


def _shares(taken: Taken, reason: TypeReason) -> str:
    """Say which shares are whose, how far apart they end, and whether another cut would end earlier."""
    of = " of a micro-batch" if reason.micro_batches > 1 else ""
    seconds = [share.share_s for share in taken.shares]
    listed = ", ".join(map(_share, taken.shares))
    if max(seconds) - min(seconds) <= SAME * max(seconds):
        return f"shares{of}: {listed}" + (", end together" if len(seconds) > 1 else "")
    if taken.best_cut_s is None:
        best = ""
    elif taken.best_cut_s < taken.op_s * (1 - SAME):
        best = f"; the best cut takes {format_seconds(taken.best_cut_s)}"
    else:
        best = ", and no cut of whole samples ends earlier"
    apart = 1 - min(seconds) / max(seconds)
    return f"shares{of}: {listed}, the first through {apart:.1%} before the last{best}"


def _share(share: TypeShares) -> str:
    samples = f"{share.samples} sample{'s' * (share.samples != 1)}"
    return f"{share.num_shares} x {samples} on {share.device} {format_seconds(share.share_s)}"


def _one_more(taken: Taken) -> str:
    """Return what one more share on each type would bring; types that bring the same together."""
    one = f"{taken.tp} more" if taken.tp > 1 else "one more"
    kinds: dict[str, list[str]] = {}
    for more in taken.one_more:
        kinds.setdefault(_brings(taken, more.op_s), []).append(more.device)
    return "".join(f"; {one} {' or '.join(devices)}: {brings}" for brings, devices in kinds.items())


def _brings(taken: Taken, op_s: float | None) -> str:
    if op_s is None:
        is_full = all(share.samples == 1 for share in taken.shares)
        return "no sample is left for it" if is_full else "not known"
    if op_s < taken.op_s * (1 - SAME):
        return f"{format_seconds(op_s)} ({op_s / taken.op_s - 1:.1%})"
    return "no faster"


def on_types(allocation: OnTypes) -> str:
    """'4 h800-80gb + 8 h20-96gb', and of how many a share is."""
    devices = " + ".join(f"{count} {kind}" for kind, count in allocation.of_types.items())
    return f"{devices} (tp {allocation.tp})" if allocation.tp > 1 else devices
