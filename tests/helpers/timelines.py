"""A measured timeline made from a simulation: every device does what was simulated, by a clock of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spindle_cli.files.runs.records import MeasuredTimeline
from spindle_cli.plan.types import Plan
from spindle_cli.program.link import link
from spindle_cli.runtime.measuring.timeline import LapRow, Offset, Ran, RankStep, StepProgram, make_timeline
from spindle_cli.simulate.run import simulate
from spindle_cli.simulate.types import Simulation


def simulated_timeline(
    plan: Plan, ahead_s: Mapping[int, float], lengths: Sequence[float] = (1.0,)
) -> MeasuredTimeline:
    """Steps of one simulated batch, one after another, each stretched to `lengths` of it.

    `ahead_s`: by how much devices' clocks are ahead of device 0's; the others agree with it.
    """
    simulation = simulate(plan.model_copy(update={"accumulate": 1}))
    devices = range(plan.cluster.num_devices)
    ranks = [_rank(simulation, device, ahead_s.get(device, 0.0), lengths) for device in devices]
    offsets = [Offset(ahead_s.get(device, 0.0), 1e-5 * (device > 0)) for device in devices]
    program = link(plan)
    what = StepProgram(program, range(len(program.slices)))
    return make_timeline(Ran(plan, lambda _: what, program.groups), ranks, offsets)


def _rank(simulation: Simulation, device: int, ahead_s: float, lengths: Sequence[float]) -> list[RankStep]:
    steps = []
    zero_s = 100.0 + ahead_s
    for number, length in enumerate(lengths):
        laps = [
            LapRow(kind, zero_s + start_s * length, zero_s + end_s * length, piece, cause, key, group)
            for kind, start_s, end_s, piece, cause, key, group in _laps(simulation, device)
        ]
        end_s = zero_s + simulation.iteration_s * length
        steps.append(RankStep(number, zero_s, end_s, tuple(laps)))
        zero_s = end_s
    return steps


def _laps(simulation: Simulation, device: int) -> list[tuple[object, ...]]:
    spans = [
        (s.activity.value, s.start_s, s.end_s, s.slice_index, None, None, None)
        for s in simulation.spans
        if s.device == device
    ]
    sent = [
        ("send", p.posted_s, p.posted_s, None, None, p.key, None)
        for p in simulation.passages
        if p.source == device
    ]
    sums = [
        ("sum", s.start_s, s.end_s, None, None, None, s.group) for s in simulation.sums if device in s.devices
    ]
    waits = [
        ("wait", w.start_s, w.end_s, w.slice_index, "sum", None, None)
        for w in simulation.waits
        if w.device == device
    ]
    steps = [
        ("optimizer", s.start_s, s.end_s, None, None, None, None)
        for s in simulation.steps
        if s.device == device and s.end_s > s.start_s
    ]
    return [*spans, *steps, *sent, *sums, *waits, ("wait", 0.0, 1e-6, None, "losses", None, None)]
