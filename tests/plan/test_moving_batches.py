"""How long a batch takes from one layout to another, by hand."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of
from spindle_cli.account.activations import Layout
from spindle_cli.plan.search.spread import moving_s

MB = 10**6
# 20 us and 1 GB/s between nodes, 10 us and 5 GB/s inside.
HALF_S, HALF_INSIDE_S = 20e-6 + 0.5e-3, 10e-6 + 0.1e-3


def layout(*devices: int) -> Layout:
    return Layout(devices, len(devices), 1, 8)


@pytest.mark.parametrize(("cards", "messages"), [(1, 2), (2, 1)])
def test_devices_of_a_node_share_its_cards(cards: int, messages: int) -> None:
    cluster = cluster_of(4, devices_per_node=2)
    cluster = cluster.changed(
        nodes=tuple(group.model_copy(update={"nics": cards}) for group in cluster.nodes)
    )
    assert moving_s([(layout(0, 1), layout(2, 3), MB)], cluster) == pytest.approx(messages * HALF_S)


def test_inside_a_node_each_device_has_its_own_way_and_the_busiest_counts() -> None:
    cluster = cluster_of(3)
    assert moving_s([(layout(0), layout(0, 1), MB)], cluster) == pytest.approx(HALF_INSIDE_S)
    both = [(layout(0), layout(0, 1), MB), (layout(0), layout(0, 2), MB)]
    assert moving_s(both, cluster) == pytest.approx(2 * HALF_INSIDE_S)
    apart = [(layout(0), layout(0, 1), MB), (layout(1), layout(1, 2), MB)]
    assert moving_s(apart, cluster) == pytest.approx(HALF_INSIDE_S)
    assert moving_s([(layout(0, 1), layout(0, 1), MB)], cluster) == 0.0


def test_halves_that_cross_nodes_are_gathered_behind_the_sends() -> None:
    """Two tensor-parallel devices of another node are sent half each, and hand it to each other inside."""
    split = Layout((2, 3), 1, 2, 8)
    moved_s = moving_s([(layout(0), split, MB)], cluster_of(4, devices_per_node=2))
    assert moved_s == pytest.approx(2 * HALF_S + HALF_INSIDE_S)
