"""When parameters are predicted to be updated, part by part, worked out by hand."""

from __future__ import annotations

import pytest
from candidates import candidate_of, predicted, problem_of

from helpers.plans import cluster_of, metaop_of
from spindle_cli.account.types import ParameterGroup
from spindle_cli.costs.links import all_reduce_s
from spindle_cli.plan.placing.predict import Kinds, Prediction, SumEnd, updated_s
from spindle_cli.plan.schedule import Placed
from spindle_cli.profile.points import CurvePoint

MIB = 2**20
FOUR = 4 * MIB


def group(
    index: int, num_bytes: int, devices: tuple[int, ...] = (0, 1), product_s: float = 0.0
) -> ParameterGroup:
    blocks = ((f"p{index}", 0),)
    return ParameterGroup(
        index, devices, blocks, num_bytes, num_bytes, (0,), (0,), (0, 1), product_s=product_s
    )


def ends_of(
    passed_s: float, steps_s: tuple[float, float], *, own: int = 0, product_s: float = 0.0
) -> list[float]:
    """Of two devices, the second of which has `own` bytes besides; sums of 4, 8 and 4 MiB end at 10, 12 and
    20 s.
    """
    sums = [
        SumEnd(group(2, FOUR), 10.0),
        SumEnd(group(0, 2 * FOUR, product_s=product_s), 12.0),
        SumEnd(group(1, FOUR), 20.0),
    ]
    groups = [group(3, own, (1,)), *(each.group for each in sums)]
    return updated_s(groups, [passed_s] * 2, sums, steps_s, Kinds([0, 0], {(0, 1): [0]}))


@pytest.mark.parametrize(
    ("passed_s", "end_s"),
    [
        (9.0, 21.0),  # at 10, 12 and 20 s, for 1, 2 and 1 s
        (17.0, 21.0),  # 17 to 18, to 20: then the last sum has just ended
        (17.5, 21.5),  # half a second beyond it
        (30.0, 34.0),
    ],
)
def test_each_part_waits_for_the_one_before_it_and_for_its_own_sums(passed_s: float, end_s: float) -> None:
    assert ends_of(passed_s, (4.0, 4.0)) == [end_s, end_s]


def test_parts_are_those_of_each_device() -> None:
    """Of 20 MiB the second one updates 4 without a sum, at 9 s or behind its passes, for 1 s; a step of 40 s
    takes 8 s for these, 8, 16 and 8 s for the others.
    """
    assert ends_of(9.0, (4.0, 5.0), own=FOUR) == [21.0, 21.0]
    assert ends_of(16.5, (4.0, 5.0), own=FOUR) == [21.0, 21.5]
    assert ends_of(9.0, (4.0, 40.0), own=FOUR) == [21.0, 49.0]
    # One byte less, and they are updated with the first sum, at 10 s.
    assert ends_of(9.0, (4.0, 40.0), own=FOUR - 1)[1] == pytest.approx(50.0, abs=1e-5)


def test_products_of_factors_are_made_in_their_part() -> None:
    assert ends_of(9.0, (4.0, 4.0), product_s=5.0) == [21.0, 21.0]  # 12 to 19 s
    assert ends_of(9.0, (4.0, 4.0), product_s=6.5) == [21.5, 21.5]


def prediction_of(**training: object) -> Prediction:
    """Two ops of 40 MiB on two devices, 3 s forward and 6 s backward, and a step of 2 s for 80 MiB."""
    net = metaop_of("a/m", 2, {2: 4.5}, param_bytes_per_op=40 * MIB)
    problem = problem_of(cluster_of(2), net, **training)
    return predicted(problem, Placed(candidate_of(problem, (0, 0, 2, 2, 0.0)), ((0, 1),)), 9.0, step_s=2.0)


def test_the_last_part_alone_is_behind_all_sums() -> None:
    """The second op's sum hides in the pass, and its update of 1 s lasts longer than the first op's sum."""
    sum_s = all_reduce_s(40 * MIB, (0, 1), cluster_of(2))
    whole, apart = prediction_of(), prediction_of(updates_by_parts=True)
    assert whole.iteration_s == pytest.approx(9.0 + sum_s + 2.0)
    assert apart.iteration_s == pytest.approx(9.0 + 2.0)
    assert (apart.gradient_sum_s, apart.optimizer_s) == (pytest.approx(sum_s), pytest.approx(2.0 - sum_s))


@pytest.mark.parametrize("more", ["clips_gradients", "scales_losses", "optimizer_state_sharded"])
def test_all_is_updated_at_once_where_all_gradients_are_awaited(more: str) -> None:
    """Whatever the plan says of parts."""
    assert prediction_of(**{more: True, "updates_by_parts": True}) == prediction_of(**{more: True})


def test_the_first_part_waits_for_the_losses() -> None:
    """Seven numbers of 8 bytes, twice around; a pass of the other device runs forward until 9 s, and backward
    for no time.
    """
    point = CurvePoint(num_devices=1, dp=1, forward_s=9.0, backward_s=0.0, source="measured")
    own = metaop_of("a/m", 1, {1: 3.0}, param_bytes_per_op=40 * MIB)
    late = metaop_of("b/m", 1, {1: 9.0}).model_copy(update={"curve": (point,)})
    problem = problem_of(cluster_of(2), own, late, updates_by_parts=True)
    placed = Placed(candidate_of(problem, (0, 0, 1, 1, 0.0), (1, 0, 1, 1, 0.0)), ((0,), (1,)))
    losses_s = all_reduce_s(8 * 7, (0, 1), cluster_of(2))
    assert predicted(problem, placed, 9.0, step_s=20.0).iteration_s == pytest.approx(
        29.0 + losses_s, abs=1e-9
    )
