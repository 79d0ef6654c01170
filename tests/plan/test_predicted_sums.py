"""When gradient sums are predicted to run."""

from __future__ import annotations

import pytest
from candidates import candidate_of, predicted, problem_of

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.costs.links import all_reduce_s
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.schedule import Placed
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.points import CurvePoint


def test_sums_go_in_the_order_in_which_they_are_complete() -> None:
    """Device 1 shares parameters with device 0, which is through after 3 s, and others with device 2, which
    takes 30 s: the first sum is long over when the second one starts, though its parameters are used first.
    """
    problem = problem_of(
        cluster_of(3),
        metaop_of("a/m", 1, {1: 3.0}, parameters="p"),
        metaop_of("b/m", 1, {1: 30.0}, parameters="q"),
        metaop_of("c/m", 1, {1: 3.0}, parameters="p"),
        metaop_of("d/m", 1, {1: 3.0}, parameters="q"),
    )
    candidate = candidate_of(
        problem, (0, 0, 1, 1, 0.0), (1, 0, 1, 1, 0.0), (2, 0, 1, 1, 0.0), (3, 0, 1, 1, 3.0)
    )
    prediction = predicted(problem, Placed(candidate, ((0,), (2,), (1,), (1,))), 30.0)
    assert prediction.gradient_sum_s == pytest.approx(2 * (10e-6 + 2**19 / 5e9))


@pytest.mark.parametrize(
    ("other_op_s", "sum_s", "added_s"),
    [
        # The second device runs its ops backward until 5.6 s, then its others: inside of these the sums start
        # as they are complete, 2 s each, the last one at 12 s.
        (3.0, 2.0, 2.0),
        # Its other ops run backward until 27.6 s, after the last pass that adds to the sums: they come before
        # these, from 9.8 s on, when it has run its first op that adds to one, 5 s each.
        (12.0, 5.0, 2.2),
    ],
)
def test_sums_start_when_they_are_complete_whatever_their_devices_run_then(
    other_op_s: float, sum_s: float, added_s: float
) -> None:
    """Ops of the first device run backward until 6, 8, 10 and 12 s."""
    num_bytes = round(sum_s * 5e9)
    problem = problem_of(
        cluster_of(2),
        metaop_of("a/m", 4, {1: 3.0}, parameters="p", param_bytes_per_op=num_bytes),
        metaop_of("b/m", 4, {1: 0.9}, parameters="p", param_bytes_per_op=num_bytes),
        metaop_of("c/m", 2, {1: other_op_s}),
    )
    begin_s = 2 * other_op_s
    candidate = candidate_of(problem, (0, 0, 4, 1, 0.0), (2, 0, 2, 1, 0.0), (1, 0, 4, 1, begin_s))
    compute_s = max(12.0, begin_s + 3.6)
    prediction = predicted(problem, Placed(candidate, ((0,), (1,), (1,))), compute_s)
    assert prediction.gradient_sum_s == pytest.approx(added_s, abs=1e-3)


STATISTICS = (BatchSum(num_bytes=8, forward=1, backward=1),)
HALVES = CurvePoint(num_devices=2, dp=1, tp=2, forward_s=0.75, backward_s=1.5, source="measured")


@pytest.mark.parametrize(
    ("num_bytes", "waiting"),
    [
        (round(2.0 * 5e9 * 3 / 4), {"batch_sums": STATISTICS}),  # of three devices
        (round(2.0 * 5e9), {"curve": (HALVES,)}),  # of the first with each of the others, a half each
    ],
)
def test_sums_are_behind_a_pass_that_adds_to_them_and_waits_for_others_inside(
    num_bytes: int, waiting: dict[str, object]
) -> None:
    """Ops of the first device run backward until 6, 8, 10 and 12 s, of the others, which sum statistics or
    activations, until 4.5, 6, 7.5 and 9 s: the first two sums start at 9 s, the rest behind them, 2 s each.
    """
    parameters = {"parameters": "p", "param_bytes_per_op": num_bytes}
    alone, other = (
        metaop_of("a/m", 4, {1: 3.0}, **parameters),
        metaop_of("b/m", 4, {2: 2.25}, **parameters).model_copy(update=waiting),
    )
    problem = problem_of(cluster_of(3), alone, other)
    candidate = candidate_of(problem, (0, 0, 4, 1, 0.0), (1, 0, 4, 2, 0.0))
    prediction = predicted(problem, Placed(candidate, ((0,), (1, 2))), 12.0)
    assert prediction.gradient_sum_s == pytest.approx(5.0, abs=1e-3)


