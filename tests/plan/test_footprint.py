"""What a piece adds to its devices while pieces are placed, term by term, in MiB."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from candidates import candidate_of

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.plan.placing.usage import Footprint, Usage
from spindle_cli.plan.posing import make_problem
from spindle_cli.profile.types import MetaOpProfile, OpMemory, OptimizerBytes

MIB = 2**20


def metaop(name: str, num_ops: int, output_mib: int, **more: Any) -> MetaOpProfile:
    """2 MiB of parameters and 8 MiB of kept activations an op."""
    sizes = {"param_bytes_per_op": 2 * MIB, "activation_bytes_per_op": 8 * MIB}
    made = metaop_of(name, num_ops, {1: 2.0, 2: 1.0}, **(sizes | more))
    return made.model_copy(update={"output_bytes": output_mib * MIB})


def footprint(
    *metaops: MetaOpProfile,
    ops: tuple[int, int],
    devices: int = 2,
    recompute: bool = False,
    selective: bool = False,
    tp: int = 1,
    sharding: ShardingOf | None = None,
    **numbers: Any,
) -> Footprint:
    """Of some ops of the last of these MetaOps."""
    profile = profile_of(*metaops).model_copy(update=numbers)
    problem = make_problem(profile.sharded(sharding or {}), cluster_of(2))
    (piece,) = candidate_of(problem, (len(metaops) - 1, *ops, devices, 0.0)).pieces
    again = 1.0 if recompute else 0.0
    point = replace(piece.point, again=again, selective=selective, dp=devices // tp, tp=tp)
    return Footprint(problem, replace(piece, point=point))


MAKER, OTHER = metaop("a/maker", 1, 6), metaop("a/other", 1, 10)
TAKER: dict[str, Any] = {
    "inputs": ("a/maker", "a/other"),
    "inputs_of_every_op": ("a/other",),
    "inner_output_bytes": 3 * MIB,
    "field_bytes": {0: 2 * MIB, 2: 5 * MIB},
}


@pytest.mark.parametrize(
    ("ops", "output_mib", "kept", "passing"),
    [
        # Two shares: ops' activations, fields, inputs; then inputs, the larger of inner and last output, and
        # half of an op's activations with the gradients of an inner input and an inner output.
        ((0, 4), 4, 4 * 4 + 3.5 + 8, 8 + 2 + 2 + 3),
        ((0, 2), 1, 2 * 4 + 1 + 8, 8 + 1.5 + 2 + 3),
        # From the third op on: the op before and what every op takes; of the fields those of op 2.
        ((2, 4), 4, 2 * 4 + 2.5 + 6.5, 6.5 + 2 + 2 + 3),
        ((3, 4), 4, 4 + 6.5, 6.5 + 2 + 2 + 3),
    ],
)
def test_a_piece_keeps_activations_fields_and_inputs_and_passes_what_one_op_needs(
    ops: tuple[int, int], output_mib: int, kept: float, passing: float
) -> None:
    found = footprint(MAKER, OTHER, metaop("a/taker", 4, output_mib, **TAKER), ops=ops)
    assert (found.kept / MIB, found.passing / MIB) == (kept, passing)


def test_a_piece_that_recomputes_keeps_what_its_ops_hand_on_and_one_op_s_activations() -> None:
    found = footprint(MAKER, OTHER, metaop("a/taker", 4, 4, **TAKER), ops=(0, 4), recompute=True)
    assert found.kept / MIB == 4 * 1.5 + 3.5 + 8
    assert found.passing / MIB == 8 + 2 + (2 + 3) + 4


def test_a_piece_that_recomputes_in_part_keeps_that_and_runs_the_rest_again() -> None:
    """Two shares of ops that keep 8 MiB, or 5 of them, take 9 forward and 2 more backward."""
    sizes = {"kept": 8, "forward": 9, "backward": 2, "first_backward": 2, "selective": 5}
    memory = OpMemory.model_validate({f"{name}_bytes": (0, size * MIB) for name, size in sizes.items()})
    taker = metaop("a/taker", 4, 4, memory=(memory,), selective_share=0.25, **TAKER)
    found = footprint(MAKER, OTHER, taker, ops=(0, 4), recompute=True, selective=True)
    assert found.kept / MIB == 4 * 2.5 + 3.5 + 8
    assert found.passing / MIB == 8 + 2 + 1 + 1.5
    whole = footprint(MAKER, OTHER, taker, ops=(0, 4), recompute=True)
    assert (whole.kept / MIB, whole.passing / MIB) == (4 * 1.5 + 3.5 + 8, 8 + 2 + 1 + 4)


def test_without_inner_outputs_of_their_own_ops_hand_on_what_the_last_does() -> None:
    found = footprint(metaop("a/m", 3, 6), ops=(1, 3))
    assert (found.kept / MIB, found.passing / MIB) == (2 * 4 + 3, 3 + 3 + (2 + 6))


def test_tensor_parallelism_splits_24_of_34_bytes_of_a_guessed_op() -> None:
    """Korthikanti et al. 2022: 10 of 34 bytes of a layer's activations are not split."""
    found = footprint(metaop("a/m", 1, 6, activation_bytes_per_op=34 * MIB), ops=(0, 1), tp=2)
    assert found.kept / MIB == pytest.approx(10 + 24 / 2)
    assert found.passing / MIB == pytest.approx(6 + 22 / 2 + 2 * 6)


