"""What is tried where nothing fits, each change as it is, and what is said of the device that lacks least."""

from __future__ import annotations

import re

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import NodeGroup
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.no_fit import (
    _more_memory,
    _more_nodes,
    _smaller_batches,
    _tensor_parallelism,
)
from spindle_cli.profile.types import CurvePoint, OpMemory

GIB = 2**30


def test_up_to_eight_times_the_nodes_are_tried_more_of_the_last_kind() -> None:
    groups = (
        NodeGroup(count=1, devices=4, device="cpu", memory_gib=4),
        NodeGroup(count=2, devices=2, device="cpu", memory_gib=8),
    )
    cluster = cluster_of(4).model_copy(update={"nodes": groups, "backend": "gloo"})
    found = list(_more_nodes(profile_of(metaop_of("a/m", 1, {1: 1.0})), cluster))
    assert [change.cluster.nodes[-1].count for change in found] == [5, 8, 11, 17, 23]
    assert [change.cluster.nodes[0] for change in found] == [groups[0]] * 5
    assert found[0].words == "14 devices instead of 8"
    assert found[0].cluster.talks_by == "gloo"


def test_up_to_eight_times_the_memory_is_tried_in_every_node() -> None:
    groups = (
        NodeGroup(count=1, devices=1, device="cpu", memory_gib=4),
        NodeGroup(count=1, devices=1, device="cpu", memory_gib=8),
    )
    cluster = cluster_of(2).model_copy(update={"nodes": groups})
    found = list(_more_memory(profile_of(metaop_of("a/m", 1, {1: 1.0})), cluster))
    sizes = [[group.memory_gib for group in change.cluster.nodes] for change in found]
    assert sizes == [[4 * times, 8 * times] for times in (1.25, 1.5, 2, 3, 4, 6, 8)]
    assert [change.words for change in found][:2] == ["devices of 10 GiB", "devices of 12 GiB"]
    small = list(_more_memory(profile_of(metaop_of("a/m", 1, {1: 1.0})), cluster_of(2, memory_gib=0.05)))
    assert small[0].words == "devices of 0.0625 GiB"


def test_a_smaller_batch_takes_less_of_everything_and_only_shares_that_divide_it() -> None:
    memory = OpMemory(
        first_op=0,
        tp=1,
        kept_bytes=(1, 80),
        forward_bytes=(2, 160),
        backward_bytes=(3, 240),
        first_backward_bytes=(4, 320),
    )
    net = metaop_of(
        "a/m",
        1,
        {1: 3.0, 2: 2.0, 4: 1.0},
        batch_size=4,
        activation_bytes_per_op=100,
        field_bytes={0: 40},
        inner_output_bytes=60,
        memory=(memory,),
    )
    plain = metaop_of("b/m", 1, {1: 3.0}, batch_size=8)
    half, quarter = _smaller_batches(profile_of(net, plain), cluster_of(4))
    assert (half.words, quarter.words) == ("1/2 of every batch", "1/4 of every batch")
    found = half.profile.metaops[0]
    assert (found.batch_size, [point.dp for point in found.curve]) == (2, [1, 2])
    assert (found.activation_bytes_per_op, found.inner_output_bytes, found.field_bytes) == (50, 30, {0: 20})
    assert found.output_bytes == 2**15
    assert found.memory[0].kept_bytes == (1, 40)
    assert half.profile.metaops[1].inner_output_bytes is None
    assert [metaop.batch_size for metaop in quarter.profile.metaops] == [1, 2]


def test_layers_are_split_by_8_at_most_as_far_as_they_have_parameters() -> None:
    profile = profile_of(
        metaop_of("a/m", 1, {1: 3.0, 2: 1.5}), metaop_of("a/n", 1, {1: 3.0}, param_bytes_per_op=0)
    )
    found = list(_tensor_parallelism(profile, cluster_of(4)))
    words = "layers profiled with tensor parallelism of"
    assert [change.words for change in found] == [f"{words} 2", f"{words} 4", f"{words} 8"]
    split, whole = found[1].profile.metaops
    assert [(point.num_devices, point.dp, point.tp) for point in split.curve] == [(4, 1, 4), (8, 2, 4)]
    assert [point.forward_s for point in split.curve] == pytest.approx([0.25, 0.125])
    assert [point.backward_s for point in split.curve] == pytest.approx([0.5, 0.25])
    assert whole == profile.metaops[1]


def test_what_the_curves_have_of_tensor_parallelism_is_not_tried_again() -> None:
    net = metaop_of("a/m", 1, {1: 3.0})
    point = CurvePoint(num_devices=2, dp=1, tp=2, forward_s=1.0, backward_s=1.0, source="measured")
    split = net.model_copy(update={"curve": (*net.curve, point)})
    assert list(_tensor_parallelism(profile_of(metaop_of("b/m", 1, {1: 1.0}), split), cluster_of(2))) == []


def test_the_smallest_change_of_each_kind_that_fits_is_named() -> None:
    """4 tasks of 0.9 GiB with as much of gradients and twice of state: two devices of 4 GiB lack half. Halved
    batches take no less, and of layers split by 2 both would hold half of each.
    """
    sizes = {"param_bytes_per_op": int(0.9 * GIB), "activation_bytes_per_op": 2**20}
    tasks = [metaop_of(f"{task}/m", 1, {1: 1.0}, **sizes) for task in "abcd"]
    with pytest.raises(NoPlanError) as raised:
        make_plan(profile_of(*tasks), cluster_of(2, memory_gib=4))
    text = str(raised.value)
    assert re.search(r"device \d needs 7\.2\d GiB and has 4 GiB, 3\.2\d GiB too little", text)
    assert "(parameters 1.8 GiB, " in text
    assert ", optimizer state 3.6 GiB, " in text
    assert text.endswith("Tried, and each would fit by itself: 4 devices instead of 2; devices of 8 GiB.")
