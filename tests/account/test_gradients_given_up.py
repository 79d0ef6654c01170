"""What slices take in has gradients on their devices until those that have made it have run backward."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.account.device_memory import memory_by_pass
from spindle_cli.account.types import Pass
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOpProfile
from spindle_cli.units import MIB

SIZE = 96 * MIB  # of what the first MetaOp makes of a batch


def chain(*names: str, **more: object) -> list[MetaOpProfile]:
    """MetaOps of an op each, each of which takes what the one before makes."""
    found: list[MetaOpProfile] = []
    for name in names:
        inputs = (found[-1].name,) if found else ()
        metaop = metaop_of(f"t/{name}", 1, {1: 1.0}, inputs=inputs, activation_bytes_per_op=0, **more)
        found.append(metaop.model_copy(update={"output_bytes": SIZE}))
    return found


def cut(metaop: MetaOpProfile, device: int, times: list[tuple[int, int]]) -> list[Slice]:
    """A slice for each micro-batch; `times`: when they run forward and backward, for a second each."""
    whole = slice_of(metaop, (0, 1), (device,), 0.0)
    return [
        whole.model_copy(
            update={
                "start_s": float(forward),
                "end_s": forward + 1.0,
                "backward_start_s": float(backward),
                "backward_end_s": backward + 1.0,
                "micro_batch": number,
                "micro_batches": len(times),
            }
        )
        for number, (forward, backward) in enumerate(times)
    ]


def after(metaops: list[MetaOpProfile], slices: list[Slice], device: int) -> list[int]:
    """MiB that a device has beside what lasts, after each of its passes in their order."""
    memory = memory_by_pass(metaops, slices, cluster_of(2), profile_of(*metaops))[device]
    starts = {(index, False): piece.start_s for index, piece in enumerate(slices)}
    starts |= {(index, True): piece.backward_start_s or 0.0 for index, piece in enumerate(slices)}
    order = sorted(memory.passes, key=lambda each: starts[each])
    return [round((memory.passes[each][1] - memory.idle_bytes) / MIB / 1.01) for each in order]


@pytest.mark.parametrize("count", [3, 6])
def test_gradients_that_are_sent_do_not_add_up_over_micro_batches(count: int) -> None:
    """Two stages. Behind each backward pass a device has its gradient and the one before, which the first
    stage begins to take when that pass begins and has two passes later; and for each pass that comes what it
    takes, beside a MiB of parameters' gradients.
    """
    first, second = chain("a", "b")
    slices = cut(first, 0, [(2 * number, 2 * number + 5) for number in range(count)])
    slices += cut(second, 1, [(2 * number + 2, 2 * number + 3) for number in range(count)])
    found, share = after([first, second], slices, 1), 96 // count
    behind_backward = found[1::2]
    assert behind_backward == [1 + 2 * share, *[1 + 3 * share] * (count - 2), 1 + 2 * share]


def test_what_has_run_backward_on_the_same_device_has_taken_its_gradient() -> None:
    """Of four in a row on one device, each takes the gradient of the next: one is there, not three."""
    metaops = chain("a", "b", "c", "d")
    slices = [slice_of(metaop, (0, 1), (0,), float(number)) for number, metaop in enumerate(metaops)]
    memory = memory_by_pass(metaops, slices, cluster_of(1), profile_of(*metaops))[0]
    behind = [
        round((memory.passes[piece, True][1] - memory.idle_bytes) / MIB / 1.01) for piece in (3, 2, 1, 0)
    ]
    # With a MiB of parameters' gradients each; a pass behind which there is another leaves what it has taken
    # until that begins.
    assert behind == [1 + 96, 2 + 2 * 96, 3 + 2 * 96, 4 + 96]


def test_what_a_pass_takes_is_there_while_it_runs() -> None:
    metaops = chain("a", "b")
    first, second = metaops
    slices = [*cut(first, 0, [(0, 3)]), *cut(second, 1, [(1, 2)])]
    assert Pass(1, is_backward=True) == (1, True)
    assert after(metaops, slices, 1) == [96, 97]
