"""Which nodes a piece takes its devices from: one after another, as the rule says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from candidates import candidate_of, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import cluster_of, metaop_of
from spindle_cli.plan.placing.placement import PlacementWeights, _Placing
from spindle_cli.plan.placing.usage import Usage

PER_NODE, NODES = 4, 5
NUM_DEVICES = PER_NODE * NODES


def placing() -> _Placing:
    problem = problem_of(cluster_of(NUM_DEVICES, devices_per_node=PER_NODE), metaop_of("a/m", 1, {1: 1.0}))
    candidate = candidate_of(problem, (0, 0, 1, 1, 0.0))
    return _Placing(problem, candidate, PlacementWeights(), Usage([10**12] * NUM_DEVICES))


def by_the_rule(free: Sequence[int], num_devices: int, tp: int, value: Mapping[int, float]) -> list[int]:
    """Of what is left always a node that has all that is missing, if there is one; of these, or of all, the
    one whose devices are worth most; of equals the tightest that has all, or the fullest; then the first.
    """
    left = {
        node: sorted((d for d in free if d // PER_NODE == node), key=lambda d: -value[d])
        for node in range(NODES)
    }
    chosen: list[int] = []
    while len(chosen) < num_devices:
        missing = num_devices - len(chosen)
        ranks = {}
        for node, devices in left.items():
            usable = len(devices) // tp * tp
            worth = sum(value[d] for d in devices[: min(usable, missing)])
            ranks[node] = (usable >= missing, worth, -len(devices) if usable >= missing else usable, -node)
        node = max(left, key=lambda each: ranks[each])
        devices = left.pop(node)
        chosen += devices[: min(missing, len(devices) // tp * tp)]
    return chosen


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_nodes_are_taken_as_if_each_was_compared_with_all_that_are_left(seed: int) -> None:
    random = Random(seed)
    for tp in (1, 2):
        free = sorted(random.sample(range(NUM_DEVICES), random.randint(2 * NODES, NUM_DEVICES)))
        groups = sum(sum(d // PER_NODE == node for d in free) // tp for node in range(NODES))
        # Worth differs from device to device, as rows of equals are another rule's.
        order = random.sample(range(NUM_DEVICES), NUM_DEVICES)
        value = {d: 2.0 ** order[d] for d in range(NUM_DEVICES)}
        for num_devices in range(tp, tp * groups + 1, tp):
            found = placing()._choose(free, num_devices, tp, value, ())
            assert found == by_the_rule(free, num_devices, tp, value)
