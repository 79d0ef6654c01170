"""Messages, sums and updates of a run's last steps, on links of 10 us and 5 GB/s inside a node, 20 us and
1 GB/s between nodes: 5 MB take 1.01 ms inside, 5.02 ms between.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from calibration.made_runs import Spans, made_run, timeline_of
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.traffic import traffic_of
from spindle_cli.calibrate.links import slower_links, unlike_links, update_s_per_byte, with_slower_links
from spindle_cli.calibrate.moving import Moved, moved_in, times_of_links
from spindle_cli.calibrate.reading import Run, read_run
from spindle_cli.calibrate.run import calibrate
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.runs.records import MeasuredSpan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import MeasuredLink, Profile

MB5 = 5_000_000
INSIDE_S, BETWEEN_S = 1.01e-3, 5.02e-3
SHARED = 1  # the parameter group that both devices hold


def chain(cluster: Cluster, *, sharded: bool = False) -> tuple[Profile, Plan]:
    """Slice 0 on device 0, slice 1 on device 1, slice 2 on both, with the parameters of slice 0."""
    first = metaop_of("a/first", 1, {1: 1.0, 2: 0.5}, parameters="shared")
    second = metaop_of("a/second", 1, {1: 1.0, 2: 0.5}, inputs=(first.name,))
    third = metaop_of("b/first", 1, {1: 1.0, 2: 0.5}, parameters="shared")
    profile = profile_of(first, second, third).model_copy(update={"optimizer_state_sharded": sharded})
    slices = [
        slice_of(first, (0, 1), (0,), 0.0),
        slice_of(second, (0, 1), (1,), 1.0),
        slice_of(third, (0, 1), (0, 1), 2.0),
    ]
    return profile, plan_of(profile, cluster, [(each,) for each in slices])


def transfer(
    posted_s: float, *, to: int = 1, taker: int = 1, num_bytes: int = MB5, back: bool = False
) -> MeasuredSpan:
    return MeasuredSpan(
        kind="transfer",
        start_s=posted_s,
        end_s=9.0,
        slice=taker,
        source_slice=1 - taker,
        peer=to,
        num_bytes=num_bytes,
        is_gradient=back,
    )


def wait(start_s: float, end_s: float, index: int = 1, cause: str = "activation") -> MeasuredSpan:
    return MeasuredSpan.model_validate(
        {"kind": "wait", "start_s": start_s, "end_s": end_s, "slice": index, "cause": cause}
    )


def span(kind: str, start_s: float, end_s: float, group: int = SHARED) -> MeasuredSpan:
    return MeasuredSpan.model_validate({"kind": kind, "start_s": start_s, "end_s": end_s, "group": group})


def seen(
    folder: Path,
    spans: Spans,
    *,
    cluster: Cluster | None = None,
    clock_error_s: float = 0.0,
    sharded: bool = False,
) -> dict[tuple[str, str], Moved]:
    profile, plan = chain(cluster or cluster_of(2), sharded=sharded)
    run = read_run(made_run(folder / "run", plan, profile, spans=spans))
    run = replace(run, timeline=timeline_of(plan, spans, clock_error_s=clock_error_s))
    return moved_in(run, traffic_of(plan), plan.cluster)


def test_a_message_counts_where_its_taker_waited_for_it(tmp_path: Path) -> None:
    found = seen(tmp_path, [[transfer(1.0)], [wait(0.5, 1.002)]])
    assert found == {("intra_node", "messages"): Moved(1, pytest.approx(INSIDE_S), pytest.approx(2e-3))}


@pytest.mark.parametrize(
    "waits",
    [
        [],
        [wait(1.0001, 1.002)],  # began to wait when it was on its way already
        [wait(0.5, 1.002, cause="gradient")],
        [wait(0.5, 1.002, index=2)],
        [wait(0.5, 1.0)],  # for something else, before it was posted
    ],
)
def test_where_nobody_saw_it_arrive_it_does_not_count(tmp_path: Path, waits: list[MeasuredSpan]) -> None:
    assert seen(tmp_path, [[transfer(1.0)], waits]) == {}


def test_clocks_that_do_not_agree_so_far_leave_it_out(tmp_path: Path) -> None:
    spans = [[transfer(1.0)], [wait(0.9995, 1.002)]]
    assert seen(tmp_path, spans, clock_error_s=0.0004)
    assert not seen(tmp_path, spans, clock_error_s=0.0006)  # who was first is not known
    assert not seen(tmp_path, [[transfer(1.0)], [wait(0.5, 1.002)]], clock_error_s=0.00101)


def test_of_several_the_last_one_counts_behind_those_before_it(tmp_path: Path) -> None:
    """Posted half a millisecond after the first, it has to wait for 0.51 ms of it."""
    found = seen(tmp_path, [[transfer(1.0), transfer(1.0005)], [wait(0.5, 1.003)]])
    assert found["intra_node", "messages"] == Moved(
        1, pytest.approx(2 * INSIDE_S - 0.5e-3), pytest.approx(2.5e-3)
    )


def test_gradients_and_messages_between_nodes(tmp_path: Path) -> None:
    apart = cluster_of(2, devices_per_node=1)
    back = transfer(2.0, to=0, taker=0, back=True)
    spans = [[transfer(1.0), wait(1.5, 2.008, index=0, cause="gradient")], [wait(0.5, 1.006), back]]
    (key, found), *others = seen(tmp_path, spans, cluster=apart).items()
    assert key == ("inter_node", "messages")
    assert found == Moved(2, pytest.approx(2 * BETWEEN_S), pytest.approx(14e-3))
    assert not others


def test_waits_that_may_be_for_new_parameters_do_not_count(tmp_path: Path) -> None:
    """Device 0 waits for a gradient; a slice with gathered parameters may wait for these alone."""
    spans = [[wait(0.5, 1.002, index=0)], [transfer(1.0, to=0, taker=0)]]
    assert seen(tmp_path / "a", spans)
    assert not seen(tmp_path / "b", spans, sharded=True)
    back = [[wait(0.5, 1.002, index=0, cause="gradient")], [transfer(1.0, to=0, taker=0, back=True)]]
    assert seen(tmp_path / "c", back, sharded=True)


def test_a_sum_counts_from_when_all_have_posted_it_to_its_last_end(tmp_path: Path) -> None:
    """1 MiB over two devices: twice 10 us and half of it, 2 x (10 us + 104.9 us)."""
    found = seen(tmp_path, [[span("sum", 1.0, 1.4)], [span("sum", 1.2, 1.5)]])
    assert found == {
        ("intra_node", "sums"): Moved(1, pytest.approx(2 * (10e-6 + 2**19 / 5e9)), pytest.approx(0.3))
    }


def test_a_sum_that_one_device_has_not_noted_does_not_count(tmp_path: Path) -> None:
    assert not seen(tmp_path, [[span("sum", 1.0, 1.4)], []])
    assert not seen(tmp_path, [[span("gather", 1.0, 1.4)], [span("gather", 1.0, 1.4)]])


def test_a_sum_waits_for_the_one_before_it(tmp_path: Path) -> None:
    spans = [[span("gather", 0.0, 1.0), span("sum", 0.5, 1.4)]] * 2
    found = seen(tmp_path, spans, sharded=True)["intra_node", "sums"]
    assert (found.count, found.measured_s) == (2, pytest.approx(1.0 + 0.4))


def test_a_link_takes_the_time_of_all_that_moved_over_it() -> None:
    moved = {
        ("intra_node", "messages"): Moved(1, 2.0, 3.0),
        ("intra_node", "sums"): Moved(2, 2.0, 9.0),
        ("inter_node", "sums"): Moved(1, 0.5, 0.5),
    }
    assert times_of_links(moved) == {"intra_node": 3.0, "inter_node": 1.0}
    assert times_of_links({("intra_node", "sums"): Moved(1, 0.0, 1.0)}) == {}


def test_links_of_profile_and_cluster_become_as_slow(tmp_path: Path) -> None:
    """The plan's links are twice as slow as thought, the profile's own, of half the speed, as they are."""
    profile, plan = chain(cluster_of(2))
    own = MeasuredLink(kind="intra_node", latency_s=20e-6, points=((1000, 2.5e9),), message_processor_s=1.0)
    far = MeasuredLink(kind="inter_node", latency_s=1.0, points=((1000, 1e9),))
    profile = profile.model_copy(update={"links": (own, far)})
    spans = [[transfer(1.0)], [wait(0.5, 1.0 + 2 * INSIDE_S)]]
    made = calibrate([made_run(tmp_path / "run", plan, profile, spans=spans)], profile, tmp_path)
    assert made.link_times == {"intra_node": pytest.approx(2.0)}
    assert made.profile.links == (own, far)
    links = with_slower_links(plan.cluster, made.link_times).links
    assert (links.intra_node.latency_us, links.intra_node.bandwidth_gb_per_s) == pytest.approx((20, 2.5))
    assert links.inter_node == plan.cluster.links.inter_node
    (slow, same) = slower_links(profile.links, {"intra_node": 2.0})
    assert (slow.latency_s, slow.points, slow.message_processor_s) == (40e-6, ((1000, 1.25e9),), 1.0)
    assert same == far


@pytest.mark.parametrize("times", [1.0, 1.9, 2.1, 2.9, 3.1, 6.0])
def test_links_that_are_much_slower_than_thought_are_warned_of(tmp_path: Path, times: float) -> None:
    """Where they are calibrated, and where a plan is made for the cluster as it was; not for one that has
    them as they were seen.
    """
    profile, plan = chain(cluster_of(2))
    own = MeasuredLink(kind="intra_node", latency_s=10e-6, points=((1000, 5e9),))
    profile = profile.model_copy(update={"links": (own,)})
    spans = [[transfer(1.0)], [wait(0.5, 1.0 + times * INSIDE_S)]]
    made = calibrate([made_run(tmp_path / "run", plan, profile, spans=spans)], profile, tmp_path)
    slow = [line for line in made.warnings if "a core look the same" in line]
    notes = unlike_links(made.profile, plan.cluster)
    assert not unlike_links(made.profile, with_slower_links(plan.cluster, made.link_times))
    assert (len(slow), len(notes)) == (times > 3, times > 2)
    if slow:
        assert slow[0].startswith(f"intra_node: messages and sums took {times:.1f} times as long")
    if notes:
        assert f"take {times:.1f} times as long as the links of" in notes[0] and "--write-cluster" in notes[0]


def test_a_link_with_a_curve_keeps_its_form() -> None:
    cluster = cluster_of(2)
    link = cluster.links.intra_node.model_copy(update={"curve": ((1000.0, 1.0), (2000.0, 4.0))})
    cluster = cluster.model_copy(update={"links": cluster.links.model_copy(update={"intra_node": link})})
    found = with_slower_links(cluster, {"intra_node": 4.0}).links.intra_node
    assert found.curve == ((1000.0, 0.25), (2000.0, 1.0))


def test_the_update_is_that_of_all_devices_by_their_bytes_and_of_all_runs_by_their_steps(
    tmp_path: Path,
) -> None:
    """Device 0 updates 1 MiB, device 1 2 MiB."""
    profile, plan = chain(cluster_of(2))

    def run(name: str, steps: int, *seconds: float) -> Run:
        found = read_run(made_run(tmp_path / name, plan, profile, steps=steps))
        devices = tuple(
            each.model_copy(update={"optimizer_s": own})
            for each, own in zip(found.measured.devices, seconds, strict=True)
        )
        return replace(found, measured=found.measured.model_copy(update={"devices": devices}))

    def of(s_per_byte: float) -> Profile:
        return profile.model_copy(update={"optimizer_s_per_byte": s_per_byte})

    once = run("once", 10, 1.0, 5.0)
    assert update_s_per_byte([once], of(0.0)) == pytest.approx(2.0 / 2**20)
    assert update_s_per_byte([once], of(2.0 / 2**20)) == 2.0 / 2**20
    assert update_s_per_byte([once, run("again", 30, 4.0, 8.0)], of(0.0)) == pytest.approx(3.5 / 2**20)
    assert update_s_per_byte([run("none", 5, 0.0, 0.0)], of(1.0)) is None
