"""A plan for each set of tasks that steps run.

Each set may run what the plan of all tasks has of it, or a plan of its own, which uses devices that the
others' slices would have had. But a device holds, in every step, what it uses in any, and sums go over all
that hold; so what a plan of its own is worth depends on the others. The plans of all sets are chosen
together, by the mean time of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass

from spindle_cli.account.device_memory import MEMORY_FORMULA
from spindle_cli.plan.assemble import make_waves, plan_metaop
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.posed import Posed, Posing
from spindle_cli.plan.sets.in_turn import InTurn, judge_in_turn
from spindle_cli.plan.sets.passes import both_at_once, each_by_itself
from spindle_cli.plan.sets.restrict import as_early_as_possible, restricted
from spindle_cli.plan.types import Plan, PlannedSet, Predicted, Slice
from spindle_cli.profile.types import Profile, TaskShare

# Makes the plan of a profile without sets.
Planner = Callable[[Profile], Plan]


def with_sets(plan: Plan, profile: Profile, make: Planner, posing: Posing) -> Plan:
    """The plan of all tasks with one for each of the profile's sets, its own predictions made again.

    Args:
        plan: of all tasks.
        profile: what it was made from.
        make: plans a profile of some of the tasks alone.
        posing: makes problems for the plan's devices.
    """
    sets = _Sets.of(plan, profile, make, posing)
    wholes = [both_at_once(plan.slices, profile.by_name)]
    if all(len(each.tasks) < len(sets.all_tasks) for each in profile.task_sets):
        # No step runs all tasks: their plan is for evaluations, and may be made of the sets' own, so that
        # nothing is held for it alone. Of equals it is that.
        wholes = [*sets.stacked(), *wholes]
    candidates = [sets.best(whole) for whole in wholes]
    found = [chosen for chosen in candidates if chosen is not None]
    assert found, "what is left of a plan that fits, fits"
    best = min(found, key=lambda chosen: chosen.mean_s(sets.shares))
    return sets.written(plan, best)


@dataclass(frozen=True)
class _Sets:
    """`posed`: of all tasks, then of each set's. `own`: of each set, the slices of a plan of its own."""

    profile: Profile
    posed: tuple[Posed, ...]
    own: tuple[tuple[Slice, ...], ...]

    @classmethod
    def of(cls, plan: Plan, profile: Profile, make: Planner, posing: Posing) -> _Sets:
        profiles = [of_tasks(profile, each.tasks) for each in profile.task_sets]
        own = (
            plan.slices if len(each.metaops) == len(profile.metaops) else make(each).slices
            for each in profiles
        )
        at_once = tuple(both_at_once(slices, profile.by_name) for slices in own)
        posed = (posing.posed(each, plan.cluster) for each in (profile, *profiles))
        return cls(profile, tuple(posed), at_once)

    @property
    def problems(self) -> list[Problem]:
        """Of all tasks, then of each set's."""
        return [each.problem for each in self.posed]

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the steps, of each set."""
        return tuple(each.share for each in self.profile.task_sets)

    @property
    def all_tasks(self) -> frozenset[str]:
        """Of the workload."""
        return frozenset(metaop.task for metaop in self.profile.metaops)

    def stacked(self) -> list[tuple[Slice, ...]]:
        """The sets' own plans one behind the other, each task's slices as in the most frequent set that has
        it; none where no set has some task.
        """
        by_name, slices, known = self.profile.by_name, [], set[str]()
        for each, own in zip(self.profile.task_sets, self.own, strict=True):
            new = set(each.tasks) - known
            slices += [piece for piece in own if by_name[piece.metaop].task in new]
            known |= new
        return [as_early_as_possible(slices, by_name)] if known == self.all_tasks else []

    def best(self, whole: tuple[Slice, ...]) -> InTurn | None:
        """The best choice for the sets beside a plan of all tasks; None where that does not fit."""
        by_name = self.profile.by_name
        left = [restricted(whole, each.tasks, by_name) for each in self.profile.task_sets]
        own = [
            alone if self._keeps_buffers(alone, some) else some
            for alone, some in zip(self.own, left, strict=True)
        ]
        best = self._judge(whole, left)
        if own == left:
            return best
        chosen = left
        if (other := self._judge(whole, own)) is not None and self._is_better(other, best):
            best, chosen = other, own
        for number in range(len(chosen)):
            for choice in (left[number], own[number]):
                changed = [*chosen[:number], choice, *chosen[number + 1 :]]
                if changed != chosen:
                    other = self._judge(whole, changed)
                    if other is not None and self._is_better(other, best):
                        best, chosen = other, changed
        return best

    def _judge(self, whole: tuple[Slice, ...], sets: Sequence[tuple[Slice, ...]]) -> InTurn | None:
        return judge_in_turn(self.problems, [whole, *sets])

    def _is_better(self, one: InTurn, other: InTurn | None) -> bool:
        return other is None or one.mean_s(self.shares) < other.mean_s(self.shares)

    def _keeps_buffers(self, alone: Collection[Slice], some: Collection[Slice]) -> bool:
        """Whether what changes buffers runs where it does in the plan of all tasks: they stay there."""
        changing = {metaop.name for metaop in self.profile.metaops if metaop.changes_buffers}

        def places(slices: Collection[Slice]) -> set[object]:
            return {
                (piece.metaop, piece.ops, piece.devices, piece.dp)
                for piece in slices
                if piece.metaop in changing
            }

        return places(alone) == places(some)

    def written(self, plan: Plan, chosen: InTurn) -> Plan:
        """The plan with what was chosen."""
        if plan.cluster.is_mixed:
            chosen = self._with_times_of_passes(chosen)
        every = [piece for slices in chosen.slices for piece in slices]
        predicted = [
            _predicted(chosen, number, posed.lower_bound_s) for number, posed in enumerate(self.posed)
        ]
        sets = tuple(
            PlannedSet(tasks=each.tasks, share=each.share, predicted=own, waves=make_waves(slices))
            for each, own, slices in zip(
                self.profile.task_sets, predicted[1:], chosen.slices[1:], strict=True
            )
        )
        fields = {name: getattr(plan, name) for name in plan.model_fields_set}
        metaops = tuple(plan_metaop(metaop, every, plan.cluster) for metaop in self.profile.metaops)
        made = {
            "predicted": predicted[0],
            "metaops": metaops,
            "waves": make_waves(chosen.slices[0]),
            "task_sets": sets,
            "sums_by_node": chosen.sums_by_node,
        }
        return Plan(**{**fields, **made})

    def _with_times_of_passes(self, chosen: InTurn) -> InTurn:
        """The same, where slices have to say when each pass runs."""
        slices = [
            each_by_itself(problem, own) for problem, own in zip(self.problems, chosen.slices, strict=True)
        ]
        told = judge_in_turn(self.problems, slices)
        assert told is not None, "passes in the order of before need no more memory"
        return told


def _predicted(chosen: InTurn, number: int, lower_bound_s: float) -> Predicted:
    return Predicted(
        **asdict(chosen.predictions[number]),
        lower_bound_s=lower_bound_s,
        peak_memory_bytes=tuple(device.total_bytes for device in chosen.memory[number]),
        memory_formula=MEMORY_FORMULA,
    )


def of_tasks(profile: Profile, tasks: Collection[str]) -> Profile:
    """The profile of some tasks alone, and of steps that run just these."""
    fields = {name: getattr(profile, name) for name in profile.model_fields_set}
    metaops = tuple(metaop for metaop in profile.metaops if metaop.task in tasks)
    just_these = TaskShare(tasks=tuple(tasks), share=1.0)
    made = Profile(**{**fields, "metaops": metaops, "task_sets": (just_these,)})
    return made.asked_as(profile)
