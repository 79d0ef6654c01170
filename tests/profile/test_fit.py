"""Fitting a scaling curve between and beyond its measured points."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spindle_cli.profile.fit import (
    choose_measured,
    fit_curve,
    fitted_point,
    leave_one_out_errors,
    non_decreasing,
    non_increasing,
    predict_s,
)
from spindle_cli.profile.types import CurvePoint


def point(n: int, op_s: float, forward_share: float = 0.25) -> CurvePoint:
    return CurvePoint(
        num_devices=n,
        dp=n,
        forward_s=op_s * forward_share,
        backward_s=op_s * (1 - forward_share),
        source="measured",
    )


def test_a_curve_of_fixed_plus_divided_time_is_recovered_exactly() -> None:
    points = [point(n, 0.002 + 0.016 / n) for n in (1, 2, 4, 8)]
    fit = fit_curve(points, 8)
    assert fit is not None
    for segment in fit.segments:
        assert segment.alpha_s == pytest.approx(0.002)
        assert segment.gamma_s == pytest.approx(0.016)
    assert fit.leave_one_out_error == pytest.approx(0, abs=1e-9)
    for n in (3, 5, 6, 7):
        assert predict_s(fit.segments, n) == pytest.approx(0.002 + 0.016 / n)


def test_leave_one_out_error_is_the_distance_of_the_point_left_out() -> None:
    # Through (1, 4) and (4, 1) alone goes 0 + 4 / n: 2 where 2.5 was measured.
    assert leave_one_out_errors([point(1, 4), point(2, 2.5), point(4, 1)]) == [pytest.approx(0.2)]


def test_two_points_leave_none_to_leave_out_and_one_gives_no_fit() -> None:
    fit = fit_curve([point(1, 4), point(2, 2)], 2)
    assert fit is not None and fit.leave_one_out_error is None
    assert fit_curve([point(1, 4)], 1) is None


def test_a_point_that_rises_is_averaged_with_its_neighbour() -> None:
    fit = fit_curve([point(1, 4), point(2, 1), point(4, 3)], 4)
    assert fit is not None
    assert predict_s(fit.segments, 2) == pytest.approx(2)
    assert predict_s(fit.segments, 4) == pytest.approx(2)


def test_beyond_the_last_point_time_shrinks_no_faster_than_work_divides() -> None:
    superlinear = fit_curve([point(1, 4), point(2, 1)], 8)
    assert superlinear is not None
    assert predict_s(superlinear.segments, 4) == pytest.approx(0.5)
    flattening = fit_curve([point(1, 4), point(2, 3)], 8)
    assert flattening is not None
    assert predict_s(flattening.segments, 4) == pytest.approx(2.5)


@given(st.lists(st.floats(1e-6, 10), min_size=2, max_size=8), st.integers(0, 3))
def test_a_fit_is_positive_and_never_rises(times: list[float], further: int) -> None:
    points = [point(2**power, op_s) for power, op_s in enumerate(times)]
    last = points[-1].num_devices * 2**further
    fit = fit_curve(points, last)
    assert fit is not None
    predicted = [predict_s(fit.segments, n) for n in range(1, last + 1)]
    assert all(value > 0 for value in predicted)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(predicted))


def test_a_fitted_point_is_split_into_forward_and_backward_as_its_neighbours() -> None:
    points = [point(1, 4, forward_share=0.5), point(4, 1, forward_share=0.25)]
    fit = fit_curve(points, 4)
    assert fit is not None
    fitted = fitted_point(points, fit, 2)
    assert fitted.source == "fitted"
    assert fitted.op_s == pytest.approx(2)
    assert fitted.forward_s / fitted.op_s == pytest.approx((2 + 0.25) / 5)


@given(st.sets(st.integers(1, 4096), min_size=1, max_size=40), st.integers(2, 10))
def test_measured_points_are_few_and_have_both_ends(valid: set[int], limit: int) -> None:
    ordered = sorted(valid)
    chosen = choose_measured(ordered, limit)
    assert set(chosen) <= valid and list(chosen) == sorted(chosen)
    assert chosen[0] == ordered[0] and chosen[-1] == ordered[-1]
    assert len(chosen) <= limit or len(valid) <= limit


@given(st.lists(st.floats(0, 100), max_size=12))
def test_monotone_sequences_keep_the_mean_and_what_is_already_monotone(values: list[float]) -> None:
    down = non_increasing(values)
    assert down == sorted(down, reverse=True)
    assert sum(down) == pytest.approx(sum(values))
    assert non_decreasing(sorted(values)) == sorted(values)
