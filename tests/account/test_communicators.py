"""Which communicators a plan needs, and what NCCL takes for them, solved by hand."""

from __future__ import annotations

from hypothesis import given

from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from helpers.random_plans import plans
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.traffic import communicator_bytes, traffic_of
from spindle_cli.account.types import Purpose
from spindle_cli.check.run import check_plan
from spindle_cli.files.cluster import DEFAULT_RESERVE_GIB, Cluster, NodeGroup
from spindle_cli.plan.types import Plan
from spindle_cli.program.link import link
from spindle_cli.program.transfers import communicator_memory
from spindle_cli.show.summary import RankReport
from spindle_cli.show.text import format_rank
from spindle_cli.units import MIB


def on_gpus(plan: Plan, nodes: int, devices: int) -> Plan:
    groups = (NodeGroup(count=nodes, devices=devices, device="a800-80gb", memory_gib=80),)
    cluster = Cluster(name="gpus", nodes=groups, links=plan.cluster.links)
    return plan.model_copy(update={"cluster": cluster})


def from_one_to_three() -> Plan:
    """`source` on device 0 hands to `net` on devices 1 to 3, of which 2 and 3 are on the other node."""
    source = metaop_of("task/source", 1, {1: 1.0}, batch_size=6)
    net = metaop_of("task/net", 1, {3: 1.0}, batch_size=6, inputs=(source.name,))
    waves = [[slice_of(source, (0, 1), (0,), 0.0)], [slice_of(net, (0, 1), (1, 2, 3), 1.0)]]
    return on_gpus(plan_of(profile_of(source, net), cluster_of(4), waves), 2, 2)


def test_each_device_pays_for_the_communicators_that_it_is_in() -> None:
    plan = from_one_to_three()
    everyone, three = (0, 1, 2, 3), (1, 2, 3)
    assert traffic_of(plan).communicators == (
        (everyone, Purpose.EVERYONE, ()),
        (everyone, Purpose.MESSAGES, (0,)),
        (everyone, Purpose.MESSAGES, three),
        (three, Purpose.SUMS, ()),
    )
    # Device 0 talks to one of its node and two outside, both ways; 1 to one inside, 2 and 3 to one outside.
    messages = [2 * (112 + 32), 2 * 112, 2 * 32, 2 * 32]
    # Of all four, two cards of each node end four channels, of 12 x (1 + 2 x 3 / 4) MiB; of the three, one
    # card of the first node ends two, of 12 x (1 + 2 x 2 / 3).
    sums = [120, 120 + 56, 120 + 56, 120 + 56]
    assert communicator_bytes(plan) == tuple((a + b) * MIB for a, b in zip(messages, sums, strict=True))


def test_two_devices_take_less_and_one_nothing() -> None:
    net = metaop_of("task/net", 1, {1: 1.0, 2: 1.0})
    for count, expected in ((1, 0), (2, 576 * MIB)):
        waves = [[slice_of(net, (0, 1), range(count), 0.0)]]
        plan = on_gpus(plan_of(profile_of(net), cluster_of(count), waves), 1, count)
        assert communicator_bytes(plan) == (expected,) * count


def test_on_gloo_communicators_take_nothing_of_a_devices_memory() -> None:
    plan = from_one_to_three()
    cluster = plan.cluster.model_copy(update={"backend": "gloo"})
    assert communicator_bytes(plan.model_copy(update={"cluster": cluster})) == (0, 0, 0, 0)


def test_a_rank_shows_its_communicators_with_their_memory() -> None:
    program = link(from_one_to_three())
    assert "communicators of device 0: 3, about 408 MiB of its memory\n" in format_rank(program, 0)
    assert "  on 1  messages  devices 0-3, sent by 0, 144 MiB\n" in format_rank(program, 0)
    assert "  on 2  messages  devices 0-3, sent by 1-3, 144 MiB\n" in format_rank(program, 0)
    shown = RankReport.of(program, 1).communicators
    assert [(each.index, each.purpose, each.memory_bytes // MIB) for each in shown] == [
        (0, "everyone", 120),
        (1, "messages", 112),
        (2, "messages", 112),
        (3, "sums", 56),
    ]
    assert [each.senders for each in shown] == [(), (0,), (1, 2, 3), ()]
    assert shown[3].devices == (1, 2, 3)


def test_a_plan_that_leaves_no_room_for_communicators_is_not_valid() -> None:
    plan = from_one_to_three()
    alone = device_memory(plan.metaops, plan.slices, plan.cluster, plan)
    with_all = device_memory(plan.metaops, plan.slices, plan.cluster, plan, communicator_bytes(plan))
    said = plan.predicted.model_copy(
        update={"peak_memory_bytes": tuple(each.total_bytes for each in with_all)}
    )
    plan = plan.model_copy(update={"predicted": said})
    assert not check_plan(plan)
    gib = (max(each.total_bytes for each in alone) + 100 * MIB) / 2**30
    group = plan.cluster.nodes[0].model_copy(update={"memory_gib": gib, "reserve_gib": DEFAULT_RESERVE_GIB})
    tight = plan.cluster.model_copy(update={"nodes": (group,)})
    tight = Cluster.model_validate(tight.model_dump(by_alias=True))
    found = check_plan(plan.model_copy(update={"cluster": tight}))
    assert {violation.rule for violation in found} == {"memory"}
    assert sorted(device for violation in found for device in violation.devices) == [0, 1, 2, 3]
    assert all("reserve and communicators" in violation.value for violation in found)


@examples(40)
@given(plans())
def test_the_account_of_a_plan_and_its_programs_agree(plan: Plan) -> None:
    program = link(plan)
    said = [(each.ranks, each.purpose, each.senders) for each in program.communicators]
    assert said == list(traffic_of(plan).communicators)
    of_programs = [sum(communicator_memory(program, device).values()) for device in program.actions]
    assert communicator_bytes(plan) == tuple(of_programs)
