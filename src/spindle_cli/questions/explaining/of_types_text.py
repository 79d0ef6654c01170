"""Why each MetaOp got its types of device, for people: three lines or so for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spindle_cli.questions.explaining.of_types import OnTypes, Taken, TypeReason, TypeReasons, TypeShares
from spindle_cli.units import format_seconds

# Of seconds and costs: what differs by less is as fast, or costs as much.
SAME = 1e-6


def type_reasons_text(found: TypeReasons | None) -> str:
    """A heading with what types are worth, and the lines of each MetaOp."""
    if found is None:
        return ""
    lines = [f"why these types: {_worths(found.prices)}"]
    lines += ["'wastes' is what an op costs by these prices over the cheapest allocation"]
    for reason in found.metaops:
        lines += _lines(reason)
    return "\n".join(lines)


def _worths(prices: Mapping[str, float]) -> str:
    """What a second of each type is worth, in seconds of the one that is worth least but something."""
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
    for other in others:
        yield f"    also {_ops(other, reason)}; {_shares(other, reason)}"


def _ops(taken: Taken, reason: TypeReason) -> str:
    ops = f"{taken.ops:.3g} of {reason.num_ops} ops"
    return f"{ops} on {on_types(taken)} in {format_seconds(taken.op_s)} each, wastes {taken.priced:.1%}"


def _instead(taken: Taken, reason: TypeReason) -> str:
    """The allocations that it is compared with, each once, with how many times as long an op takes."""
    named = [("on", alone) for alone in taken.alone]
    if reason.fastest.op_s < taken.op_s * (1 - SAME):
        named.append(("fastest on", reason.fastest))
    if reason.cheapest.priced < taken.priced - SAME:
        named.append(("wasting least on", reason.cheapest))
    once = {(*each.of_types.items(), each.tp): (name, each) for name, each in named}
    return "; ".join(
        f"{name} {on_types(each)} {format_seconds(each.op_s)} ({each.op_s / taken.op_s:.3g}x), "
        f"wastes {each.priced:.1%}"
        for name, each in once.values()
    )


def _shares(taken: Taken, reason: TypeReason) -> str:
    """Which shares are whose, how far apart they end, and whether another cut would end earlier."""
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
    """What one more share on each type would bring; types that bring the same together."""
    one = f"{taken.tp} more" if taken.tp > 1 else "one more"
    kinds: dict[str, list[str]] = {}
    for more in taken.one_more:
        kinds.setdefault(_brings(taken, more.op_s), []).append(more.device)
    return "".join(f"; {one} {' or '.join(own)}: {brings}" for brings, own in kinds.items())


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
