"""What ops of several keys use: devices hold it once, sum it once, and gather it where all are shared out."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.traffic import groups_of, uses_of
from spindle_cli.costs.links import all_gather_s
from spindle_cli.costs.parameters import BlockUse, blocks_of, moved_in_passes
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.best.sharding import require_sound
from spindle_cli.plan.placing.usage import Footprint
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback
from spindle_cli.plan.schedule import UnplacedSlice
from spindle_cli.plan.search.memory_fallback import least_bytes
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOpProfile, OpMemory, Profile
from spindle_cli.units import MIB

PARAMETERS = Sharding.PARAMETERS
KEYS = ("a/net", "b/head")
NOTHING = OpMemory.model_validate(
    {f"{name}_bytes": (0, 0) for name in ("kept", "forward", "backward", "first_backward")}
)


def tied(op: int, num_bytes: float = 4 * MIB, **more: Any) -> dict[str, Any]:
    return {"op": op, "parameter": "words", "num_bytes": round(num_bytes), "keys": KEYS, **more}


def made(name: str, num_ops: int, *own: dict[str, Any], **more: Any) -> MetaOpProfile:
    """Ops of 1 MiB that keep nothing; what they are tied to is glue of theirs."""
    settings = {
        "extra_param_bytes": {each["op"]: each["num_bytes"] for each in own},
        "tied": own,
        "memory": (NOTHING,),
        "activation_bytes_per_op": 0,
        **more,
    }
    return metaop_of(name, num_ops, {1: 3.0, 2: 3.0, 4: 3.0}, **settings)


def pair(**more: Any) -> tuple[MetaOpProfile, MetaOpProfile]:
    """4 MiB of words, which the first op of one task and the only op of another use."""
    return made("a/net", 2, tied(0), **more), made("b/head", 1, tied(0), **more)


def shared(*metaops: MetaOpProfile, **more: Any) -> Profile:
    return profile_of(*metaops).model_copy(update={"optimizer_state_sharded": True, **more})


def lasting(profile: Profile, *slices: Slice) -> list[tuple[float, float]]:
    """MiB of each device's parameters and optimizer state."""
    cluster = cluster_of(4).model_copy(update={"backend": "nccl"})
    found = device_memory(profile.metaops, slices, cluster, profile)
    return [(each.parameter_bytes / MIB, each.optimizer_bytes / MIB) for each in found]


def test_what_an_op_is_tied_to_is_a_block_apart() -> None:
    a, b = pair()
    words = BlockUse(("words", 0, False), 4 * MIB, 4 * MIB, tied_keys=KEYS)
    assert blocks_of(a, 0) == (BlockUse(("a/net", 0, True), MIB, MIB), words)
    assert blocks_of(a, 1) == (BlockUse(("a/net", 1, True), MIB, MIB),)
    assert blocks_of(b, 0)[1] == words


def test_it_is_taken_from_where_it_lies_and_what_is_left_of_the_op_is_trained_as_far_as_it_was() -> None:
    """Glue of 3 MiB that is split (1 of them tied) and 5 that is not (4 tied), half of 9 MiB trained: of what
    is tied the 4 are, which leaves half a MiB for the rest.
    """
    own = (
        tied(0, MIB, parameter="split", is_split=True, is_split_by_any=True, is_trained=False),
        tied(0, 4 * MIB),
    )
    op = made(
        "a/net",
        1,
        *own,
        extra_param_bytes={0: 8 * MIB},
        split_extra_param_bytes={0: 3 * MIB},
        trainable_fraction=0.5,
    )
    split, whole, *apart = blocks_of(op, 0)
    assert [use.block for use in apart] == [("split", 0, True), ("words", 0, False)]
    assert [use.trained_bytes for use in apart] == [0, 4 * MIB]
    assert (split.num_bytes, whole.num_bytes) == (3 * MIB, MIB)
    # 4 of 5 MiB of what is apart are trained: 4/5 of 1 are taken from the split half, and of 4 from the rest.
    assert split.trained_bytes == pytest.approx((0.5 * 4 - 0.8) * MIB)
    assert whole.trained_bytes == 0


