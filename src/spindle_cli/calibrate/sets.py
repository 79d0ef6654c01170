"""Runs whose steps ran several sets of tasks: of each set its plan, and what the last steps show of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from spindle_cli.account.joint import joint_groups
from spindle_cli.account.traffic import uses_of
from spindle_cli.account.types import Joint
from spindle_cli.files.runs.timeline import MeasuredSpan, MeasuredStep, MeasuredTimeline
from spindle_cli.plan.types import Plan


def plan_of_set(plan: Plan, tasks: Sequence[str]) -> Plan | None:
    """What steps ran that ran just these tasks; None where the plan has nothing for them."""
    own = plan.set_plans.get(tuple(tasks))
    if own is not None:
        return own
    return plan if set(tasks) == {metaop.task for metaop in plan.metaops} else None


def timeline_of_set(timeline: MeasuredTimeline, own: Plan) -> MeasuredTimeline:
    """The steps that ran a set's plan, with its own numbers of slices and parameter groups."""
    assert own.joint is not None, "a set's plan runs in turn with others"
    place = {index: number for number, index in enumerate(own.joint.members[own.member])}
    group = _own_groups(own, place)
    tasks = own.joint.tasks[own.member]
    steps = [
        step.model_copy(
            update={"devices": tuple(tuple(_renumbered(spans, place, group)) for spans in step.devices)}
        )
        for step in timeline.steps
        if _ran_by(step, own.joint) == tasks
    ]
    return timeline.model_copy(update={"steps": tuple(steps)})


def _own_groups(own: Plan, place: Mapping[int, int]) -> dict[int, int]:
    """Number the parameter groups of all plans that one plan adds to as that plan numbers them."""
    assert own.joint is not None
    groups = joint_groups(own.joint, uses_of(own), own.cluster, own.gradient_bytes_per_param)
    added_to = [group.index for group in groups if not place.keys().isdisjoint(group.slices)]
    return {index: number for number, index in enumerate(added_to)}


def _ran_by(step: MeasuredStep, joint: Joint) -> set[str]:
    """The tasks that a step ran."""
    spans = (span for spans in step.devices for span in spans)
    slices = {span.slice for span in spans if span.kind == "forward" and span.slice is not None}
    return {joint.by_name[joint.slices[index].metaop].task for index in slices}


def _renumbered(
    spans: Sequence[MeasuredSpan], place: Mapping[int, int], group: Mapping[int, int]
) -> Iterator[MeasuredSpan]:
    """Spans of all plans' slices as those of one; what is of no slice of it is left out."""
    for span in spans:
        if any(index is not None and index not in place for index in (span.slice, span.source_slice)):
            continue
        yield span.model_copy(
            update={
                "slice": None if span.slice is None else place[span.slice],
                "source_slice": None if span.source_slice is None else place[span.source_slice],
                "group": None if span.group is None else group.get(span.group),
            }
        )
