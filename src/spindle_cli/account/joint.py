"""Several plans that train the same parameters in turn: one for each set of tasks that steps run.

Optimizer state never moves, so a parameter is held, in every step, by all devices that use it in any of the
plans, in the finest fragments that these have in common; and it is summed over all of them. Parameters lie in
the same buckets whichever plan runs: only what the same plans add to is summed together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spindle_cli.account.groups import ParameterUses, parameter_groups
from spindle_cli.account.types import Joint, ParameterGroup, PlacedPlan
from spindle_cli.costs.memory import SliceShape
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import ShardingOf, ShardWeights
from spindle_cli.profile.types import MetaOp


def joint_of(plans: Sequence[Sequence[SliceShape]], by_name: Mapping[str, MetaOp]) -> Joint:
    """Join plans, each given by its slices in the order in which they start; a slice that several have is
    there once.
    """
    index_of: dict[object, int] = {}
    slices: list[SliceShape] = []
    members = []
    for plan in plans:
        member = []
        for slice_ in plan:
            key = (
                slice_.metaop,
                slice_.ops,
                slice_.devices,
                slice_.dp,
                slice_.tp,
                slice_.rows,
                slice_.micro_batch,
                slice_.recompute,
                slice_.selective,
                slice_.offload,
            )
            if key not in index_of:
                index_of[key] = len(slices)
                slices.append(slice_)
            member.append(index_of[key])
        members.append(tuple(member))
    tasks = tuple(frozenset(by_name[slice_.metaop].task for slice_ in plan) for plan in plans)
    return Joint(tuple(slices), tuple(map(tuple, plans)), tuple(members), tasks, by_name)


def joint_groups(
    joint: Joint, uses: ParameterUses, cluster: Cluster, gradient_bytes_per_param: float
) -> tuple[ParameterGroup, ...]:
    """The parameter groups of all plans; their slices are those of `joint`. `uses`: of all plans' ops."""
    run_in = [
        frozenset(
            number for number, tasks in enumerate(joint.tasks) if joint.by_name[slice_.metaop].task in tasks
        )
        for slice_ in joint.slices
    ]
    order = range(len(joint.slices))
    return parameter_groups(joint.slices, order, uses, cluster, gradient_bytes_per_param, run_in)


def groups_of_member(
    joint: Joint, groups: Sequence[ParameterGroup], member: int
) -> tuple[ParameterGroup, ...]:
    """The groups of all plans that one of them adds to, with its own slices, in the same order."""
    place = {index: position for position, index in enumerate(joint.members[member])}
    member_groups: list[ParameterGroup] = []
    for group in groups:
        last_ops = group.last_ops or (0,) * len(group.slices)
        users = sorted(
            (place[index], first, last)
            for index, first, last in zip(group.slices, group.first_ops, last_ops, strict=True)
            if index in place
        )
        if users:
            slices, first_ops, last_ops = zip(*users, strict=True)
            last_ops = last_ops if group.last_ops else ()
            index = len(member_groups)
            member_groups.append(
                replace(group, index=index, slices=slices, first_ops=first_ops, last_ops=last_ops)
            )
    return tuple(member_groups)


@dataclass(frozen=True)
class MemberPlan:
    """One of several plans that run in turn, as `account/` takes it."""

    slices: Sequence[SliceShape]
    by_name: Mapping[str, MetaOp]
    cluster: Cluster
    accumulate: int
    gradient_bytes_per_param: float
    optimizer_state_sharded: bool
    clips_gradients: bool
    scales_losses: bool
    updates_by_parts: bool
    sharding: ShardingOf
    shard_weights: ShardWeights
    joint: Joint | None
    member: int
    sums_by_node: bool


def plans_in_turn(plan: PlacedPlan) -> tuple[PlacedPlan, ...]:
    """A plan, or all of the plans that it runs in turn with."""
    joint = plan.joint
    if joint is None:
        return (plan,)
    return tuple(
        MemberPlan(
            slices,
            {name: metaop for name, metaop in joint.by_name.items() if metaop.task in tasks},
            plan.cluster,
            plan.accumulate,
            plan.gradient_bytes_per_param,
            plan.optimizer_state_sharded,
            plan.clips_gradients,
            plan.scales_losses,
            plan.updates_by_parts,
            plan.sharding,
            plan.shard_weights,
            joint,
            member,
            plan.sums_by_node,
        )
        for member, (slices, tasks) in enumerate(zip(joint.plans, joint.tasks, strict=True))
    )


def other_plans_slices(joint: Joint, member: int) -> tuple[SliceShape, ...]:
    """The slices of the other plans that the plan at `member` does not have itself."""
    member_slices = set(joint.members[member])
    return tuple(slice_ for index, slice_ in enumerate(joint.slices) if index not in member_slices)
