"""The fit of a scaling curve between the points that were timed."""

from __future__ import annotations

from spindle_cli.files.artifact import Model


class FitSegment(Model):
    """One segment of the piecewise alpha-beta fit.

    T(n) = alpha_s + beta_s + gamma_s / n for from_n <= n <= to_n.
    """

    from_n: int
    to_n: int
    alpha_s: float
    beta_s: float
    gamma_s: float


class Fit(Model):
    """The fitted curve and how far it is off: leave a measured point out, predict it, relative error."""

    segments: tuple[FitSegment, ...]
    leave_one_out_error: float | None = None  # median over the points; None with too few to leave one out
    worst_error: float | None = None
