"""Actions as text."""

from __future__ import annotations

import pytest
from hypothesis import given

from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from helpers.random_plans import plans
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import CurvePoint
from spindle_cli.program.link import link
from spindle_cli.program.types import StepSettings
from spindle_cli.show.text import format_action, format_rank, parse_action


@examples(30)
@given(plans())
def test_every_action_comes_back_from_its_text(plan: Plan) -> None:
    for actions in link(plan, settings=StepSettings(sharded=True, clips=True)).actions.values():
        for action in actions:
            assert parse_action(format_action(action)) == action


@pytest.mark.parametrize("text", ["", "F", "F x", "SUM 1 ", "SEND #1 2->3", "STEP 1", "G 1"])
def test_what_is_not_an_action_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="expected an action such as"):
        parse_action(text)


def test_a_rank_is_explained_action_by_action() -> None:
    text = format_rank(link(two_towers()[1]), 0)
    assert "pairs/vision[0:3] forward, samples 0:4" in text
    assert "gradient of pairs/text[0:3], for pairs/loss[0:1]" in text
    assert "wait for everything, then the optimizer" in text
    assert "communicators of device 0: 4\n  on 0  everyone  devices 0-3\n" in text


def test_a_rank_s_page_as_a_whole() -> None:
    """Four MetaOps of half a batch each, whose small sums go together, and one split over both devices."""
    halves = CurvePoint(num_devices=2, dp=1, tp=2, forward_s=0.2, backward_s=0.4, source="measured")
    nets = [
        metaop_of(f"{task}/net", 1, {2: 1.0}, parameters=f"p{task}", param_bytes_per_op=1000)
        for task in "abcd"
    ]
    split = metaop_of("e/net", 2, {1: 1.0})
    split = split.model_copy(update={"curve": (*split.curve, halves)})
    waves = [[slice_of(net, (0, 1), (0, 1), float(at))] for at, net in enumerate(nets)]
    plan = plan_of(
        profile_of(*nets, split), cluster_of(2), [*waves, [slice_of(split, (0, 2), (0, 1), 4.0, tp=2)]]
    )
    on_nccl = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"backend": "nccl"})})
    assert format_rank(link(on_nccl, settings=StepSettings(sharded=True)), 1) == PAGE
    assert "GiB" not in format_rank(link(plan, settings=StepSettings(sharded=True)), 1)


def test_three_keys_of_a_sum_are_all_named() -> None:
    nets = [
        metaop_of(f"{task}/net", 1, {2: 1.0}, parameters=f"p{task}", param_bytes_per_op=1000)
        for task in "abc"
    ]
    waves = [[slice_of(net, (0, 1), (0, 1), float(at))] for at, net in enumerate(nets)]
    text = format_rank(link(plan_of(profile_of(*nets), cluster_of(2), waves)), 0)
    assert "  pc, pb, pa: 3 blocks, 2.93 KiB, over 2 devices\n" in text


PAGE = """\
 0  F 0              a/net[0:1] forward, samples 4:8, planned 0 s
 1  F 1              b/net[0:1] forward, samples 4:8, planned 1 s
 2  F 2              c/net[0:1] forward, samples 4:8, planned 2 s
 3  F 3              d/net[0:1] forward, samples 4:8, planned 3 s
 4  F 4 on 1         e/net[0:2] forward, samples 0:8, shard 1 of 2, planned 4 s
 5  LOSSES on 0      the losses of all devices
 6  B 4 on 1         e/net[0:2] backward, samples 0:8, shard 1 of 2, planned 4 s
 7  B 3              d/net[0:1] backward, samples 4:8, planned 3 s
 8  B 2              c/net[0:1] backward, samples 4:8, planned 2 s
 9  B 1              b/net[0:1] backward, samples 4:8, planned 1 s
10  B 0              a/net[0:1] backward, samples 4:8, planned 0 s
11  SUM 4 op 0 on 0  pd, pc, pb and 1 more: 4 blocks, 3.91 KiB, over 2 devices
12  FLAGS on 0       which parameters any of these devices has reached
13  STEP             wait for everything, then the optimizer
14  GATHER 4 on 0    pd, pc, pb and 1 more: 4 blocks, 3.91 KiB, over 2 devices

communicators of device 1: 2, about 1.12 GiB of its memory
  on 0  everyone            devices 0, 1, 576 MiB
  on 1  tensor parallelism  devices 0, 1, 576 MiB
"""


def test_a_rank_that_the_cluster_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="0 to 3"):
        format_rank(link(two_towers()[1]), 4)
