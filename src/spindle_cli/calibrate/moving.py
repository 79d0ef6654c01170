"""How long messages and sums took over a run's links, from the last steps that it has kept.

A message counts where its taker was waiting already when it was posted: else nobody saw it arrive. A sum or
gather counts where the run has noted when it ended (`launch --trace`), from when all its devices had posted
it and were through with those before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from spindle_cli.account.step_end import together_s
from spindle_cli.account.traffic import Traffic
from spindle_cli.account.types import Collective
from spindle_cli.calibrate.reading import Run
from spindle_cli.calibrate.times.curves import EQUAL
from spindle_cli.costs.links import per_node, transfer_s
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.runs.records import MeasuredSpan, MeasuredStep, MeasuredTimeline

INTRA, INTER = "intra_node", "inter_node"
_Port = tuple[object, ...]


@dataclass(frozen=True)
class Moved:
    """Messages, or collectives, over one kind of link: how many were seen, and their seconds together."""

    count: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0

    def __add__(self, more: Moved) -> Moved:
        return Moved(
            self.count + more.count,
            self.predicted_s + more.predicted_s,
            self.measured_s + more.measured_s,
        )

    @property
    def times(self) -> float | None:
        """Measured over predicted; None where nothing was seen."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 and self.measured_s > 0 else None


def moved_in(run: Run, traffic: Traffic, cluster: Cluster) -> dict[tuple[str, str], Moved]:
    """Return all that was seen to move, by kind of link and what moved ("messages", "sums").

    Args:
        traffic: of the run's plan.
        cluster: the plan's, or with other links, by which to predict.
    """
    seen = {
        "messages": messages_seen(run, traffic, cluster),
        "sums": sums_seen(run, traffic, cluster),
    }
    return {
        (kind, what): moved
        for what, by_link in seen.items()
        for kind, moved in by_link.items()
        if moved.count
    }


def messages_seen(run: Run, traffic: Traffic, cluster: Cluster) -> Mapping[str, Moved]:
    """Return the messages that were seen to arrive, by kind of link."""
    total = {INTRA: Moved(), INTER: Moved()}
    for step in _steps(run.timeline):
        for kind, moved in _messages_of(step, run, _gathered(traffic), cluster):
            total[kind] += moved
    return total


def sums_seen(run: Run, traffic: Traffic, cluster: Cluster) -> Mapping[str, Moved]:
    """Return the sums and gathers that were noted, by kind of link (the slower one that its devices use)."""
    total = {INTRA: Moved(), INTER: Moved()}
    for step in _steps(run.timeline):
        for kind, moved in _sums_of(step, traffic, cluster):
            total[kind] += moved
    return total


def times_of_links(moved: Mapping[tuple[str, str], Moved]) -> dict[str, float]:
    """Return how many times as long as predicted all took that moved, by kind of link."""
    of_kind: dict[str, Moved] = {}
    for (kind, _), of_traffic in sorted(moved.items()):
        of_kind[kind] = of_kind.get(kind, Moved()) + of_traffic
    return {
        kind: 1.0 if abs(times - 1.0) <= EQUAL else times
        for kind, of_traffic in of_kind.items()
        if (times := of_traffic.times) is not None
    }


def _steps(timeline: MeasuredTimeline | None) -> tuple[MeasuredStep, ...]:
    return () if timeline is None else timeline.steps


def _gathered(traffic: Traffic) -> frozenset[int]:
    """Slices whose waits may be for new values of their parameters."""
    groups = [collective.group for collective in traffic.collectives if collective.kind is Collective.GATHER]
    return frozenset(index for group in groups if group is not None for index in traffic.groups[group].slices)


@dataclass(frozen=True)
class _Message:
    """A message under way: from a device to another, for a slice to run in a direction."""

    source: int
    taker: int
    slice: int
    is_gradient: bool
    posted_s: float
    num_bytes: int


