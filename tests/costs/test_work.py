"""Operations of a step, where some of what is planned is frozen: by hand."""

from __future__ import annotations

from spindle_cli.costs.flops import flops_by_metaop
from spindle_cli.plan.types import PlanMetaOp


def metaop(name: str, flops: float | None, *inputs: str, trained: float = 1.0, size: int = 8) -> PlanMetaOp:
    return PlanMetaOp(
        name=name,
        task="t",
        num_ops=2,
        batch_size=4,
        inputs=inputs,
        param_bytes_per_op=size,
        trainable_fraction=trained,
        flops_per_op=flops,
    )


def test_what_is_trained_takes_three_times_its_forward_operations() -> None:
    assert flops_by_metaop([metaop("a", 10.0), metaop("b", 5.0, "a")]) == {"a": 60.0, "b": 30.0}


def test_frozen_parameters_take_none_of_their_own_and_none_at_all_before_what_trains() -> None:
    chain = [
        metaop("loss", 1.0, "top", size=0),  # listed out of order
        metaop("frozen", 10.0, trained=0.0),
        metaop("behind it", 7.0, "frozen", size=0),
        metaop("trained", 4.0, "behind it"),
        metaop("adapted", 8.0, "trained", trained=0.25),
        metaop("top", 3.0, "adapted", trained=0.0),
    ]
    assert flops_by_metaop(chain) == {
        "loss": 2 * 1.0 * 3,  # both of what it multiplies takes a gradient
        "frozen": 2 * 10.0,
        "behind it": 2 * 7.0,
        "trained": 2 * 4.0 * 3,
        "adapted": 2 * 8.0 * 2.25,
        "top": 2 * 3.0 * 2,
    }


def test_of_two_inputs_one_that_trains_is_enough() -> None:
    both = [metaop("a", 1.0, trained=0.0), metaop("b", 1.0), metaop("c", 1.0, "a", "b", trained=0.0)]
    assert flops_by_metaop(both) == {"a": 2.0, "b": 6.0, "c": 4.0}


def test_glue_with_parameters_alone_is_an_op_with_parameters() -> None:
    glued = metaop("a", 1.0, trained=0.5, size=0).model_copy(update={"extra_param_bytes": {1: 4}})
    assert flops_by_metaop([glued]) == {"a": 2 * 2.5}


def test_what_is_not_counted_is_not_guessed() -> None:
    assert flops_by_metaop([metaop("a", 1.0), metaop("b", None)]) is None
