"""What a dispatch over several types takes, worked out by hand: by prices that change, and at the boundary of
what widening may cost.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spindle_cli.plan.mixed.dispatch import WIDEN_COST, MixedDispatcher, MixedGuide

Allocation = tuple[tuple[int, int], float]  # devices of each type, seconds of an op


def dispatcher_of(*allocations: Allocation) -> MixedDispatcher:
    """Of one MetaOp with one op, on a device of each type, a second of either worth the same; 2 s of the
    iteration are for it.
    """
    points = [SimpleNamespace(counts=counts, op_s=op_s) for counts, op_s in allocations]
    node = SimpleNamespace(index=0, num_ops=1, inputs=(), consumers=(), points=points)
    cluster = SimpleNamespace(types=("fast", "slow"), num_of_type={"fast": 1, "slow": 1})
    problem = SimpleNamespace(nodes=[node], order=(0,), cluster=cluster)
    bound = SimpleNamespace(prices=(1.0, 1.0), op_s=(2.0,), lower_bound_s=2.0)
    return MixedDispatcher(problem, bound)  # type: ignore[arg-type]  # stand-ins


def taken(dispatcher: MixedDispatcher, prices: tuple[float, float] = (1.0, 1.0)) -> int:
    """Which of its allocations the MetaOp runs on."""
    ((_, point, _), _, _), *others = dispatcher.run(MixedGuide(0.0, 2.0, (1.0,), (1.0,), prices))[0]
    assert not others
    return point


def test_other_prices_choose_again_among_the_same_allocations() -> None:
    dispatcher = dispatcher_of(((1, 0), 2.0), ((0, 1), 2.0))
    assert [taken(dispatcher, prices) for prices in ((1.0, 2.0), (2.0, 1.0), (1.0, 2.0))] == [0, 1, 0]


@pytest.mark.parametrize(("op_s", "is_widened"), [(1.5, True), (1.5001, False), (1.4999, True)])
def test_idle_devices_are_taken_for_half_as_much_again_and_no_more(op_s: float, is_widened: bool) -> None:
    """One device is in time, for 2 device-seconds; two cost 3 where they take 1.5 s."""
    assert WIDEN_COST == 1.5
    assert taken(dispatcher_of(((1, 0), 2.0), ((1, 1), op_s))) == int(is_widened)