@pytest.mark.parametrize(("sum_s", "more", "added_s"), [(1.0, 0, 1.0), (2.0, 0, 3.5), (2.0, 2, 4.2)])
def test_sums_start_inside_of_a_pass_that_waits_for_others_if_it_is_the_last_to_add(
    sum_s: float, more: int, added_s: float
) -> None:
    """Ops of two devices, which sum statistics, run backward until 4.5, 6, 7.5 and 9 s, those of the third
    until 1.2 s at the latest: sums start at 4.5 s. Where the third one then runs 2 more ops, the first of
    these until 5.2 s, they start there.
    """
    parameters = {"parameters": "p", "param_bytes_per_op": round(sum_s * 5e9 * 3 / 4)}
    problem = problem_of(
        cluster_of(3),
        metaop_of("a/m", 4, {1: 0.3}, **parameters),
        metaop_of("b/m", 4, {2: 2.25}, batch_sums=STATISTICS, **parameters),
        metaop_of("c/m", 2, {1: 3.0}),
    )
    first = [(2, 0, 2, 1, 0.0)] if more else []
    candidate = candidate_of(problem, *first, (1, 0, 4, 2, 0.0), (0, 0, 4, 1, 6.0))
    placed = Placed(candidate, (*([(0,)] if more else []), (1, 2), (0,)))
    prediction = predicted(problem, placed, 9.0)
    assert prediction.gradient_sum_s == pytest.approx(added_s, abs=1e-3)


@pytest.mark.parametrize(("other_op_s", "added_s"), [(2.1, 3.4), (2.25, 4.0)])
def test_sums_are_behind_passes_that_wait_for_others_inside_but_for_that_which_is_the_last_to_add(
    other_op_s: float, added_s: float
) -> None:
    """Ops of two devices, which sum statistics, run backward until 4.5, 6, 7.5 and 9 s, those of two others,
    which do so as well, until 8.4 or 9 s at the latest: these come to the sums, of 1 s each, behind all that.
    """
    parameters = {"parameters": "p", "param_bytes_per_op": round(5e9 * 4 / 6), "batch_sums": STATISTICS}
    problem = problem_of(
        cluster_of(4),
        metaop_of("a/m", 4, {2: 2.25}, **parameters),
        metaop_of("b/m", 4, {2: other_op_s}, **parameters),
    )
    candidate = candidate_of(problem, (0, 0, 4, 2, 0.0), (1, 0, 4, 2, 0.0))
    prediction = predicted(problem, Placed(candidate, ((0, 1), (2, 3))), 9.0)
    assert prediction.gradient_sum_s == pytest.approx(added_s, abs=1e-3)


def test_sums_of_a_device_go_by_when_they_are_complete_not_by_their_last_passes() -> None:
    """The second device sums with the first, which is through after 10 s, and with the third, of which the
    first op that it runs backward adds to the sum, at 6 s, and which is through after 12 s: the sums run from
    6 s and from 10 s on, 3 s each.
    """
    num_bytes = 15 * 10**9  # 3 s
    parameters = {"parameters": "p", "param_bytes_per_op": num_bytes}
    others = {"parameters": "q", "param_bytes_per_op": num_bytes}
    problem = problem_of(
        cluster_of(3),
        metaop_of("a/m", 1, {1: 10.0}, **parameters),
        metaop_of("b/m", 1, {1: 0.3}, **parameters),
        metaop_of("c/m", 1, {1: 0.3}, parameter_blocks=(3,), **others),
        metaop_of("d/m", 4, {1: 3.0}, parameter_blocks=(0, 1, 2, 3), **others),
    )
    candidate = candidate_of(
        problem, (0, 0, 1, 1, 0.0), (1, 0, 1, 1, 0.0), (3, 0, 4, 1, 0.0), (2, 0, 1, 1, 0.3)
    )
    prediction = predicted(problem, Placed(candidate, ((0,), (1,), (2,), (1,))), 12.0)
    assert prediction.gradient_sum_s == pytest.approx(1.0, abs=1e-3)


def test_statistics_summed_by_devices_further_apart_than_the_curve_has_them_come_on_top() -> None:
    sums = (BatchSum(num_bytes=1000, forward=2, backward=3),)
    cluster = cluster_of(4, devices_per_node=2)
    found = {}
    for devices in ((0, 1), (1, 2)):
        problem = problem_of(cluster, metaop_of("a/m", 4, {2: 3.0}, batch_sums=sums, param_bytes_per_op=0))
        candidate = candidate_of(problem, (0, 0, 4, 2, 0.0))
        found[devices] = predicted(problem, Placed(candidate, (devices,)), 12.0)
        more_s = 4 * 5 * all_reduce_s(1000, devices, cluster)
        assert found[devices].transfer_s == pytest.approx(more_s)
    assert found[1, 2].iteration_s > found[0, 1].iteration_s > 12


