"""Experts are shared out where their gradients' sums cost more than what is exchanged."""

from __future__ import annotations

import pytest

from helpers.made import made_plan
from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import CurvePoint, Profile

GIB = 2**30
# Seconds of an op by data parallelism on one device and on two, and by two that share out its experts.
ONE_S, TWO_S, EXPERTS_S = 2.0, 1.0, 1.1


def profile(num_experts: int = 4, gibibytes: float = 2.0) -> Profile:
    """Two ops, of whose parameters a tenth is no experts'."""
    num_bytes = int(gibibytes * GIB)
    by_experts = CurvePoint(
        num_devices=2, dp=1, tp=2, forward_s=EXPERTS_S / 3, backward_s=EXPERTS_S * 2 / 3, source="measured"
    )
    metaop = metaop_of("task/layers", 2, {1: ONE_S, 2: TWO_S}, param_bytes_per_op=num_bytes)
    return profile_of(
        metaop.model_copy(
            update={
                "curve": (*metaop.curve, by_experts),
                "whole_param_bytes_per_op": num_bytes // 10,
                "num_experts": num_experts,
            }
        )
    )


def split_of(made_for: Profile, strategy: StrategyName = "spindle") -> tuple[int, int, str]:
    plan = made_plan(made_for, cluster_of(2, memory_gib=64), strategy)
    assert check_plan(plan, made_for) == ()
    (piece,) = plan.slices
    return piece.dp, piece.tp, " ".join(plan.notes)


def test_heavy_experts_are_shared_out_although_their_passes_take_longer() -> None:
    """Of x GiB an op, two ops' gradients take 2 x 0.215 x s at 5 GB/s, half of it behind the passes; shared
    out, a tenth of that, but 0.2 s more in the passes: as long as 0.193 x s at x = 1.035.
    """
    assert split_of(profile(gibibytes=1.03)) == (
        2,
        1,
        "No better plan was found than sequential's, so this is it.",
    )
    dp, tp, notes = split_of(profile(gibibytes=1.04))
    assert (dp, tp) == (1, 2)
    assert "Devices share out the experts of task/layers, whose gradients fewer of them sum." in notes


def test_other_layers_are_split_for_memory_alone() -> None:
    assert split_of(profile(num_experts=0))[:2] == (2, 1)


def test_baselines_take_the_fastest_allocation() -> None:
    assert split_of(profile(), "sequential")[:2] == (2, 1)


@pytest.mark.parametrize(("num_experts", "rules"), [(2, []), (1, ["experts"])])
def test_a_device_without_experts_is_a_violation(num_experts: int, rules: list[str]) -> None:
    made_for = profile()
    plan = made_plan(made_for, cluster_of(2, memory_gib=64))
    few = plan.model_copy(
        update={"metaops": tuple(m.model_copy(update={"num_experts": num_experts}) for m in plan.metaops)}
    )
    found = check_plan(few)
    assert [violation.rule for violation in found] == rules
    for violation in found:
        assert violation.value == "tp 2 for 1 experts: 1 devices would have none"
        assert violation.expected == "tp 1 at most"