def measured(first_op: int, kept: int, forward: int, backward: int, *, tp: int = 1) -> OpMemory:
    """Of the whole batch, in MiB; 1 MiB more of each whatever the share."""
    sizes = {"kept": kept, "forward": forward, "backward": backward, "first_backward": 99}
    numbers = {f"{name}_bytes": (MIB, size * MIB) for name, size in sizes.items()}
    return OpMemory.model_validate({**numbers, "first_op": first_op, "tp": tp})


@pytest.mark.parametrize(
    ("ops", "kept", "passing"),
    [
        ((0, 4), 3 * (1 + 2) + (1 + 10), 1 + 15),  # the last op's backward pass
        ((0, 3), 3 * (1 + 2), 15 - 2),  # a first op's forward pass, beyond what it keeps
        ((2, 4), (1 + 2) + (1 + 10), 1 + 15),
        ((3, 4), 1 + 10, 1 + 15),
    ],
)
def test_measured_ops_take_what_was_measured_of_each(
    ops: tuple[int, int], kept: float, passing: float
) -> None:
    """Two shares; ops 0 to 2 keep 4 MiB and take 30 forward; op 3 keeps 20 and takes 30 backward."""
    memory = (measured(0, 4, 30, 2), measured(3, 20, 21, 30), measured(0, 50, 60, 70, tp=2))
    found = footprint(metaop("a/m", 4, 0, memory=memory), ops=ops)
    assert found.kept / MIB == kept
    assert found.passing / MIB == passing