def test_a_device_holds_it_once_and_shares_its_state_with_all_that_hold_it() -> None:
    """2 of state for each byte: of 4 MiB of words over three devices, and of each op's own over its own."""
    a, b = pair()
    profile = shared(a, b, optimizer_state_per_param=2.0)
    both = lasting(profile, slice_of(a, (0, 2), (0,), 0.0), slice_of(b, (0, 1), (0,), 6.0))
    assert both[0] == pytest.approx((7, 14))
    apart = lasting(profile, slice_of(a, (0, 2), (0, 1), 0.0), slice_of(b, (0, 1), (2,), 0.0))
    words = 2 * 4 / 3
    assert apart == [pytest.approx(each) for each in ((6, 2 + words), (6, 2 + words), (5, 2 + words), (0, 0))]


def test_it_is_summed_once_over_all_that_hold_it() -> None:
    a, b = pair()
    waves = [[slice_of(a, (0, 2), (0, 1), 0.0), slice_of(b, (0, 1), (2,), 0.0)]]
    plan = plan_of(profile_of(a, b), cluster_of(4), waves)
    groups = groups_of(plan, (1, 0), uses_of(plan))
    sums = [(group.devices, group.num_bytes) for group in groups if len(group.devices) > 1]
    assert sorted(sums) == [((0, 1), MIB), ((0, 1), MIB), ((0, 1, 2), 4 * MIB)]
    (words,) = [group for group in groups if group.devices == (0, 1, 2)]
    assert (words.blocks, words.slices) == ((("words (whole)", 0),), (0, 1))


def test_an_op_that_uses_all_of_what_others_split_joins_it() -> None:
    """Of 4 MiB, the devices that run the head on two parts hold 2 each; the one that looks words up, all,
    and a copy of all while its op runs.
    """
    split = {"is_split_by_any": True}
    a = made("a/net", 1, tied(0, **split), memory=(NOTHING, NOTHING.model_copy(update={"tp": 2})))
    b = made(
        "b/head",
        1,
        tied(0, is_split=True, **split),
        split_extra_param_bytes={0: 4 * MIB},
        memory=(NOTHING, NOTHING.model_copy(update={"tp": 2})),
    )
    head = slice_of(b, (0, 1), (0, 1), 0.0).model_copy(update={"dp": 1, "tp": 2})
    profile = shared(a, b)
    looks_up = slice_of(a, (0, 1), (2,), 0.0)
    assert [each for each, _ in lasting(profile, head, looks_up)] == pytest.approx([2.5, 2.5, 5, 0])
    cluster = cluster_of(4).model_copy(update={"backend": "nccl"})
    joined, alone = (
        device_memory(profile.metaops, slices, cluster, profile)[2].activation_bytes
        for slices in ((head, looks_up), (looks_up,))
    )
    assert joined - alone == pytest.approx(4 * MIB)


def test_a_slice_in_parts_joins_what_it_uses_whole_for_each_of_its_devices() -> None:
    """Two devices look words up in all of 4 MiB, with their layer in two parts; two others have a head over a
    half of the words each, whose sums are over three devices.
    """
    both = (NOTHING, NOTHING.model_copy(update={"tp": 2}))
    a = made("a/net", 1, tied(0, is_split_by_any=True), memory=both)
    split = tied(0, is_split=True, is_split_by_any=True)
    b = made("b/head", 1, split, split_extra_param_bytes={0: 4 * MIB}, memory=both)
    in_parts = {"dp": 1, "tp": 2}
    looks_up = slice_of(a, (0, 1), (0, 1), 0.0).model_copy(update=in_parts)
    head = slice_of(b, (0, 1), (2, 3), 0.0).model_copy(update=in_parts)
    profile, cluster = shared(a, b), cluster_of(4).model_copy(update={"backend": "nccl"})
    assert [each for each, _ in lasting(profile, looks_up, head)] == pytest.approx([4.5, 4.5, 2.5, 2.5])
    joined, alone = (
        device_memory(profile.metaops, slices, cluster, profile)[1].activation_bytes
        for slices in ((looks_up, head), (looks_up,))
    )
    assert joined - alone == pytest.approx(4 * MIB)
    plan = plan_of(profile, cluster_of(4), [[looks_up, head]])
    sums = [group.devices for group in groups_of(plan, (1, 0), uses_of(plan)) if len(group.devices) > 1]
    assert sorted(sums) == [(0, 1, 2), (0, 1, 3)]