def _messages_of(
    step: MeasuredStep, run: Run, gathered: frozenset[int], cluster: Cluster
) -> Iterator[tuple[str, Moved]]:
    error_s = 0.0 if run.timeline is None else run.timeline.clock_error_s
    expected_s: dict[tuple[int, int, bool], tuple[_Message, float]] = {}
    for message, arrives_s in _arrivals(step, cluster):
        expected_s[message.taker, message.slice, message.is_gradient] = (message, arrives_s)
    for (taker, index, is_gradient), (last, arrives_s) in expected_s.items():
        if not is_gradient and index in gathered:
            continue
        cause = "gradient" if is_gradient else "activation"
        for span in step.devices[taker]:
            waits = (span.kind, span.slice, span.cause) == ("wait", index, cause)
            took_s = span.end_s - last.posted_s
            if waits and span.start_s + error_s <= last.posted_s < span.end_s and took_s > 2 * error_s:
                is_inside = cluster.node_of[last.source] == cluster.node_of[taker]
                yield INTRA if is_inside else INTER, Moved(1, arrives_s - last.posted_s, took_s)


def _arrivals(step: MeasuredStep, cluster: Cluster) -> Iterator[tuple[_Message, float]]:
    """Yield every message in the order in which they were posted, and when it would arrive by the links: a
    device moves one at a time in each direction inside its node, a network card one between nodes.
    """
    free_s: dict[_Port, float] = {}
    for message in sorted(_posted(step), key=lambda message: message.posted_s):
        inside = cluster.node_of[message.source] == cluster.node_of[message.taker]
        source, taker = (end if inside else cluster.card_of[end] for end in (message.source, message.taker))
        ports: tuple[_Port, ...] = (("out", inside, source), ("in", inside, taker))
        link = cluster.link(message.source, message.taker)
        begins_s = max(message.posted_s, *(free_s.get(port, message.posted_s) for port in ports))
        arrives_s = begins_s + transfer_s(message.num_bytes, link)
        free_s.update(dict.fromkeys(ports, arrives_s))
        yield message, arrives_s


def _posted(step: MeasuredStep) -> Iterator[_Message]:
    for device, spans in enumerate(step.devices):
        for span in spans:
            if span.kind == "transfer" and span.num_bytes > 0:
                assert span.slice is not None and span.peer is not None, "a transfer has both"
                yield _Message(device, span.peer, span.slice, span.is_gradient, span.start_s, span.num_bytes)


def _sums_of(step: MeasuredStep, traffic: Traffic, cluster: Cluster) -> Iterator[tuple[str, Moved]]:
    spans = _collective_spans(step)
    collectives = {
        (collective.kind.value, collective.group): collective for collective in traffic.collectives
    }
    noted = [(collective, spans[key]) for key in spans if (collective := collectives.get(key)) is not None]
    free_s: dict[int, float] = {}
    for collective, of_device in sorted(noted, key=lambda item: _posted_by_all_s(item[1])):
        if set(of_device) != set(collective.devices):
            continue
        ended_s = max(span.end_s for span in of_device.values())
        begins_s = max(
            _posted_by_all_s(of_device), *(free_s.get(device, -inf) for device in collective.devices)
        )
        free_s.update(dict.fromkeys(collective.devices, ended_s))
        spread = per_node(collective.devices, cluster)
        predicted_s = together_s(collective, spread, cluster)
        if ended_s > begins_s:
            yield INTER if len(spread.counts) > 1 else INTRA, Moved(1, predicted_s, ended_s - begins_s)


def _collective_spans(step: MeasuredStep) -> dict[tuple[str, int], dict[int, MeasuredSpan]]:
    """Return, by kind and parameter group and then by device, the sums and gathers that a step noted."""
    spans: dict[tuple[str, int], dict[int, MeasuredSpan]] = {}
    for device, device_spans in enumerate(step.devices):
        for span in device_spans:
            if span.kind in ("sum", "gather") and span.group is not None:
                spans.setdefault((span.kind, span.group), {})[device] = span
    return spans


def _posted_by_all_s(of_device: Mapping[int, MeasuredSpan]) -> float:
    return max(span.start_s for span in of_device.values())
