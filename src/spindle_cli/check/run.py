"""Check a plan: every rule of `RULES`, without the planner's code: only its types and the memory of
devices; and whether it has what each step runs that the train settings ask for.
"""

from __future__ import annotations

from collections.abc import Iterable

from spindle_cli.account.traffic import communicator_bytes
from spindle_cli.check import (
    against_profile,
    allocations,
    islands,
    parameters,
    predictions,
    structure,
    task_sets,
)
from spindle_cli.check import times as schedule
from spindle_cli.check.types import Violation
from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile
from spindle_cli.workload.settings.types import TaskShare


def check_plan(plan: Plan, profile: Profile | None = None) -> tuple[Violation, ...]:
    """Everything that is wrong with a plan; empty if it is valid.

    With the profile that the plan was made from, also whether they agree. A plan without `metaops` takes them
    from the profile; without one it is checked as far as its slices tell. When slices name MetaOps, ops,
    devices or samples that do not exist, only that is reported: the other rules would be about parts that are
    not there.

    Raises:
        InputError: the profile is of another workload, or has no curves of one of the types of device.
    """
    if profile is not None:
        against_profile.require_same_workload(plan, profile)
        profile = seen_on(profile, plan.cluster)
    whole = plan.outlined() if profile is None else plan.with_metaops_of(profile)
    is_complete = bool(plan.metaops) or profile is not None
    violations = [*structure.names_and_ranges(whole), *task_sets.parts_exist(whole)]
    violations = violations or _entry_rules(whole, is_complete)
    if not violations:
        violations = _rules(whole, profile, is_complete, states_ours=bool(plan.metaops))
    if not violations and plan.task_sets:
        violations += task_sets.sound(whole)
        for tasks, of_set in whole.set_plans.items() if is_complete and not violations else ():
            set_violations = _rules(of_set, profile, is_complete, states_ours=bool(plan.metaops))
            violations += [task_sets.located_in(tasks, violation) for violation in set_violations]
    if profile is not None:
        violations += against_profile.same_profile(whole, profile)
        violations += against_profile.same_metaops(whole, profile)
        violations += against_profile.bound_is_no_guess(whole, profile)
    return tuple(violations)


def first_missing(plan: Plan) -> Violation | None:
    """The first entry of a plan that names what does not exist; None where nothing is wrong with any."""
    missing = structure.names_and_ranges(plan)
    rows = structure.rows_of_shares(plan, is_complete=bool(plan.metaops))
    return next(iter(missing), None) or next(iter(rows), None)


def _entry_rules(whole: Plan, is_complete: bool) -> list[Violation]:
    """Apply the rules for entries of a plan, one by one or against each other, on which the rules for what it
    does rest. `is_complete`: its `metaops` are more than an outline.
    """
    all_waves = [*whole.waves, *(wave for task_set in whole.task_sets for wave in task_set.waves)]
    return [
        *structure.rows_of_shares(whole, is_complete=is_complete),
        *allocations.of_known_types(whole),
        *parameters.matrices_are_gathered_alike(whole),
        *parameters.tied_parameters_are_said_alike(whole),
        *predictions.ranges(all_waves),
    ]


def _rules(whole: Plan, profile: Profile | None, is_complete: bool, *, states_ours: bool) -> list[Violation]:
    """Apply the rules for a plan by itself, whose parts exist. `is_complete`: its `metaops` are more than an
    outline. `states_ours`: what it predicts rests on our account of memory.
    """
    violations: list[Violation] = []
    violations += structure.every_op_once(whole)
    violations += structure.device_lists(whole)
    violations += structure.tensor_parallel_groups(whole)
    violations += schedule.order_of_slices(whole)
    violations += schedule.backward_behind_forward(whole)
    violations += schedule.one_slice_a_device(whole)
    violations += schedule.waves(whole)
    violations += predictions.times(whole)
    violations += predictions.one_peak_a_device(whole)
    violations += islands.cover_the_cluster(whole)
    violations += predictions.has_link(whole)
    if is_complete:
        violations += allocations.valid_allocations(whole)
        violations += allocations.experts_for_all(whole)
        violations += allocations.selective_where_known(whole)
        violations += structure.whole_micro_batches(whole)
        violations += structure.shared_out(whole)
        violations += parameters.copies_are_of_one_type(whole)
        violations += [] if violations else parameters.gathered_matrices_are_whole(whole)
        violations += schedule.durations(whole, profile)
        violations += schedule.producers_first(whole)
        # Who talks to whom is known of a plan with which nothing else is wrong.
        communicators = None if violations else communicator_bytes(whole)
        violations += predictions.memory(whole, communicators)
        violations += predictions.fits(whole)
        if states_ours:  # what another tool predicts may rest on its own account of memory
            violations += predictions.stated_memory(whole, communicators)
            violations += [] if violations else islands.outer_steps_as_predicted(whole)
    return violations


def require_planned(plan: Plan, sets: Iterable[TaskShare], where: str) -> None:
    """Refuse a plan that has none for some steps. `sets`: those that occur. `where`: the plan's file.

    Raises:
        InputError: naming the tasks of a set without a plan.
    """
    planned = [task_set.tasks for task_set in plan.task_sets]
    everything = {metaop.task for metaop in plan.metaops}
    for share in sets:
        if share.tasks not in planned and set(share.tasks) != everything:
            has = "; ".join(", ".join(tasks) for tasks in planned) or "all tasks at every step"
            raise InputError(
                f"{where}: some steps run {', '.join(share.tasks)} alone (train.sampling), and the plan has "
                f"nothing for them; it is for {has}",
                hint="Profile and plan again: the profile says which tasks run together.",
            )
