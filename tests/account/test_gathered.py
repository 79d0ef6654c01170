"""What gradients are made of, in bytes, tokens and devices; by hand."""

from __future__ import annotations

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.groups import gathered_matrices
from spindle_cli.account.traffic import traffic_of
from spindle_cli.account.types import Collective
from spindle_cli.check.run import check_plan
from spindle_cli.costs.parameters import Summing
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Matrix, MetaOpProfile

KIB = 1024


def words(**changes: object) -> Matrix:
    """1,024 words of 64 numbers, 256 KiB; 5 tokens a sample of 8, and 2 in each pass besides."""
    settings = {
        "op": 0,
        "parameter": "a.words.weight",
        "way": "rows",
        "outputs": 1024,
        "inputs": 64,
        "num_bytes": 256 * KIB,
        "tokens": 40,
        "fixed_tokens": 2,
    }
    return Matrix.model_validate({**settings, **changes})


def embed(name: str, *matrices: Matrix, **more: object) -> MetaOpProfile:
    metaop = metaop_of(name, 2, {1: 4.0, 2: 2.0, 4: 1.0}, parameters="embed", **more)
    return metaop.model_copy(update={"gathered": matrices, "matrices": matrices})


def two_tasks(accumulate: int = 1, sharded: bool = True) -> Plan:
    """One task on devices 0 and 1, one on 1 to 4: of a batch of 8 as well."""
    a, b = embed("a/embed", words()), embed("b/embed", words(tokens=16, fixed_tokens=0))
    numbers = {"accumulate": accumulate, "optimizer_state_sharded": sharded}
    profile = profile_of(a, b).model_copy(update=numbers)
    first, second = slice_of(a, (0, 2), (0, 1), 0.0), slice_of(b, (0, 2), (1, 2, 3, 4), 4.0)
    return plan_of(profile, cluster_of(5), [[first], [second]])


def test_the_largest_share_counts_what_a_device_looks_up_in_all_slices_and_batches() -> None:
    """Device 0: 20 + 2 tokens. Device 1: these and 4 of the other task, in each of 3 batches."""
    plan = two_tasks(accumulate=3)
    (found,) = gathered_matrices(plan.slices, plan.by_name, 3).values()
    assert (found.devices, found.share_tokens) == ((0, 1, 2, 3, 4), 3 * 26)
    assert found.num_bytes == 5 * 78 * (64 * 4 + 4)


def test_shares_of_unequal_size_count_their_own_samples() -> None:
    plan = two_tasks()
    cut = plan.slices[0].model_copy(update={"rows": (0, 7, 8)})
    (found,) = gathered_matrices([cut], plan.by_name, 1).values()
    assert found.share_tokens == 35 + 2


def test_a_part_of_a_token_counts_whole_and_what_is_next_to_a_slice_does_not() -> None:
    """9 tokens of 8 samples, on 3 of them or 5; the matrix of op 1 is of the slice behind."""
    words_of_both = (words(tokens=9, fixed_tokens=0), words(op=1, parameter="a.other.weight"))
    a = embed("a/embed", *words_of_both)
    piece = slice_of(a, (0, 1), (0, 1), 0.0).model_copy(update={"rows": (0, 3, 8)})
    found = gathered_matrices([piece], {a.name: a}, 1)
    assert {name: each.share_tokens for name, each in found.items()} == {"a.words.weight": 6}
    behind = gathered_matrices([piece.model_copy(update={"ops": (1, 2)})], {a.name: a}, 1)
    assert list(behind) == ["a.other.weight"]


def test_a_sum_moves_gradients_as_wide_as_they_are_and_a_gather_what_is_made_of_them() -> None:
    """Parameters in bfloat16, whose gradients are added up in float32."""
    a = embed("a/embed", words(num_bytes=128 * KIB, factor_width=2))
    piece = slice_of(a, (0, 2), (0, 1), 0.0)
    gradient = gathered_matrices([piece], {a.name: a}, 1)["a.words.weight"].gradient(2.0)
    assert (gradient.gradient_width, gradient.factor_width) == (4, 2)
    assert gradient.dense_bytes == 256 * KIB


@pytest.mark.parametrize("sharded", [True, False])
def test_a_matrix_is_gathered_by_itself_and_stepped_whole(sharded: bool) -> None:
    """The rest of the op's MiB is summed as before: with shared state once around, and gathered."""
    traffic = traffic_of(two_tasks(sharded=sharded))
    matrix = next(group for group in traffic.groups if group.is_gathered)
    assert matrix.blocks == (("a.words.weight", 0),)
    assert (matrix.summing, matrix.share_tokens) == (Summing.ROWS, 26)
    assert matrix.parameter_bytes == 256 * KIB
    sums = [each for each in traffic.collectives if each.kind is Collective.SUM]
    assert [(each.num_bytes, each.rounds) for each in sums if each.group == matrix.index] == [(130 * 260, 1)]
    rest = [each for each in sums if each.group != matrix.index]
    assert sum(each.num_bytes for each in rest) == (2048 - 256) * KIB
    assert {each.rounds for each in rest} == {1 if sharded else 2}
    gathers = [each for each in traffic.collectives if each.kind is Collective.GATHER]
    assert sum(each.num_bytes for each in gathers) == ((2048 - 256) * KIB if sharded else 0)


