"""Reports of verifications, for tests of what is made of them."""

from __future__ import annotations

from spindle_cli.verify.types import ArithmeticName, Check, Difference, VerifyReport, What


def report_of(
    what: What,
    failures: tuple[Difference, ...],
    dtype: ArithmeticName = "float32",
    explained: tuple[Difference, ...] = (),
    within: tuple[Difference, ...] = (),
) -> VerifyReport:
    """Of one check, by what is beyond the tolerance, what of that rounding explains, and what is within."""
    largest = (*failures, *explained, *within)[0]
    check = Check(
        what=what, compared=1, tolerance=1e-5, largest=largest, failures=failures, explained=explained
    )
    return VerifyReport(
        same=not failures,
        workload="w",
        strategy="spindle",
        workers=1,
        steps=1,
        dtype=dtype,
        checks=(check,),
        noise_floor=1e-6,
        noise=(),
        unused=(),
    )
