"""Events by time."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.simulate.network import Clock
from spindle_cli.simulate.run import simulate


def test_what_is_no_longer_due_takes_no_time() -> None:
    clock, happened = Clock(), list[str]()
    is_due = {"early": True, "late": True}
    clock.at(2.0, lambda: happened.append("end"))
    clock.at(1.0, lambda: happened.append("early"), lambda: is_due["early"])
    clock.at(3.0, lambda: happened.append("late"), lambda: is_due["late"])
    is_due["late"] = False
    while events := clock.next_moment():
        for event in events:
            event()
    assert (happened, clock.now_s) == (["early", "end"], 2.0)


def test_events_of_one_time_happen_in_the_order_in_which_they_were_set() -> None:
    clock, happened = Clock(), list[int]()
    for number in range(3):
        clock.at(1.0, lambda number=number: happened.append(number))  # type: ignore[misc]
    events = clock.next_moment()
    for event in events:
        event()
    assert (happened, clock.now_s) == ([0, 1, 2], 1.0)
    assert clock.next_moment() == []


def test_a_step_ends_with_what_happens_last_not_when_something_slower_would_have_ended() -> None:
    """Gradients of 0.5 and 5 GB come to device 0 at once, at 5 GB/s: the larger one has half of the port for
    0.2 s, by which it would take 2 s, and then all of it, and takes 1.1 s.
    """
    sources = [
        metaop_of(f"t/{name}", 1, {1: 3e-6}, param_bytes_per_op=0).model_copy(update={"output_bytes": size})
        for name, size in (("small", 5 * 10**8), ("large", 5 * 10**9))
    ]
    takers = [
        metaop_of(f"t/{name}", 1, {1: op_s}, inputs=(source.name,), param_bytes_per_op=0)
        for name, op_s, source in zip("ab", (0.9, 3e-6), sources, strict=True)
    ]
    waves = [
        [slice_of(sources[0], (0, 1), (0,), 0.0)],
        [slice_of(sources[1], (0, 1), (0,), 3e-6)],
        [slice_of(taker, (0, 1), (device,), 6e-6) for device, taker in enumerate(takers, start=1)],
    ]
    simulation = simulate(plan_of(profile_of(*sources, *takers), cluster_of(3, memory_gib=400), waves))
    last = max(simulation.passages, key=lambda passage: passage.end_s)
    assert last.end_s - last.start_s == pytest.approx(1.1, rel=1e-3)
    assert simulation.step_s == pytest.approx(last.end_s, rel=1e-3)