@pytest.mark.parametrize(
    ("numbers", "tp", "expected"),
    [
        # 3 of 4 parts are trained: parameters, gradients, and twice of them state; op 1 has 4 MiB of glue.
        ({}, 1, (2 * (1 + 0.75 * 3), 6 * (1 + 0.75 * 3))),
        ({"optimizer_state_sharded": True}, 1, (2 * (1 + 0.75 * 2), 6 * (1 + 0.75 * 2))),
        ({"gradient_bytes_per_param": 2.0}, 1, (2 * (1 + 0.75 * 4), 6 * (1 + 0.75 * 4))),
        ({}, 2, ((0.75 + 0.5) * (1 + 0.75 * 3), (0.75 + 4.5) * (1 + 0.75 * 3))),
    ],
)
def test_a_block_takes_its_parameters_gradients_and_state(
    numbers: dict[str, Any], tp: int, expected: tuple[float, ...]
) -> None:
    """On two devices: shares of a batch that share the state, or halves of all but 1/2 MiB an op and glue."""
    sizes = {"whole_param_bytes_per_op": MIB // 2, "extra_param_bytes": {1: 4 * MIB}}
    net = metaop("a/m", 2, 0, trainable_fraction=0.75, **sizes)
    found = footprint(net, ops=(0, 2), tp=tp, **numbers)
    assert [block for block, _ in found.blocks] == [("a/m", 0, tp), ("a/m", 1, tp)]
    assert [num_bytes / MIB for _, num_bytes in found.blocks] == list(expected)
    assert found.parameter_bytes / MIB == sum(expected)


@pytest.mark.parametrize(
    ("level", "whole_share", "per_mib", "passing"),
    [
        # A quarter is frozen. Of the rest: parameters and gradients whole, half of twice as much of state.
        (Sharding.OPTIMIZER, 0.0, 0.25 + 0.75 * (1 + 1 + 1), 0.0),
        (Sharding.GRADIENTS, 0.0, 0.25 + 0.75 * (1 + 0.5 + 1), 2 * 0.75 * 0.5),
        # Of what is frozen half, too, and the other half while it is used.
        (Sharding.PARAMETERS, 0.0, 0.125 + 0.75 * (0.5 + 0.5 + 1), 2 * (0.75 * (0.5 + 0.5) + 0.125)),
        (Sharding.PARAMETERS, 0.5, 0.125 + 0.75 * (0.75 + 0.75 + 1), 2 * (0.75 * (0.25 + 0.25) + 0.125)),
    ],
)
def test_of_a_shared_out_block_a_device_has_its_range_and_two_ops_whole(
    level: Sharding, whole_share: float, per_mib: float, passing: float
) -> None:
    """On two devices; op 1, with 4 MiB of glue, is the larger one: 6 MiB."""
    kept = OptimizerBytes(state_per_param=2.0, whole_share=whole_share)
    settings = {"trainable_fraction": 0.75, "extra_param_bytes": {1: 4 * MIB}, "optimizer": kept}
    net = metaop("a/m", 2, 0, **settings)
    with_levels, plain = (
        footprint(net, ops=(0, 2), optimizer_state_sharded=True, sharding=each)
        for each in ({"a/m": level}, {})
    )
    assert [num_bytes / MIB for _, num_bytes in with_levels.blocks] == [2 * per_mib, 6 * per_mib]
    assert (with_levels.passing - plain.passing) / MIB == 6 * passing


def test_a_device_keeps_all_pieces_each_parameter_once_and_the_largest_of_what_passes() -> None:
    """Each op has 8 MiB of parameters with all that belongs to them."""
    net = metaop("a/m", 3, 2)
    first, second = footprint(net, ops=(0, 2), devices=1), footprint(net, ops=(1, 3), devices=1)
    usage = Usage([80 * MIB] * 2)
    usage.add([0], first)
    assert usage.shared_bytes(0, second) / MIB == 8
    assert usage.shared_bytes(1, second) == 0
    assert (first.kept / MIB, second.kept / MIB) == (16, 18)
    assert (first.passing / MIB, second.passing / MIB) == (2 + 8, 2 + 2 + 8)
    assert usage.after(0, second) / MIB == (16 + 16) + (18 + 8) + 12
    assert usage.after(1, second) / MIB == 18 + 16 + 12
    usage.add([0, 1], second)
    assert usage.after(0, first) / MIB == 32 + 26 + 16 + 12
    usage.add([1], first)
    assert usage.after(1, second) / MIB == (18 + 16) + (16 + 8) + 18 + 12


def test_of_parts_that_run_one_at_a_time_the_one_that_keeps_most_counts() -> None:
    """Each op has 8 MiB of parameters with all that belongs to them, and keeps 8."""
    net = metaop("a/m", 3, 2)
    small, large = footprint(net, ops=(0, 1), devices=1), footprint(net, ops=(0, 3), devices=1)
    small.part, large.part = 0, 1
    usage = Usage([80 * MIB], one_part_at_once=True)
    usage.add([0], large)
    kept = large.kept + large.parameter_bytes
    passing = max(small.passing, large.passing)
    assert usage.after(0, small) == kept + passing
    usage.add([0], small)
    assert usage.after(0, small) == kept + passing
    assert usage.after(0, large) == kept + large.kept + passing
    assert small.kept < large.kept
    for _ in range(3):
        usage.add([0], small)
    assert usage.after(0, small) == large.parameter_bytes + max(large.kept, 5 * small.kept) + passing


def test_a_piece_fits_until_it_takes_a_byte_too_many() -> None:
    piece = footprint(metaop("a/m", 1, 2), ops=(0, 1), devices=1)
    needed = round(Usage([0]).after(0, piece))
    assert Usage([needed]).fits(0, piece)
    assert not Usage([needed - 1]).fits(0, piece)