@pytest.mark.parametrize("whole", [0, 1])
def test_a_slice_that_uses_parts_of_it_and_all_of_it_holds_all(whole: int) -> None:
    """Both devices hold the 4 MiB, of whose state each then keeps a half."""
    both = (NOTHING, NOTHING.model_copy(update={"tp": 2}))
    split = {"is_split": True, "is_split_by_any": True}
    own = tied(whole, is_split_by_any=True), tied(1 - whole, **split)
    a = made("a/net", 2, *own, split_extra_param_bytes={1 - whole: 4 * MIB}, memory=both)
    piece = slice_of(a, (0, 2), (0, 1), 0.0).model_copy(update={"dp": 1, "tp": 2})
    found = lasting(shared(a, optimizer_state_per_param=2.0), piece)
    assert found[:2] == [pytest.approx((5, 2 * (1 + 4 / 2)))] * 2


def test_a_matrix_whose_gradient_is_gathered_is_said_by_that_alone() -> None:
    matrix = {"op": 0, "parameter": "words", "way": "rows", "outputs": 2**18, "inputs": 4, "tokens": 8}
    a = made("a/net", 1, tied(0), gathered=({**matrix, "num_bytes": 4 * MIB},))
    _, words = blocks_of(a, 0)
    assert (words.is_gathered, words.tied_keys, words.num_bytes) == (True, (), 4 * MIB)


def test_what_is_not_trained_is_gathered_in_the_parts_that_devices_have() -> None:
    """Of 4 MiB that four devices in groups of two have halves of, two devices each gather 2, while the other
    two do so over the same cards.
    """
    frozen = tied(0, is_split=True, is_split_by_any=True, is_trained=False)
    a = made("a/net", 1, frozen, split_extra_param_bytes={0: 4 * MIB}, trainable_fraction=0.2)
    cluster = cluster_of(4, devices_per_node=2)
    piece = slice_of(a, (0, 1), (0, 1, 2, 3), 0.0).model_copy(update={"dp": 2, "tp": 2})
    found = moved_in_passes(piece, a, cluster, shared(a).sharded(dict.fromkeys(KEYS, PARAMETERS)))
    assert found is not None
    words, own = (20e-6 + 2 * size / 2 / 1e9 for size in (2 * MIB, MIB / 2))
    assert found.scatters == pytest.approx((own,))
    assert found.forward == pytest.approx((own + words,))


def test_it_is_shared_out_by_what_all_of_its_keys_are_and_by_devices_that_run_all_alike() -> None:
    a, b = pair()
    everywhere = slice_of(a, (0, 2), (0, 1), 0.0), slice_of(b, (0, 1), (0, 1), 6.0)
    both = shared(a, b).sharded(dict.fromkeys(KEYS, PARAMETERS))
    assert lasting(both, *everywhere)[0][0] == pytest.approx(7 / 2)
    one = shared(a, b).sharded({"a/net": PARAMETERS})
    assert lasting(one, *everywhere)[0][0] == pytest.approx(2 / 2 + 1 + 4)
    elsewhere = slice_of(a, (0, 2), (0, 1), 0.0), slice_of(b, (0, 1), (2, 3), 6.0)
    assert [each for each, _ in lasting(both, *elsewhere)] == pytest.approx([3, 3, 2.5, 2.5])
    partly = slice_of(a, (0, 2), (0, 1), 0.0), slice_of(b, (0, 1), (1, 2), 6.0)
    assert [each for each, _ in lasting(both, *partly)][:3] == pytest.approx([5, 5.5, 4.5])


@pytest.mark.parametrize("level", [PARAMETERS, Sharding.OPTIMIZER])
def test_passes_gather_and_scatter_it_with_the_op_that_uses_it(level: Sharding) -> None:
    a, b = pair()
    cluster = cluster_of(4, devices_per_node=2)
    step = shared(a, b).sharded({"a/net": PARAMETERS, "b/head": level})
    found = moved_in_passes(slice_of(a, (0, 2), (0, 1), 0.0), a, cluster, step)
    own, words = (all_gather_s(size * MIB, (0, 1), cluster) for size in (1, 4))
    first = own + words if level is PARAMETERS else own
    assert found is not None
    assert found.forward == found.backward == found.scatters == pytest.approx((first, own))


