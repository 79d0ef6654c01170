"""Plans for islands that average now and then alone: where they are, what outer steps take, what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.island_plans import on_islands
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.traffic import outer_step_bytes, outer_step_s
from spindle_cli.check.run import check_plan
from spindle_cli.costs.shares import rebatched
from spindle_cli.errors import InputError, NoPlanError
from spindle_cli.files.cluster import BetweenLink, Cluster, GroupLinks, Link, Links, NodeGroup
from spindle_cli.plan.file import plan_text, read_plan, write_plan
from spindle_cli.plan.islands.planned import island_of
from spindle_cli.plan.islands.said import consent_line, islands_report, lines_of
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.plan_report import PlanReport
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import LocalSgd, Profile
from spindle_cli.questions.spending import spending_of

MIB = 2**20
FAST, SLOW = Link(latency_us=10, bandwidth_gb_per_s=5), Link(latency_us=20, bandwidth_gb_per_s=1)


def request(islands: int = 2, every: int = 4, **more: Any) -> LocalSgd:
    return LocalSgd(islands=islands, every=every, **more)


def of_nodes(*nodes: NodeGroup, between: tuple[BetweenLink, ...] = ()) -> Cluster:
    return Cluster(name="sites", nodes=nodes, links=Links(intra_node=FAST, inter_node=SLOW, between=between))


def node(name: str | None = None, count: int = 1, **more: Any) -> NodeGroup:
    return NodeGroup(**{"name": name, "count": count, "devices": 2, "device": "cpu", "memory_gib": 4, **more})


def link_between(a: str, b: str, latency_us: float) -> BetweenLink:
    return BetweenLink(groups=(a, b), latency_us=latency_us, bandwidth_gb_per_s=1)


# Where islands are


def test_an_island_is_the_first_run_of_nodes() -> None:
    cluster = of_nodes(node("a", 3), node("b", 3), between=(link_between("a", "b", 500),))
    island = island_of(cluster, 2)
    assert [(group.name, group.count) for group in island.nodes] == [("a", 3)]
    assert island.links.between == ()
    assert island_of(cluster, 6).num_devices == 2


def test_an_island_of_two_groups_keeps_the_link_between_them() -> None:
    groups = (node("a"), node("b", devices=4), node("c"), node("d", devices=4))
    links = (link_between("a", "b", 30), link_between("c", "d", 30), link_between("a", "c", 900))
    island = island_of(of_nodes(*groups, between=links), 2)
    assert [(group.name, group.devices) for group in island.nodes] == [("a", 2), ("b", 4)]
    assert [link.groups for link in island.links.between] == [("a", "b")]


@pytest.mark.parametrize(
    ("cluster", "islands", "message"),
    [
        (of_nodes(node(count=3)), 2, "'sites' has 3 nodes, to be divided between 2 islands"),
        (of_nodes(node()), 2, "'sites' has 1 node, to be divided"),
        (
            of_nodes(node("a"), node("b", devices=1)),
            2,
            r"node 0, of island 0, has 2 x cpu \(group a\), and node 1, in the same place of island 1, 1 x",
        ),
        (of_nodes(node("a"), node("b", memory_gib=8)), 2, "islands have to be alike"),
        (
            of_nodes(
                *(node(name) for name in "abcd"),
                between=(link_between("a", "b", 30), link_between("c", "d", 31)),
            ),
            2,
            "the link between nodes 0 and 1, of island 0, is not that between nodes 2 and 3, of island 1",
        ),
        (
            of_nodes(node("a"), node("b", links=GroupLinks(intra_node=SLOW))),
            2,
            "islands have to be alike",
        ),
    ],
)
def test_what_makes_no_equal_islands_is_refused(cluster: Cluster, islands: int, message: str) -> None:
    with pytest.raises(NoPlanError, match=message):
        island_of(cluster, islands)


# What an outer step takes


def planned(*, sharded: bool = False, op_s: float = 1.0, s_per_byte: float = 0.0) -> Plan:
    """An op of 3 MiB on two devices of a node, which share its optimizer state or not."""
    metaop = metaop_of("a/x", 1, {1: 2.0, 2: op_s}, param_bytes_per_op=3 * MIB)
    profile = profile_of(metaop).model_copy(
        update={"optimizer_state_sharded": sharded, "optimizer_s_per_byte": s_per_byte}
    )
    plan = plan_of(profile, cluster_of(2), [(slice_of(metaop, (0, 1), (0, 1), 0.0),)])
    return plan.model_copy(update={"optimizer_state_sharded": sharded, "optimizer_s_per_byte": s_per_byte})


def test_a_device_sends_what_it_updates_to_each_other_island() -> None:
    assert outer_step_bytes(planned(), request()) == (3 * MIB, 3 * MIB)
    assert outer_step_bytes(planned(sharded=True), request()) == (3 * MIB // 2, 3 * MIB // 2)
    assert outer_step_bytes(planned(sharded=True), request(islands=4)) == (9 * MIB // 2, 9 * MIB // 2)
    assert outer_step_bytes(planned(sharded=True), request(bits=8)) == (3 * MIB // 8, 3 * MIB // 8)


def test_devices_behind_one_card_send_one_after_the_other() -> None:
    """A node of CPUs has one card: 20 us, and 2 x 3 MiB at 1 GB/s."""
    whole = cluster_of(4, devices_per_node=2)
    assert outer_step_s(planned(), request(), whole) == pytest.approx(20e-6 + 6 * MIB / 1e9, rel=1e-12)
    cards = whole.changed(nodes=(node(count=2, nics=2),))
    island = planned().model_copy(update={"cluster": cards.changed(nodes=(node(nics=2),))})
    assert outer_step_s(island, request(), cards) == pytest.approx(20e-6 + 3 * MIB / 1e9, rel=1e-12)


def test_what_is_sent_to_three_others_goes_around_in_three_hops() -> None:
    whole = cluster_of(8, devices_per_node=2)
    expected = 3 * (20e-6 + 6 * MIB / 1e9)
    assert outer_step_s(planned(), request(islands=4), whole) == pytest.approx(expected, rel=1e-12)


def test_the_slowest_link_between_peer_replicas_counts() -> None:
    groups, links = (node("a"), node("b")), (link_between("a", "b", 5000),)
    took_s = outer_step_s(planned(), request(), of_nodes(*groups, between=links))
    assert took_s == pytest.approx(5e-3 + 6 * MIB / 1e9, rel=1e-12)


def test_peer_replicas_are_in_the_same_place_of_each_island() -> None:
    """Islands of two nodes with a device each: device 0, which has it all, meets that of node 2."""
    groups = (node("a", 2, devices=1), node("b", 2, devices=1))
    whole = of_nodes(*groups, between=(link_between("a", "b", 5000),))
    metaop = metaop_of("a/x", 1, {1: 2.0}, param_bytes_per_op=3 * MIB)
    alone = plan_of(profile_of(metaop), cluster_of(2), [(slice_of(metaop, (0, 1), (0,), 0.0),)])
    island = alone.model_copy(update={"cluster": island_of(whole, 2)})
    assert outer_step_bytes(island, request()) == (3 * MIB, 0)
    assert outer_step_s(island, request(), whole) == pytest.approx(5e-3 + 3 * MIB / 1e9, rel=1e-12)


def test_the_outer_update_and_the_gather_of_shared_state_are_counted() -> None:
    """The update takes as long as an inner one; then half of 3 MiB goes around the two of an island."""
    whole = cluster_of(4, devices_per_node=2)
    sent_s = 20e-6 + 3 * MIB / 1e9
    update_s = 1.5 * MIB * 1e-9
    gather_s = 10e-6 + 1.5 * MIB / 5e9
    took_s = outer_step_s(planned(sharded=True, s_per_byte=1e-9), request(), whole)
    assert took_s == pytest.approx(sent_s + update_s + gather_s, rel=1e-9)


def test_the_device_that_takes_part_in_most_gathers_counts() -> None:
    """One of three has a little op of its own, and gathers nothing."""
    shared = metaop_of("a/x", 1, {2: 1.0}, param_bytes_per_op=3 * MIB)
    own = metaop_of("b/y", 1, {1: 1.0}, param_bytes_per_op=4)
    slices = (slice_of(shared, (0, 1), (0, 1), 0.0), slice_of(own, (0, 1), (2,), 0.0))
    plan = plan_of(profile_of(shared, own), cluster_of(3), [slices])
    plan = plan.model_copy(update={"optimizer_state_sharded": True, "optimizer_s_per_byte": 0.0})
    took_s = outer_step_s(plan, request(), cluster_of(6, devices_per_node=3))
    assert took_s == pytest.approx(20e-6 + (3 * MIB + 4) / 1e9 + 10e-6 + 1.5 * MIB / 5e9, rel=1e-6)


# Plans


def made_for(local_sgd: LocalSgd | None, cluster: Cluster | None = None, **more: Any) -> Plan:
    metaop = metaop_of("a/x", 4, {1: 0.4, 2: 0.2, 4: 0.1}, batch_size=8)
    profile = profile_of(metaop).model_copy(update={"local_sgd": local_sgd, **more})
    return make_plan(profile, cluster or cluster_of(4, devices_per_node=2))


def test_without_islands_nothing_of_a_plan_is_another() -> None:
    plan = made_for(None)
    assert plan.islands is None
    assert not {"islands", "local_sgd"} & set(plan_text(plan).split())
    assert (plan.whole_cluster, plan.outer_share_s, consent_line(plan)) == (plan.cluster, 0.0, None)
    assert plan.of_steps is plan.predicted


def test_an_island_is_planned_for_and_the_rest_is_said() -> None:
    plan = made_for(request(every=5))
    assert plan.islands is not None
    assert (plan.cluster.num_devices, plan.whole_cluster.num_devices) == (2, 4)
    assert max(device for piece in plan.slices for device in piece.devices) == 1
    assert check_plan(plan) == ()
    mean_s = plan.predicted.iteration_s + plan.islands.outer_step_s / 5
    assert plan.mean_iteration_s == pytest.approx(mean_s, rel=1e-12)
    twice = made_for(request(every=5), accumulate=2)
    assert twice.islands is not None
    assert twice.outer_share_s == pytest.approx(twice.islands.outer_step_s / 10, rel=1e-12)


def test_the_time_without_islands_is_that_of_all_devices_on_the_whole_batch() -> None:
    """16 samples on 4 devices: shares of 4, which an op takes 0.2 s for, as 8 samples on 2 devices. More than
    so many devices was not measured; and what is never split is not, on however many.
    """
    cluster = cluster_of(4, devices_per_node=2)
    split, alone = metaop_of("a/x", 4, {1: 0.4, 2: 0.2}), metaop_of("a/y", 1, {1: 0.1}, inputs=("a/x",))
    profile = profile_of(split, alone).model_copy(update={"local_sgd": request()})
    plan = make_plan(profile, cluster)
    assert plan.islands is not None
    twice = (
        metaop_of("a/x", 4, {1: 0.8, 2: 0.4, 4: 0.2}, batch_size=16),
        metaop_of("a/y", 1, {1: 0.2}, batch_size=16, inputs=("a/x",)),
    )
    doubled = [each.model_copy(update={"output_bytes": 2**17}) for each in twice]
    together = make_plan(profile_of(*doubled), cluster)
    assert together.predicted.compute_s == pytest.approx(4 * 0.2 + 0.2, rel=1e-6)
    assert plan.islands.without_s == pytest.approx(together.predicted.iteration_s, rel=1e-3)


def test_the_report_and_the_notes_say_what_is_trained_and_saved() -> None:
    plan = made_for(request(every=5, bits=8))
    report = islands_report(plan)
    assert report is not None
    assert plan.islands is not None
    assert report.outer_step_bytes == sum(plan.islands.outer_step_bytes)
    assert report.bytes_per_step == report.outer_step_bytes / 5
    assert report.s_per_step == report.outer_step_s / 5
    assert report.saved_s == pytest.approx((plan.islands.without_s or 0) - plan.mean_iteration_s)
    assert plan.notes[-3:] == lines_of(plan)
    consent, outer, mean = lines_of(plan)
    assert consent.startswith("not the model that plain PyTorch trains")
    assert "2 islands of 2 devices" in consent
    assert "after every 5 steps by SGD with lr 0.7 and Nesterov momentum 0.9, in 8 bits" in consent
    assert "each island sends" in outer
    assert mean.endswith("saved" if report.saved_s > 0 else "lost")  # type: ignore[operator]
    assert "of each of 2 islands" in str(PlanReport.of("plan.yaml", plan))


def test_other_outer_optimizers_and_a_loss_of_time_are_said() -> None:
    plan = on_islands(planned(), request(outer={"lr": 1, "momentum": 0}))
    assert "by SGD with lr 1, in" in (consent_line(plan) or "")
    plain = on_islands(planned(), request(outer={"nesterov": False}))
    assert "lr 0.7 and momentum 0.9" in (consent_line(plain) or "")
    assert plan.islands is not None
    assert lines_of(plan)[-1].endswith("no plan for all devices together to compare it with")
    worse = plan.model_copy(update={"islands": plan.islands.model_copy(update={"without_s": 0.5})})
    assert lines_of(worse)[-1].endswith(" lost")


def test_a_plan_with_islands_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = made_for(request(bits=16))
    write_plan(tmp_path / "plan.yaml", plan)
    assert read_plan(tmp_path / "plan.yaml") == plan


@pytest.mark.parametrize(
    ("gone", "message"), [("islands", "islands: this key is missing"), ("local_sgd", "local_sgd: this key")]
)
def test_one_key_without_the_other_is_refused(tmp_path: Path, gone: str, message: str) -> None:
    text = plan_text(made_for(request()))
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(f"{gone}:"))
    end = next(
        (place for place in range(start + 1, len(lines)) if not lines[place].startswith(" ")), len(lines)
    )
    (tmp_path / "plan.yaml").write_text("\n".join(lines[:start] + lines[end:]))
    with pytest.raises(InputError, match=message):
        read_plan(tmp_path / "plan.yaml")


def test_a_share_larger_than_any_known_takes_no_less_than_the_largest() -> None:
    """Small shares that sum a lot inside take longer: 1 s each of 4, 0.1 s of 2; the line falls below 0."""
    falling = metaop_of("a/x", 1, {1: 0.03, 2: 0.1, 4: 1.0}, batch_size=4)
    points = {point.dp: point.forward_s + point.backward_s for point in rebatched(falling, 12).curve}
    assert points[1] == pytest.approx(0.03)
    assert points[3] == pytest.approx(0.03)
    assert points[2] == pytest.approx(0.03)


# What `check` finds


def rules(plan: Plan, **changes: Any) -> list[tuple[str, str]]:
    assert plan.islands is not None
    changed = plan.model_copy(update={"islands": plan.islands.model_copy(update=changes)})
    return [(each.rule, each.where) for each in check_plan(changed)]


def test_check_finds_islands_that_are_not_the_cluster_and_numbers_that_are_not_true() -> None:
    plan = made_for(request())
    assert plan.islands is not None
    sent = plan.islands.outer_step_bytes
    assert rules(plan) == []
    assert rules(plan, cluster=cluster_of(6, devices_per_node=2)) == [("islands", "islands.cluster")]
    assert rules(plan, cluster=cluster_of(4, devices_per_node=1)) == [("islands", "islands.cluster")]
    larger = cluster_of(4, devices_per_node=2, memory_gib=8)
    assert rules(plan, cluster=larger) == [("islands", "islands.cluster")]
    assert rules(plan, outer_step_bytes=sent[:1]) == [("islands", "islands.outer_step_bytes")]
    other = (sent[0] + 1, *sent[1:])
    assert rules(plan, outer_step_bytes=other) == [("islands", "islands.outer_step_bytes")]
    for times in (0.99, 1.01):
        took_s = times * plan.islands.outer_step_s
        assert rules(plan, outer_step_s=took_s) == [("islands", "islands.outer_step_s")]


# What it costs


def test_all_islands_cost_and_draw() -> None:
    """Two devices each at 3 an hour and 100 W, for the mean of the iterations."""
    priced = cluster_of(4, devices_per_node=2)
    group = priced.nodes[0].model_copy(update={"price_per_device_hour": 3.0, "watts_per_device": 100.0})
    plan = made_for(request(), priced.changed(nodes=(group,)))
    found = spending_of(plan)
    assert found.price_per_hour == 12.0
    assert found.cost == pytest.approx(12.0 * plan.mean_iteration_s / 3600)
    assert found.energy_j == pytest.approx(400.0 * plan.mean_iteration_s)


def test_the_hash_of_the_profile_is_that_with_islands() -> None:
    metaop = metaop_of("a/x", 4, {1: 0.4, 2: 0.2}, batch_size=8)
    profile: Profile = profile_of(metaop).model_copy(update={"local_sgd": request()})
    plan = make_plan(profile, cluster_of(4, devices_per_node=2))
    assert plan.profile.sha256 == profile.sha256()
    assert plan.profile.sha256 != profile_of(metaop).sha256()
    assert check_plan(plan, profile) == ()
