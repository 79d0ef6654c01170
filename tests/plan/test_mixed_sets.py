"""Plans for sets of tasks on several types of device: whole batches cut by speed, and times of each pass."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.offloaded import moved
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.check.run import check_plan
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Link
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.file import plan_text, read_plan, write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.sets.choose import with_sets
from spindle_cli.plan.types import Plan, StrategyName
from spindle_cli.profile.types import MetaOpProfile, Profile, TaskShare
from spindle_cli.simulate.run import simulate
from spindle_cli.units import MIB

FAST_AND_SLOW = cluster_of_types({"fast": 1, "slow": 1})
FOUR = cluster_of_types({"fast": 2, "slow": 2})


def net(task: str, num_ops: int, slow: float = 2.0, **more: object) -> MetaOpProfile:
    """Whose samples take a second on the fast type; a batch has 6."""
    return metaop_on_types(f"{task}/net", num_ops, {"fast": 1.0, "slow": slow}, batch_size=6, **more)


def sampled(profile: Profile, *shares: tuple[str, float]) -> Profile:
    """Sets of tasks by their letters, with their shares of the steps."""
    sets = tuple(TaskShare(tasks=tuple(tasks), share=share) for tasks, share in shares)
    return profile.model_copy(update={"task_sets": sets})


def rows_of(plan: Plan) -> list[tuple[int, ...] | None]:
    return [piece.rows for piece in plan.slices]


def test_the_task_of_each_set_is_cut_so_that_both_types_end_together() -> None:
    """An op of six samples, four of them on the fast one, takes 4 s: of a 2 of them, of b 3."""
    profile = sampled(profile_on_types(net("a", 2), net("b", 3)), ("a", 0.75), ("b", 0.25))
    plan = make_plan(profile, FAST_AND_SLOW)
    assert [rows_of(each) for each in plan.set_plans.values()] == [[(0, 4, 6)], [(0, 4, 6)]]
    assert [each.predicted.compute_s for each in plan.task_sets] == pytest.approx([8.0, 12.0])
    assert plan.of_steps.compute_s == pytest.approx(0.75 * 8.0 + 0.25 * 12.0)
    assert check_plan(plan, profile) == ()


def test_slices_of_sets_say_when_each_pass_runs() -> None:
    plan = make_plan(sampled(profile_on_types(net("a", 2), net("b", 3)), ("ab", 0.5), ("b", 0.5)), FOUR)
    every = [piece for each in (plan, *plan.set_plans.values()) for piece in each.slices]
    assert all(piece.backward_s is not None for piece in every)
    assert plan.schema_ == "spindle.plan/2"


def test_a_plan_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory) -> None:
    plan = make_plan(sampled(profile_on_types(net("a", 2), net("b", 3)), ("ab", 0.5), ("b", 0.5)), FOUR)
    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    write_plan(path, plan)
    assert plan_text(read_plan(path)) == plan_text(plan)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from((1.5, 2.0, 5.0))), min_size=2, max_size=3),
    st.sampled_from((("ab", "a"), ("a", "b"), ("ab", "b", "a"))),
)
@examples(10)
def test_plans_are_sound_and_no_step_computes_faster_than_its_bound(
    tasks: list[tuple[int, float]], letters: tuple[str, ...]
) -> None:
    nets = [net(task, count, slow) for task, (count, slow) in zip("abc", tasks, strict=False)]
    rest = "c" if len(nets) == 3 else ""
    sets = [(each + rest, 1 / len(letters)) for each in letters]
    profile = sampled(profile_on_types(*nets), *sets)
    plan = make_plan(profile, FOUR)
    assert check_plan(plan, profile) == ()
    for each in plan.task_sets:
        assert each.predicted.compute_s >= each.predicted.lower_bound_s
    for own in plan.set_plans.values():
        assert simulate(own).iteration_s == pytest.approx(own.predicted.iteration_s, rel=0.03)


def test_no_step_is_slower_than_with_what_the_plan_of_all_tasks_has_of_it() -> None:
    """b alone takes all devices; in the plan of both tasks it has half of them."""
    profile = profile_on_types(net("a", 6), net("b", 6))
    both = make_plan(profile, FOUR)
    plan = make_plan(sampled(profile, ("ab", 0.5), ("b", 0.5)), FOUR)
    alone = next(each for each in plan.task_sets if each.tasks == ("b",))
    left_s = sum(piece.busy_s for piece in both.slices if piece.metaop == "b/net")
    assert alone.predicted.compute_s <= left_s + 1e-6
    assert plan.mean_iteration_s <= both.predicted.iteration_s


def test_where_memory_is_short_ops_are_recomputed_and_batches_cut() -> None:
    """Of six ops of a the fast one, which has 7.2 of its 8 GiB, would keep 6 x 2 GiB: in two micro-batches
    half of them, of which one op recomputes, for 33.3 s with four of whole batches.
    """
    keeps = {"activation_bytes_per_op": 3 * 1024 * MIB, "inner_output_bytes": MIB}
    profile = sampled(profile_on_types(net("a", 6, **keeps), net("b", 1)), ("ab", 0.5), ("a", 0.5))
    plan = make_plan(profile, cluster_of_types({"fast": 1, "slow": 1}, memory_gib=8))
    assert any(piece.recompute for piece in plan.slices)
    assert plan.micro_batches == {"a": 2} and not plan.sharding
    assert plan.predicted.iteration_s < 30
    assert check_plan(plan, profile) == ()
    with pytest.raises(
        NoPlanError, match=r"no plan fits .* neither with every op recomputed nor with layers"
    ):
        make_plan(profile, cluster_of_types({"fast": 1, "slow": 1}, memory_gib=1))


def test_micro_batches_and_shards_that_are_asked_for_are_those_of_every_set() -> None:
    """On one type and on two."""
    for types in ({"fast": 2, "slow": 2}, {"fast": 4}):
        cluster, sample_s = cluster_of_types(types), dict.fromkeys(types, 1.0)
        shared = {"parameters": "shared", "param_bytes_per_op": MIB}
        nets = [metaop_on_types(f"{task}/net", 2, sample_s, **shared) for task in "ab"]
        profile = sampled(profile_on_types(*nets), ("ab", 0.5), ("b", 0.5))
        sharding = {"shared": Sharding.PARAMETERS}
        plan = make_plan(profile, cluster, micro_batches={"a": 2, "b": 2}, sharding=sharding)
        assert (plan.micro_batches, plan.sharding) == ({"a": 2, "b": 2}, sharding)
        assert check_plan(plan, profile) == ()
        for own in (plan, *plan.set_plans.values()):
            tasks = {metaop.task for metaop in own.metaops}
            assert {(piece.metaop[0], piece.micro_batch) for piece in own.slices} == {
                (task, number) for task in tasks for number in (0, 1)
            }
            assert simulate(own).iteration_s == pytest.approx(own.predicted.iteration_s, rel=0.03)


@pytest.mark.parametrize("others", [("spindle", "dp-even"), ("dp-even", "spindle")])
def test_of_what_is_left_of_the_plan_of_all_and_a_plan_of_its_own_the_faster_one_is_taken(
    others: tuple[StrategyName, StrategyName],
) -> None:
    """a's two ops of six samples: 8 s where both types end together, 12 s in even shares; in the plan of both
    tasks its backward pass is the last.
    """
    profile = profile_on_types(net("a", 2), net("b", 3))
    of_all, alone = others
    plan = make_plan(profile, FAST_AND_SLOW, "sequential" if of_all == "spindle" else of_all)
    with_a = sampled(profile, ("ab", 0.5), ("a", 0.5))

    def make(some: Profile) -> Plan:
        return make_plan(some.model_copy(update={"task_sets": ()}), FAST_AND_SLOW, alone)

    found = with_sets(plan, with_a, make, ProblemPoser())
    assert found.task_sets[1].predicted.compute_s == pytest.approx(8.0)


def test_where_memory_is_short_of_parameters_all_sets_share_them_out() -> None:
    """Of 2.4 GiB of them, their gradients and state: whole they take 0.2 GiB more than shared out."""
    profile = profile_on_types(net("a", 6, param_bytes_per_op=410 * MIB), net("b", 1))
    profile = sampled(profile, ("a", 0.25), ("b", 0.25), ("ab", 0.5))
    plan = make_plan(profile, cluster_of_types({"fast": 1, "slow": 1}, memory_gib=8.55))
    assert "a/net" in plan.sharding
    assert plan.set_plans["b",].sharding == plan.sharding  # held, and not used
    assert check_plan(plan, profile) == ()


def test_sets_move_activations_to_host_memory_unless_the_user_says_otherwise() -> None:
    keeps = {"activation_bytes_per_op": 3 * 1024 * MIB, "inner_output_bytes": MIB}
    profile = sampled(profile_on_types(net("a", 6, **keeps), net("b", 1)), ("ab", 0.5), ("a", 0.5))
    known = cluster_of_types({"fast": 1, "slow": 1}, memory_gib=8)
    host = Link(latency_us=10, bandwidth_gb_per_s=50)
    known = known.with_links(known.links.model_copy(update={"host": host}))
    free, left = (make_plan(profile, known, offload=request) for request in (None, False))
    assert check_plan(free, profile) == () == check_plan(left, profile)
    assert all(moved(each)[0] > 0 for each in free.set_plans.values())
    assert all(moved(each)[0] == 0 for each in left.set_plans.values())
    assert free.mean_iteration_s < left.mean_iteration_s


@pytest.mark.parametrize("shard_by", ["speed", {"fast": 3, "slow": 1}])
def test_sets_share_out_optimizer_state_in_the_parts_that_the_plan_says(
    shard_by: Literal["speed"] | dict[str, int],
) -> None:
    """Each device of a set's plan holds its part by weight, too: `check` accepts what the plan says of it."""
    nets = [net(task, 2, param_bytes_per_op=600 * MIB) for task in "ab"]
    profile = sampled(profile_on_types(*nets), ("ab", 0.5), ("b", 0.5))
    plan = make_plan(profile, FAST_AND_SLOW, shard_by=shard_by)
    assert plan.shard_weights[0] > plan.shard_weights[1]
    assert check_plan(plan, profile) == ()
    for each in plan.task_sets:
        fast, slow = each.predicted.peak_memory_bytes
        assert fast > slow