def test_devices_have_its_state_whole_and_what_is_gathered_twice() -> None:
    """Of 256 KiB with two moments: 4/5 of 512 KiB more than where five devices share them out."""
    plan = two_tasks()
    dense = plan.model_copy(
        update={"metaops": tuple(each.model_copy(update={"gathered": ()}) for each in plan.metaops)}
    )
    own, before = (device_memory(each.metaops, each.slices, each.cluster, each)[1] for each in (plan, dense))
    assert own.parameter_bytes == before.parameter_bytes
    assert own.gradient_bytes == before.gradient_bytes
    assert own.optimizer_bytes - before.optimizer_bytes == pytest.approx(512 * KIB * 4 / 5, abs=2)
    # No scatter of gloo's takes a buffer for it.
    assert own.buffer_bytes >= 2 * 130 * 260
    assert own.updated_bytes - before.updated_bytes == pytest.approx(256 * KIB * 4 / 5, abs=2)


def test_what_is_gathered_takes_a_buffer_and_a_copy_of_it_on_every_device() -> None:
    """130 tokens of 260 bytes, beside what there is without; state is not shared out."""
    plan = two_tasks(sharded=False)
    dense = plan.model_copy(
        update={"metaops": tuple(each.model_copy(update={"gathered": ()}) for each in plan.metaops)}
    )
    own, before = (device_memory(each.metaops, each.slices, each.cluster, each) for each in (plan, dense))
    more = [one.buffer_bytes - other.buffer_bytes for one, other in zip(own, before, strict=True)]
    assert more == pytest.approx([2 * 130 * 260] * 5, rel=0.02)


def test_factors_are_multiplied_before_the_update() -> None:
    """3 devices, 4 tokens each: 2/3 of 2 x 12 x 100 x 50 operations more, at 1e5 in a second."""
    matrix = words(way="factors", outputs=100, inputs=50, num_bytes=20_000, tokens=12, fixed_tokens=0)
    a = metaop_of("a/wide", 1, {3: 1.0}, batch_size=12)
    a = a.model_copy(update={"gathered": (matrix.model_copy(update={"flops_per_s": 1e5}),)})
    plan = plan_of(profile_of(a), cluster_of(3), [[slice_of(a, (0, 1), (0, 1, 2), 0.0)]])
    (group,) = [each for each in traffic_of(plan).groups if each.is_gathered]
    assert group.gathered_bytes == 12 * 150 * 4
    assert group.product_s == pytest.approx(0.8)


def violations(plan: Plan) -> list[str]:
    return [str(each) for each in check_plan(plan) if each.rule == "gathered"]


def with_gathered(plan: Plan, *of_each: tuple[Matrix, ...]) -> Plan:
    metaops = [
        metaop.model_copy(update={"gathered": own}) for metaop, own in zip(plan.metaops, of_each, strict=True)
    ]
    return plan.model_copy(update={"metaops": tuple(metaops)})


def test_check_refuses_what_ops_do_not_agree_on_and_ops_that_are_not_there() -> None:
    plan = two_tasks()
    assert not violations(plan)
    (other,) = violations(with_gathered(plan, (words(),), (words(inputs=65),)))
    assert "'a.words.weight' by rows, 1024 x 65" in other
    (beyond,) = violations(with_gathered(plan, (words(op=2),), (words(op=1),)))
    assert "op 2" in beyond
    assert "one of its 2 ops" in beyond


def test_check_refuses_a_split_slice_and_devices_of_several_types() -> None:
    plan = two_tasks()
    split = plan.slices[0].model_copy(update={"dp": 1, "tp": 2})
    waves = (plan.waves[0].model_copy(update={"slices": (split,)}), plan.waves[1])
    from spindle_cli.check.parameters import gathered_matrices_are_whole

    cut = Plan(**{**{name: getattr(plan, name) for name in plan.model_fields_set}, "waves": waves})
    assert [each.expected for each in gathered_matrices_are_whole(cut)] == ["tp 1"]
    node = plan.cluster.nodes[0]
    groups = tuple(
        node.model_copy(update={"name": kind, "device": kind, "devices": count})
        for kind, count in (("a100-80gb", 2), ("v100-32gb", 3))
    )
    mixed = plan.model_copy(update={"cluster": plan.cluster.changed(nodes=groups)})
    (found,) = gathered_matrices_are_whole(mixed)
    assert "a100-80gb, v100-32gb" in str(found)