@pytest.mark.parametrize(
    ("per_node", "nics", "devices", "times"),
    [
        (2, 1, ((0, 2), (1, 3)), 2),  # both go through the one card of each node
        (2, 2, ((0, 2), (1, 3)), 1),  # each has its own
        (2, 1, ((0, 1), (2, 3)), 1),  # neither leaves its node
        (4, 1, ((0, 1), (2, 3)), 1),  # nor here, where both are in one
        (3, 1, ((0, 1), (2, 3)), 1),  # one does, through the other's card
    ],
)
def test_sums_between_nodes_through_one_card_go_one_after_another(
    per_node: int, nics: int, devices: tuple[tuple[int, ...], ...], times: int
) -> None:
    plain = cluster_of(6 if per_node == 3 else 4, devices_per_node=per_node)
    cluster = plain.changed(nodes=tuple(group.model_copy(update={"nics": nics}) for group in plain.nodes))
    problem = problem_of(
        cluster,
        metaop_of("a/m", 1, {2: 3.0}, param_bytes_per_op=10**9),
        metaop_of("b/m", 1, {2: 3.0}, param_bytes_per_op=10**9),
    )
    candidate = candidate_of(problem, (0, 0, 1, 2, 0.0), (1, 0, 1, 2, 0.0))
    prediction = predicted(problem, Placed(candidate, devices), 3.0)
    slowest_s = max(all_reduce_s(10**9, each, cluster) for each in devices)
    assert prediction.gradient_sum_s == pytest.approx(times * slowest_s, rel=1e-6)


def test_sums_of_some_devices_wait_for_none_of_others_that_is_not_ready() -> None:
    """As above, from 5.2 s on; the third device's two more ops are summed with a fourth one, which runs them
    backward until 5.6 s and 8.4 s. 2 s each: the first of three devices, the first of two; then the second
    of two, as these have taken no more of the device's time, and what is left of three, from 11.2 to 17.2 s.
    """
    parameters = {"parameters": "p", "param_bytes_per_op": round(2.0 * 5e9 * 3 / 4)}
    others = {"parameters": "q", "param_bytes_per_op": 10**10}
    problem = problem_of(
        cluster_of(4),
        metaop_of("a/m", 4, {1: 0.3}, **parameters),
        metaop_of("b/m", 4, {2: 2.25}, batch_sums=STATISTICS, **parameters),
        metaop_of("c/m", 2, {1: 3.0}, **others),
        metaop_of("d/m", 2, {1: 4.2}, **others),
    )
    candidate = candidate_of(
        problem, (2, 0, 2, 1, 0.0), (3, 0, 2, 1, 0.0), (1, 0, 4, 2, 0.0), (0, 0, 4, 1, 6.0)
    )
    prediction = predicted(problem, Placed(candidate, ((0,), (3,), (1, 2), (0,))), 9.0)
    assert prediction.gradient_sum_s == pytest.approx(8.2, abs=1e-3)


def test_gathers_of_several_sets_of_devices_take_turns() -> None:
    """Devices 0 and 1 gather what five ops use, one after another from 0 s on, and need it 1 s apart; devices
    1 and 2 what the last op of b and c use, which they need at 5 s. 1.5 s each, the latter after the first of
    the former: the fifth is there at 9 s, so that its slice starts at 5 s. Behind 18 s of passes and these
    5, the last sum takes 1.5 s; all others hide.
    """
    size = {"param_bytes_per_op": round(1.5 * 5e9 * 2)}  # of two devices each sums, and gathers, a half
    profile = profile_of(
        metaop_of("a/m", 5, {2: 3.0}, **size),
        metaop_of("b/m", 6, {1: 3.0}, parameters="q", parameter_blocks=(0, 1, 2, 3, 4, 5), **size),
        metaop_of("c/m", 1, {1: 3.0}, parameters="q", parameter_blocks=(5,), **size),
    ).model_copy(update={"optimizer_state_sharded": True})
    problem = make_problem(profile, cluster_of(3))
    candidate = candidate_of(problem, (0, 0, 5, 2, 0.0), (1, 0, 6, 1, 0.0), (2, 0, 1, 1, 15.0))
    prediction = predicted(problem, Placed(candidate, ((0, 1), (2,), (1,))), 18.0)
    assert prediction.gradient_sum_s == pytest.approx(6.5, abs=1e-3)


