"""Even shares, and shares by peaks: of which devices, and by which peaks."""

from __future__ import annotations

import pytest

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.plan.make import make_plan


@pytest.mark.parametrize(
    ("counts", "devices"), [({"fast": 1, "slow": 3}, (0, 1, 2)), ({"fast": 3, "slow": 1}, (0, 1, 3))]
)
def test_of_fewer_samples_than_devices_the_type_with_most_devices_leaves_some_out(
    counts: dict[str, int], devices: tuple[int, ...]
) -> None:
    net = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 1.0 + 1e-9}, batch_size=3)
    plan = make_plan(profile_on_types(net), cluster_of_types(counts), "dp-even")
    assert [piece.devices for piece in plan.slices] == [devices]


def test_a_peak_that_the_cluster_file_gives_goes_before_the_published_one() -> None:
    """As fast as each other, 3.44 times by what is published."""
    net = metaop_on_types("t/net", 1, {"h100-80gb": 1.0, "a100-80gb": 1.0 + 1e-9}, batch_size=24)
    cluster = cluster_of_types({"h100-80gb": 1, "a100-80gb": 1})
    groups = tuple(group.model_copy(update={"peak_tflops": 30.0}) for group in cluster.nodes)
    plan = make_plan(profile_on_types(net), cluster.changed(nodes=groups), "dp-flops")
    assert [(piece.dp, piece.rows) for piece in plan.slices] == [(2, None)]
