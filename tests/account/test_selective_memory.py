"""What a device holds of ops that are recomputed but for what takes longest."""

from __future__ import annotations

import pytest
from test_device_memory import MIB, mib, model, needs_of, op, slice_of

from helpers.plans import cluster_of
from spindle_cli.profile.types import OpMemory


@pytest.mark.parametrize(("forward", "running"), [(4, 3 + 2), (5, 5), (6, 6)])
def test_recomputing_but_for_what_takes_longest_keeps_that_and_runs_the_rest_beside_it(
    forward: int, running: int
) -> None:
    """Ten ops keep 2 of 3 MiB, 1 of which is their output; the last one, running again, has that once more
    and all that it takes forward and backward, but for what it has kept.
    """
    kept = op(kept=3, forward=forward, backward=2, selective_bytes=(0, 2 * MIB))
    net = model("a/m", 10, kept, param_bytes_per_op=0, selective_share=0.25)
    net = net.model_copy(update={"output_bytes": MIB})
    slices = [
        slice_of("a/m", (0, 4), [0], 1, recompute=True, selective=True),
        slice_of("a/m", (4, 10), [0], 1, recompute=True, selective=True, start_s=1),
    ]
    (need,) = needs_of([net], slices, cluster_of(1))
    states = 10 * 5056 / MIB
    assert mib(need.activation_bytes) == (round(10 * 2 + 1 + running - 2 + states, 4),)


@pytest.mark.parametrize(("selective", "casts"), [(False, 3), (True, 0)])
def test_parameters_cast_for_ops_that_keep_them_come_on_top_of_nothing(selective: bool, casts: int) -> None:
    """Of what three ops keep, 1 MiB is there whatever the share: parameters in a narrow type. Autocast has
    those of recomputed ops until their forward passes are through; kept ones are counted as kept.
    """
    cast = {"kept_bytes": (MIB, 0), "forward_bytes": (6 * MIB, 0), "backward_bytes": (0, 0)}
    kept = OpMemory(**cast, first_backward_bytes=(0, 0), selective_bytes=(MIB, 0))
    net = model("a/m", 3, kept, param_bytes_per_op=0, selective_share=0.25)
    (need,) = needs_of(
        [net], [slice_of("a/m", (0, 3), [0], 1, recompute=True, selective=selective)], cluster_of(1)
    )
    before = 2 if selective else 0  # kept of the ops before the last one, which takes most
    assert mib(need.activation_bytes) == (
        round(6 + casts + before + (3 if selective else 2) * 5056 / MIB, 4),
    )