def test_gathers_whose_devices_are_busy_hold_up_no_others() -> None:
    """Devices 0 and 1 gather for three ops, 1.5 s each, from 0 s on; devices 2 and 3 for 6 s; devices 1 and 2
    behind that, of whose op nobody has need before. The first op begins at 1.5 s, 3 s before the second; and
    the last sum takes 1.5 s.
    """
    size = {"param_bytes_per_op": round(1.5 * 5e9 * 2)}
    profile = profile_of(
        metaop_of("a/m", 3, {2: 9.0}, **size),
        metaop_of("b/m", 6, {1: 3.0}, parameters="q", parameter_blocks=(0, 1, 2, 3, 4, 5), **size),
        metaop_of("c/m", 1, {1: 3.0}, parameters="q", parameter_blocks=(5,), **size),
        metaop_of("d/m", 1, {1: 0.3}, parameters="r", param_bytes_per_op=6 * 10**10),
        metaop_of("e/m", 1, {1: 0.3}, parameters="r", param_bytes_per_op=6 * 10**10),
        metaop_of("f/m", 1, {1: 18.0}),
    ).model_copy(update={"optimizer_state_sharded": True})
    problem = make_problem(profile, cluster_of(4))
    jobs = ((0, 3, 2, 0.0), (1, 6, 1, 0.0), (5, 1, 1, 0.0), (3, 1, 1, 18.0), (4, 1, 1, 18.0), (2, 1, 1, 27.0))
    candidate = candidate_of(
        problem, *((node, 0, ops, devices, start_s) for node, ops, devices, start_s in jobs)
    )
    prediction = predicted(problem, Placed(candidate, ((0, 1), (2,), (3,), (2,), (3,), (1,))), 30.0)
    assert prediction.gradient_sum_s == pytest.approx(3.0, abs=1e-3)


def test_the_devices_that_have_gathered_least_go_first() -> None:
    """Devices 0 and 1 gather for two ops, 3 s each, devices 1 and 2 for two, 1.5 s each: these go behind the
    first of those, and both ahead of the second: they are there at 6 s, and b has need of them at 6 and 7 s.
    Its 24 s of passes hide all else.
    """
    size = {"parameters": "q", "param_bytes_per_op": round(1.5 * 5e9 * 2)}
    profile = profile_of(
        metaop_of("a/m", 2, {2: 3.0}, param_bytes_per_op=3 * 10**10),
        metaop_of("b/m", 8, {1: 3.0}, parameter_blocks=tuple(range(8)), **size),
        metaop_of("c/m", 2, {1: 3.0}, parameter_blocks=(6, 7), **size),
    ).model_copy(update={"optimizer_state_sharded": True})
    problem = make_problem(profile, cluster_of(3))
    candidate = candidate_of(problem, (0, 0, 2, 2, 0.0), (1, 0, 8, 1, 0.0), (2, 0, 2, 1, 6.0))
    prediction = predicted(problem, Placed(candidate, ((0, 1), (2,), (1,))), 24.0)
    assert prediction.gradient_sum_s == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(("length", "gathers_s"), [(1, 5.0), (6, 4.0)])
def test_over_nccl_gathers_of_a_device_follow_each_other_as_they_are_needed(
    length: int, gathers_s: float
) -> None:
    """Devices 0 and 1 gather for five ops, devices 1 and 2 for the last op of b, which c uses at 5 s, 1.5 s
    each. Where b has one op, which is needed at once, it comes second, and the fifth of the others is there
    at 9 s; where it has six it comes last, and that one is there at 7.5 s. The last sum takes 1.5 s.
    """
    size = {"param_bytes_per_op": round(1.5 * 5e9 * 2)}
    blocks = {"parameters": "q", "parameter_blocks": tuple(range(6 - length, 6))}
    profile = profile_of(
        metaop_of("a/m", 5, {2: 3.0}, **size),
        metaop_of("b/m", length, {1: 3.0}, **blocks, **size),
        metaop_of("c/m", 1, {1: 3.0}, parameters="q", parameter_blocks=(5,), **size),
    ).model_copy(update={"optimizer_state_sharded": True})
    problem = make_problem(profile, cluster_of(3).model_copy(update={"backend": "nccl"}))
    candidate = candidate_of(problem, (0, 0, 5, 2, 0.0), (1, 0, length, 1, 0.0), (2, 0, 1, 1, 15.0))
    prediction = predicted(problem, Placed(candidate, ((0, 1), (2,), (1,))), 18.0)
    assert prediction.gradient_sum_s == pytest.approx(gathers_s + 1.5, abs=1e-3)


def test_what_messages_and_sums_add_is_told_as_a_share_of_the_iteration() -> None:
    assert Prediction(10.0, 5.0, 1.0, 2.0, 0.5, 1.5).beyond_compute == pytest.approx(0.35)
