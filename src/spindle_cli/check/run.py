"""Check a plan: every rule of `RULES`, without the planner's code: only its types and the memory of
devices.
"""

from __future__ import annotations

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
from spindle_cli.plan.types import Plan
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile


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
    found = [*structure.names_and_ranges(whole), *task_sets.parts_exist(whole)]
    if not found:
        found += structure.rows_of_shares(whole, is_complete=is_complete)
        found += allocations.of_known_types(whole)
        found += parameters.matrices_are_gathered_alike(whole)
        found += parameters.tied_parameters_are_said_alike(whole)
        found += predictions.ranges(
            [*whole.waves, *(wave for each in whole.task_sets for wave in each.waves)]
        )
    if not found:
        found = _rules(whole, profile, is_complete, states_ours=bool(plan.metaops))
    if not found and plan.task_sets:
        found += task_sets.sound(whole)
        for tasks, of_set in whole.set_plans.items() if is_complete and not found else ():
            own = _rules(of_set, profile, is_complete, states_ours=bool(plan.metaops))
            found += [task_sets.located_in(tasks, violation) for violation in own]
    if profile is not None:
        found += against_profile.same_profile(whole, profile)
        found += against_profile.same_metaops(whole, profile)
        found += against_profile.bound_is_no_guess(whole, profile)
    return tuple(found)


def _rules(whole: Plan, profile: Profile | None, is_complete: bool, *, states_ours: bool) -> list[Violation]:
    """Apply the rules for a plan by itself, whose parts exist. `is_complete`: its `metaops` are more than an
    outline. `states_ours`: what it predicts rests on our account of memory.
    """
    found: list[Violation] = []
    found += structure.every_op_once(whole)
    found += structure.device_lists(whole)
    found += structure.tensor_parallel_groups(whole)
    found += schedule.order_of_slices(whole)
    found += schedule.backward_behind_forward(whole)
    found += schedule.one_slice_a_device(whole)
    found += schedule.waves(whole)
    found += predictions.times(whole)
    found += predictions.one_peak_a_device(whole)
    found += islands.cover_the_cluster(whole)
    found += predictions.has_link(whole)
    if is_complete:
        found += allocations.valid_allocations(whole)
        found += allocations.experts_for_all(whole)
        found += allocations.selective_where_known(whole)
        found += structure.whole_micro_batches(whole)
        found += structure.shared_out(whole)
        found += parameters.copies_are_of_one_type(whole)
        found += [] if found else parameters.gathered_matrices_are_whole(whole)
        found += schedule.durations(whole, profile)
        found += schedule.producers_first(whole)
        # Who talks to whom is known of a plan with which nothing else is wrong.
        communicators = None if found else communicator_bytes(whole)
        found += predictions.memory(whole, communicators)
        found += predictions.fits(whole)
        if states_ours:  # what another tool predicts may rest on its own account of memory
            found += predictions.stated_memory(whole, communicators)
            found += [] if found else islands.outer_steps_as_predicted(whole)
    return found
