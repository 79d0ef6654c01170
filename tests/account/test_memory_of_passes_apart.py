"""What devices hold where passes have an order of their own, by hand."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.account.device_memory import memory_by_pass
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOpProfile, OpMemory
from spindle_cli.units import KIB, MIB

Times = tuple[float, float, float, float]


def at(piece: Slice, times: Times) -> Slice:
    keys = ("start_s", "end_s", "backward_start_s", "backward_end_s")
    return piece.model_copy(update=dict(zip(keys, times, strict=True)))


def handed_over(name: str, num_bytes: int) -> tuple[MetaOpProfile, MetaOpProfile]:
    """A MetaOp that makes so many bytes, and one that takes them; neither keeps or has anything else."""
    nothing = {"parameters": None, "param_bytes_per_op": 0, "activation_bytes_per_op": 0}
    maker = metaop_of(f"{name}/maker", 1, {1: 1.0}, **nothing)
    maker = maker.model_copy(update={"output_bytes": num_bytes})
    taker = metaop_of(f"{name}/taker", 1, {1: 1.0}, inputs=(maker.name,), **nothing)
    return maker, taker.model_copy(update={"output_bytes": 0})


def held(order: str, num_bytes: int) -> list[tuple[int, int]]:
    """MiB of device 1 in each of its passes, and after it: it takes what device 0 makes of some tasks.

    `order`: of its passes, as 'F0 F1 B1 B0'.
    """
    pairs = [handed_over(name, num_bytes) for name in "abc"[: len(order.split()) // 2]]
    slices = []
    for number, (maker, taker) in enumerate(pairs):
        forward, backward = (4.0 + order.split().index(f"{way}{number}") for way in "FB")
        makes = (float(number), number + 1.0, 20.0 - number, 21.0 - number)
        slices.append(at(slice_of(maker, (0, 1), (0,), 0.0), makes))
        takes = (forward, forward + 1, backward, backward + 1)
        slices.append(at(slice_of(taker, (0, 1), (1,), 0.0), takes))
    slices.sort(key=lambda piece: piece.start_s)
    metaops = [metaop for pair in pairs for metaop in pair]
    memory = memory_by_pass(metaops, slices, cluster_of(2), profile_of(*metaops))[1]
    index = {f"{piece.metaop[0]}": number for number, piece in enumerate(slices) if piece.devices == (1,)}
    found = [memory.passes[index["abc"[int(each[1])]], each[0] == "B"] for each in order.split()]
    return [(round(full / 1.01 / MIB), round(after / 1.01 / MIB)) for full, after in found]


def op_that_keeps(cast: int, batch: int) -> OpMemory:
    """MiB whatever the share, and of the whole batch; while it runs it takes no more."""
    kept = (cast * MIB, batch * MIB)
    return OpMemory(kept_bytes=kept, forward_bytes=kept, backward_bytes=(0, 0), first_backward_bytes=(0, 0))


def after_passes_in_turn(
    num_devices: int = 1, sharding: Sharding | None = None, *, recompute: bool = False, **of_net: float
) -> list[int]:
    """MiB beyond what is there between iterations, after each of the passes of two micro-batches of one
    MetaOp and, between them, those of another, which has no parameters.

    A pass of the first keeps 2 MiB of casts and 2 of activations, and makes a gradient of 1 MiB. One of the
    second keeps 10, or recomputes them.
    """
    points = {1: 1.0, 2: 1.0}
    net = metaop_of("a/net", 1, points, param_bytes_per_op=MIB, memory=(op_that_keeps(2, 4),), **of_net)
    other = metaop_of(
        "b/net", 1, points, parameters=None, param_bytes_per_op=0, memory=(op_that_keeps(0, 10),)
    )
    devices = tuple(range(num_devices))
    metaops = [each.model_copy(update={"output_bytes": 0, "inner_output_bytes": 0}) for each in (net, other)]
    slices = [
        at(slice_of(metaop, (0, 1), devices, 0.0), (start, start + 1.0, start + 1.0, start + 2.0))
        for metaop, start in ((metaops[0], 0.0), (metaops[1], 2.0), (metaops[0], 4.0))
    ]
    for index, number in ((0, 0), (2, 1)):
        slices[index] = slices[index].model_copy(update={"micro_batch": number, "micro_batches": 2})
    slices[1] = slices[1].model_copy(update={"recompute": recompute})
    profile = profile_of(*metaops)
    if sharding is not None:
        profile = profile.sharded({net.parameters or net.name: sharding})
    memory = memory_by_pass(metaops, slices, cluster_of(num_devices), profile)[0]
    order = [(index, is_backward) for index in range(3) for is_backward in (False, True)]
    return [round((memory.passes[each][1] - memory.idle_bytes) / 1.01 / MIB) for each in order]


def test_casts_stay_until_the_last_forward_pass_that_uses_them() -> None:
    """The first backward pass leaves its gradient and the casts; with the last one these go."""
    assert after_passes_in_turn() == [4, 1 + 2, 1 + 2 + 10, 1 + 2, 1 + 4, 1]


def test_casts_go_where_memory_is_short_and_of_parameters_that_are_not_trained() -> None:
    assert after_passes_in_turn(recompute=True) == [4, 1, 1, 1, 1 + 4, 1]
    assert after_passes_in_turn(trainable_fraction=0.0) == [4, 0, 10, 0, 4, 0]
    # Of two shares, whose ranges of gradients are there all the time.
    assert after_passes_in_turn(2, Sharding.GRADIENTS) == [3, 0, 5, 0, 3, 0]


def test_what_a_pass_takes_has_its_place_while_the_two_before_it_run() -> None:
    """100 MiB each; the gradient of what a pass took stays when the activation goes, to the step's end."""
    assert held("F0 F1 B1 B0", 100 * MIB) == [(200, 200)] * 4
    assert held("F0 B0 F1 B1", 100 * MIB) == [(200, 200)] * 4
    assert held("F0 B0 F1 B1 F2 B2", 100 * MIB) == [(200, 200)] * 2 + [(300, 300)] * 4
    assert held("F0 F1 B0 B1", 100 * MIB) == [(200, 200)] * 4


