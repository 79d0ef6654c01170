"""What slices hold at their edges where devices have a part of the sequence each, computed by hand."""

from __future__ import annotations

from test_device_memory import MIB, gpus, mib, model, needs_of, op, slice_of


def test_a_slice_keeps_all_of_what_its_ops_have_a_part_of_at_its_edges() -> None:
    """3 ops over 2 devices keep 1 MiB; of what they hand on, 4 MiB in all, each has a half. A slice has
    a half of what it was given, and all of what it hands on, besides.
    """
    net = model("a/m", 3, op(kept=1, forward=1, tp=2, joined_bytes=4 * MIB))
    (need, _) = needs_of([net], [slice_of("a/m", (0, 3), [0, 1], 1, tp=2)], gpus(2))
    assert mib(need.activation_bytes) == (3 * 1 + 4 / 2 + 4,)
    halves = [slice_of("a/m", (0, 1), [0, 1], 1, tp=2), slice_of("a/m", (1, 3), [2, 3], 1, tp=2, start_s=1)]
    first, _, second, _ = needs_of([net], halves, gpus(4))
    assert mib(first.activation_bytes, second.activation_bytes) == (1 + 6, 2 + 6)
    # The last op hands on nothing that is shared: it joins its stream by itself.
    last = op(kept=1, forward=1, tp=2, first_op=2)
    net = model("a/m", 3, op(kept=1, forward=1, tp=2, joined_bytes=4 * MIB), last)
    (need, _) = needs_of([net], [slice_of("a/m", (0, 3), [0, 1], 1, tp=2)], gpus(2))
    assert mib(need.activation_bytes) == (3 * 1 + 4 / 2,)


def test_recomputed_ops_keep_their_part_of_what_goes_in() -> None:
    def kept(joined: int) -> float:
        net = model("a/m", 3, op(kept=1, forward=1, tp=2, joined_bytes=joined * MIB))
        net = net.model_copy(update={"output_bytes": 4 * MIB, "inner_output_bytes": 4 * MIB})
        whole = slice_of("a/m", (0, 3), [0, 1], 1, tp=2, recompute=True)
        return needs_of([net], [whole], gpus(2))[0].activation_bytes

    # Inputs of three ops; all of the last one's output, while it is kept, and while it is recomputed.
    assert mib(round(kept(0) - kept(4))) == (3 * 4 - (3 * 4 / 2 + 4),)


def test_what_a_slice_keeps_at_its_edges_goes_with_its_backward_pass() -> None:
    """Two tasks as above on the same devices, each forward and then backward: never more than of one."""
    nets = [model(f"{task}/m", 3, op(kept=1, forward=1, tp=2, joined_bytes=4 * MIB)) for task in "ab"]
    slices = [
        slice_of(
            net.name,
            (0, 3),
            [0, 1],
            1,
            tp=2,
            start_s=at_s,
            backward_start_s=at_s + 1,
            backward_end_s=at_s + 2,
        )
        for net, at_s in zip(nets, (0, 2), strict=True)
    ]
    (need, _) = needs_of(nets, slices, gpus(2))
    assert mib(need.activation_bytes) == (3 * 1 + 4 / 2 + 4,)
