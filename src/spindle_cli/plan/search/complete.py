"""Making a plan of the contract's keys alone, as another tool may write it, complete."""

from __future__ import annotations

from spindle_cli.account.device_memory import MEMORY_FORMULA, device_memory
from spindle_cli.account.traffic import communicator_bytes
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile


def completed(plan: Plan, profile: Profile) -> Plan:
    """A valid plan with everything that predicting and running it needs; as it is if it has `metaops`.

    What the slices run comes from the profile. The other tool's peak memory may rest on its own account of
    what a device holds, so ours takes its place.
    """
    if plan.metaops:
        return plan
    whole = plan.with_metaops_of(profile)
    needs = device_memory(
        whole.metaops, whole.slices, whole.cluster, whole, communicator_bytes(whole), whole.turn
    )
    peaks = tuple(need.total_bytes for need in needs)
    predicted = whole.predicted.model_copy(
        update={"peak_memory_bytes": peaks, "memory_formula": MEMORY_FORMULA}
    )
    return whole.model_copy(update={"predicted": predicted})