def test_what_is_small_has_its_place_from_the_start() -> None:
    """Three activations of 64 KiB and a byte more: only two are posted two passes ahead of the second."""

    def first(num_bytes: int) -> float:
        metaops = [metaop for name in "abc" for metaop in handed_over(name, num_bytes)]
        times = [(0.0, 1.0, 20.0, 21.0), (4.0, 5.0, 5.0, 6.0), (1.0, 2.0, 19.0, 20.0), (7.0, 8.0, 8.0, 9.0)]
        times += [(2.0, 3.0, 18.0, 19.0), (10.0, 11.0, 11.0, 12.0)]
        slices = [
            at(slice_of(each, (0, 1), (0 if each.name.endswith("maker") else 1,), 0.0), own)
            for each, own in zip(metaops, times, strict=True)
        ]
        slices.sort(key=lambda piece: piece.start_s)
        memory = memory_by_pass(metaops, slices, cluster_of(2), profile_of(*metaops))[1]
        index = next(n for n, piece in enumerate(slices) if piece.metaop == "a/taker")
        return memory.passes[index, False][0] / 1.01

    assert first(64 * KIB) == pytest.approx(3 * 64 * KIB, rel=1e-4)
    assert first(64 * KIB + 16) == pytest.approx(2 * (64 * KIB + 16), rel=1e-4)


def test_a_sum_takes_its_buffer_behind_the_last_backward_pass_that_adds_to_it() -> None:
    """Two tasks with the same 1 MiB of parameters on two devices, whose optimizer state is shared by gloo."""
    nothing = {"activation_bytes_per_op": 0, "parameters": "shared"}
    metaops = [metaop_of(f"{name}/net", 1, {2: 1.0}, **nothing) for name in "ab"]
    metaops = [each.model_copy(update={"output_bytes": 0}) for each in metaops]
    profile = profile_of(*metaops).model_copy(update={"optimizer_state_sharded": True})
    one_by_one = [
        at(slice_of(each, (0, 1), (0, 1), 0.0), (at_s, at_s + 1, at_s + 1, at_s + 3))
        for each, at_s in zip(metaops, (0.0, 3.0), strict=True)
    ]
    mirrored = [
        at(one_by_one[0], (0.0, 1.0, 4.0, 6.0)),
        at(one_by_one[1], (1.0, 2.0, 2.0, 4.0)),
    ]
    for slices, first in ((one_by_one, 0), (mirrored, 1)):
        memory = memory_by_pass(metaops, slices, cluster_of(2), profile)[0]
        before, behind = memory.passes[first, True][1], memory.passes[1 - first, True][1]
        assert behind - before == pytest.approx(1.01 * MIB, rel=1e-3)


def test_each_sum_takes_its_buffer_behind_its_own_task_s_backward_pass() -> None:
    """Tasks of 1 and 3 x 1 MiB on two devices, one after the other, their optimizer state shared by gloo."""
    nothing = {"activation_bytes_per_op": 0}
    metaops = [metaop_of(f"{name}/net", count, {2: 1.0}, **nothing) for name, count in (("a", 1), ("b", 3))]
    metaops = [each.model_copy(update={"output_bytes": 0}) for each in metaops]
    profile = profile_of(*metaops).model_copy(update={"optimizer_state_sharded": True})
    slices = [
        at(slice_of(each, (0, each.num_ops), (0, 1), 0.0), (at_s, at_s + 1, at_s + 1, at_s + 3))
        for each, at_s in zip(metaops, (0.0, 3.0), strict=True)
    ]
    memory = memory_by_pass(metaops, slices, cluster_of(2), profile)[0]
    each_pass = [(0, False), (0, True), (1, False), (1, True)]
    behind = [(memory.passes[each][1] - memory.idle_bytes) / 1.01 / MIB for each in each_pass]
    assert behind == pytest.approx([0, 1, 1, 4], abs=1e-3)


def test_passes_that_take_no_time_are_in_the_order_in_which_programs_have_them() -> None:
    """Two tasks at once that keep 1 and 3 MiB, F0 F1 B0 B1; a third that keeps 5 comes before or behind."""
    kept = {"a": 1, "b": 3, "c": 5}

    def after(order: str, third_s: float) -> list[float]:
        metaops = [
            metaop_of(f"{name}/net", 1, {1: 1.0}, activation_bytes_per_op=size * MIB, param_bytes_per_op=0)
            for name, size in kept.items()
        ]
        metaops = [each.model_copy(update={"output_bytes": 0}) for each in metaops]
        times = (1.0, 1.0, third_s)
        slices = [
            at(slice_of(each, (0, 1), (0,), 0.0), (at_s,) * 4)
            for each, at_s in zip(metaops, times, strict=True)
        ]
        slices.sort(key=lambda piece: piece.start_s)
        place = {piece.metaop[0]: index for index, piece in enumerate(slices)}
        memory = memory_by_pass(metaops, slices, cluster_of(1), profile_of(*metaops))[0]
        passes = [memory.passes[place[each[1]], each[0] == "B"] for each in order.split()]
        return [round((left - memory.idle_bytes) / 1.01 / MIB, 3) for _, left in passes]

    assert after("Fa Fb Ba Bb Fc Bc", 2.0) == [1, 4, 3, 0, 5, 0]
    assert after("Fc Bc Fa Fb Ba Bb", 0.0) == [5, 0, 1, 4, 3, 0]
