"""Programs of plans that run in turn: each is proved and ends by itself, and all sum the same buckets over
the same devices and communicators.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from helpers.little_executor import Rules, execute
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from helpers.random_plans import plans_with_sets
from spindle_cli.account.groups import ParameterBlock, planned_parameters
from spindle_cli.account.joint import joint_of
from spindle_cli.account.traffic import communicator_bytes, peers_bytes
from spindle_cli.account.types import Purpose
from spindle_cli.costs.links import collectives_bytes
from spindle_cli.plan.types import Plan, PlannedSet
from spindle_cli.program.link import link, link_sets
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.types import Kind, Program, StepSettings


def two_tasks() -> Plan:
    """Task a on device 0 and task b on device 1 with the same parameters; steps of both and of a alone, which
    then runs on both devices.
    """
    a = metaop_of("a/m", 2, {1: 1.0, 2: 0.5}, parameters="shared")
    b = metaop_of("b/m", 2, {1: 1.0, 2: 0.5}, parameters="shared")
    c = metaop_of("b/own", 1, {1: 1.0}, inputs=("b/m",))
    both = [[slice_of(a, (0, 2), [0], 0.0), slice_of(b, (0, 2), [1], 0.0)], [slice_of(c, (0, 1), [1], 2.0)]]
    whole = plan_of(profile_of(a, b, c), cluster_of(2), both)
    alone = plan_of(profile_of(a), cluster_of(2), [[slice_of(a, (0, 2), [0, 1], 0.0)]])
    sets = (
        PlannedSet(tasks=("a",), share=0.5, predicted=alone.predicted, waves=alone.waves),
        PlannedSet(tasks=("a", "b"), share=0.5, predicted=whole.predicted, waves=whole.waves),
    )
    return Plan(**{**{name: getattr(whole, name) for name in whole.model_fields_set}, "task_sets": sets})


def kinds(program: Program, device: int) -> str:
    return " ".join(
        f"{action.kind}{'' if action.group is None else action.group}" for action in program.actions[device]
    )


def test_a_step_sums_what_its_tasks_use_and_nothing_else() -> None:
    programs = link_sets(two_tasks(), settings=StepSettings(sharded=True))
    alone = programs.of_sets["a",]
    assert {group.blocks[0][0] for group in alone.groups} == {"shared"}
    assert {group.blocks[0][0] for group in programs.of_sets["a", "b"].groups} == {"shared", "b/own"}
    assert kinds(alone, 1) == "F LOSSES B SUM0 SUM1 FLAGS STEP GATHER1 GATHER0"


def test_slices_of_other_shares_or_micro_batches_are_others() -> None:
    a = metaop_of("a/m", 2, {2: 1.0})
    piece = slice_of(a, (0, 2), [0, 1], 0.0)
    others = [{"rows": (0, 3, 8)}, {"rows": (0, 5, 8)}, {"micro_batch": 1, "micro_batches": 2}]
    joint = joint_of([[piece], *([piece.model_copy(update=other)] for other in others)], {"a/m": a})
    assert joint.members == ((0,), (1,), (2,), (3,))


def test_a_slice_that_recomputes_is_another_than_one_that_keeps_its_activations() -> None:
    a, b = metaop_of("a/m", 2, {1: 1.0}), metaop_of("b/m", 1, {1: 1.0})
    kept, again = (slice_of(a, (0, 2), [0], 0.0, recompute=recompute) for recompute in (False, True))
    other = slice_of(b, (0, 1), [0], 2.0)
    joint = joint_of([[kept, other], [again], [kept]], {"a/m": a, "b/m": b})
    assert joint.slices == (kept, other, again)
    assert joint.members == ((0, 1), (2,), (0,))


def test_a_device_that_only_holds_takes_part_in_the_sum() -> None:
    """Restricted to b, device 0 runs nothing and holds what b trains."""
    plan = two_tasks()
    only_b = tuple(
        wave.model_copy(update={"slices": kept})
        for wave in plan.waves
        if (kept := tuple(piece for piece in wave.slices if piece.metaop.startswith("b")))
    )
    sets = (PlannedSet(tasks=("b",), share=1.0, predicted=plan.predicted, waves=only_b),)
    plan = Plan(**{**{name: getattr(plan, name) for name in plan.model_fields_set}, "task_sets": sets})
    program = link_sets(plan).of_sets["b",]
    prove(program)
    for rules in Rules:
        execute(program, rules)
    assert kinds(program, 0) == "LOSSES SUM1 SUM2 STEP"  # group 0 is device 1 alone
    assert [action.op for action in program.actions[0] if action.kind is Kind.SUM] == [None, None]


def test_a_sum_over_all_devices_that_is_complete_early_does_not_wait_for_the_losses() -> None:
    """In steps of b alone device 1 has gone backward through what a and b share, and device 0, which holds it
    for a, still runs forward.
    """
    a = metaop_of("a/m", 1, {1: 1.0}, parameters="shared")
    b = metaop_of("b/m", 1, {1: 1.0}, parameters="shared")
    own = metaop_of("b/own", 4, {1: 1.0})
    waves = [
        [slice_of(a, (0, 1), [0], 0.0), slice_of(b, (0, 1), [1], 0.0)],
        *([slice_of(own, (op, op + 1), [0], 1.0 + op)] for op in range(4)),
    ]
    whole = plan_of(profile_of(a, b, own), cluster_of(2), waves)
    only_b = plan_of(
        profile_of(b, own),
        cluster_of(2),
        [
            [slice_of(b, (0, 1), [1], 0.0), slice_of(own, (0, 1), [0], 0.0)],
            *([slice_of(own, (op, op + 1), [0], float(op))] for op in range(1, 4)),
        ],
    )
    sets = (PlannedSet(tasks=("b",), share=1.0, predicted=only_b.predicted, waves=only_b.waves),)
    plan = Plan(**{**{name: getattr(whole, name) for name in whole.model_fields_set}, "task_sets": sets})
    for sharded in (False, True):
        program = link_sets(plan, settings=StepSettings(sharded=sharded)).of_sets["b",]
        prove(program)
        for rules in Rules:
            execute(program, rules)
    assert kinds(program, 1) == "F B SUM0 LOSSES FLAGS STEP GATHER0"
    assert kinds(program, 0).startswith("F F F SUM0 F LOSSES ")


@examples(60)
@given(plans_with_sets(), st.booleans(), st.booleans())
def test_programs_of_all_sets_finish_and_share_buckets(plan: Plan, sharded: bool, clips: bool) -> None:
    programs = link_sets(plan, settings=StepSettings(sharded=sharded, clips=clips))
    known = {(group.blocks, group.fragment): group for group in programs.groups}
    for tasks, program in [(("a", "b"), programs.whole), *programs.of_sets.items()]:
        prove(program)
        for rules in Rules:
            execute(program, rules)
        assert program.communicators == programs.whole.communicators
        used = {block.key for block in _blocks_of(plan, tasks)}
        assert {key for group in program.groups for key, _ in group.blocks} == used
        for group in program.groups:
            joint = known[group.blocks, group.fragment]
            assert (group.devices, group.num_bytes) == (joint.devices, joint.num_bytes)
            holders = {d for index in group.slices for d in program.slices[index].devices}
            if group.fragment == (0, 1):
                assert holders <= set(group.devices)


@examples(60)
@given(plans_with_sets())
def test_the_account_of_the_communicators_is_that_of_all_programs(plan: Plan) -> None:
    programs = link_sets(plan)
    taken = [0] * plan.cluster.num_devices
    for each in programs.whole.communicators:
        for device in each.ranks:
            if each.purpose is Purpose.MESSAGES:
                peers = {
                    action.transfer.source + action.transfer.destination - device
                    for program in programs.all
                    for action in program.actions[device]
                    if action.transfer is not None and action.communicator == each.index
                }
                taken[device] += peers_bytes(device, peers, plan.cluster)
            else:
                taken[device] += collectives_bytes(each.ranks, plan.cluster)
    assert communicator_bytes(plan) == tuple(taken)


def _blocks_of(plan: Plan, tasks: tuple[str, ...]) -> list[ParameterBlock]:
    uses = planned_parameters((metaop for metaop in plan.metaops if metaop.task in tasks), {})
    return [block for blocks in uses.values() for block in blocks]


@examples(40)
@given(plans_with_sets())
def test_every_slice_is_where_the_joint_plan_says(plan: Plan) -> None:
    assert plan.joint is not None
    for number, own in enumerate([plan, *plan.set_plans.values()]):
        placed = [plan.every_slice[index] for index in plan.joint.members[number]]
        assert [(p.label, p.devices, p.dp, p.tp) for p in placed] == [
            (p.label, p.devices, p.dp, p.tp) for p in own.slices
        ]
        assert link(own).groups == link_sets(plan).all[number].groups