def test_two_ops_of_a_slice_gather_it_once_for_the_first_and_scatter_it_behind_the_last() -> None:
    a = made("a/net", 2, tied(0), tied(1))
    cluster = cluster_of(4, devices_per_node=2)
    step = shared(a).sharded(dict.fromkeys(KEYS, PARAMETERS))
    found = moved_in_passes(slice_of(a, (0, 2), (0, 1), 0.0), a, cluster, step)
    own, words = (all_gather_s(size * MIB, (0, 1), cluster) for size in (1, 4))
    assert found is not None
    assert found.forward == found.scatters == pytest.approx((own + words, own))
    assert found.backward == pytest.approx((own, own + words))


def test_the_least_that_devices_hold_together_has_it_once() -> None:
    a, b = pair(trainable_fraction=0.5)
    profile = shared(a, b, optimizer_state_per_param=2.0)
    problem = make_problem(profile, cluster_of(4))
    handed = least_bytes(problem) - (3 + 4) * MIB
    # The words are trained, and of each op's own a half.
    assert handed - 2 * 4 * MIB == pytest.approx(least_activations(problem) + 2 * 1.5 * MIB)


def least_activations(problem: Any) -> float:
    without = [node.metaop.model_copy(update=dict(NO_PARAMETERS)) for node in problem.nodes]
    return least_bytes(make_problem(shared(*without), cluster_of(4)))


NO_PARAMETERS = {"param_bytes_per_op": 0, "extra_param_bytes": {}, "tied": ()}


def test_a_piece_beside_another_adds_it_only_once() -> None:
    a, b = made("a/net", 2, tied(0), tied(1)), made("b/head", 1, tied(0))
    problem = make_problem(shared(a, b, optimizer_state_sharded=False), cluster_of(4))
    nodes = {node.metaop.name: index for index, node in enumerate(problem.nodes)}
    first, second = (
        Footprint(
            problem, UnplacedSlice(nodes[name], 0, last, problem.nodes[nodes[name]].points[0], 0.0, 1.0)
        )
        for name, last in (("a/net", 2), ("b/head", 1))
    )
    state = 1 + 1 + problem.profile.optimizer_state_per_param
    assert first.parameter_bytes == pytest.approx((2 + 4) * MIB * state)
    assert second.shared_bytes(first.names & second.names) == pytest.approx(4 * MIB * state)


def test_a_key_whose_parameters_are_all_tied_can_be_shared_out() -> None:
    a = made("a/net", 2, tied(0))
    b = made("b/head", 1, tied(0), param_bytes_per_op=0)
    require_sound(shared(a, b), {"b/head": PARAMETERS})


def test_the_largest_of_what_ops_with_one_key_have_counts() -> None:
    trained = made("a/net", 1, parameters="net")
    frozen = made("b/net", 1, parameters="net", trainable_fraction=0.0)
    require_sound(shared(trained, frozen), {"net": Sharding.GRADIENTS})


def test_a_piece_in_parts_adds_the_parts_of_what_is_split() -> None:
    split = tied(0, is_split=True, is_split_by_any=True)
    a = made("a/net", 1, split, split_extra_param_bytes={0: 4 * MIB})
    point = a.curve[1].model_copy(update={"dp": 1, "tp": 2})
    a = a.model_copy(update={"curve": (a.curve[0], point)})
    fallback = MemoryFallback(2, frozenset({a.name}))
    problem = make_problem(shared(a, optimizer_state_sharded=False), cluster_of(4), fallback)
    in_parts = next(each for each in problem.nodes[0].points if each.tp == 2)
    found = Footprint(problem, UnplacedSlice(0, 0, 1, in_parts, 0.0, 1.0))
    state = 2 + problem.profile.optimizer_state_per_param
    assert [num_bytes for _, num_bytes in found.blocks] == pytest.approx([MIB / 2 * state, 2 * MIB * state])
