"""Check a plan: every rule of docs/contracts.md, without the planner's code (only its types and `costs/`)."""

from __future__ import annotations

from spindle_cli.check import against_profile, predictions, schedule, structure
from spindle_cli.check.types import Violation
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile


def check_plan(plan: Plan, profile: Profile | None = None) -> tuple[Violation, ...]:
    """Everything that is wrong with a plan; empty if it is valid.

    With the profile that the plan was made from, also whether they agree. When slices name MetaOps, ops or
    devices that do not exist, only that is reported: the other rules would be about parts that are not there.

    Raises:
        InputError: the profile is of another workload.
    """
    if profile is not None:
        against_profile.require_same_workload(plan, profile)
    found = list(structure.names_and_ranges(plan))
    if not found:
        found += structure.every_op_once(plan)
        found += structure.valid_allocations(plan)
        found += schedule.durations(plan)
        found += schedule.order_of_slices(plan)
        found += schedule.producers_first(plan)
        found += schedule.one_slice_a_device(plan)
        found += schedule.waves(plan)
        found += predictions.times(plan)
        found += predictions.memory(plan)
    if profile is not None:
        found += against_profile.same_profile(plan, profile)
        found += against_profile.same_metaops(plan, profile)
        found += against_profile.bound_is_no_guess(plan, profile)
    return tuple(found)
