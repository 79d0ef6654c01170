"""A plan for each set of tasks that steps run.

Each set may run what the plan of all tasks has of it, or a plan of its own, which uses devices that the
others' slices would have had. But a device holds, in every step, what it uses in any, and sums go over all
that hold; so what a plan of its own is worth depends on the others. The plans of all sets are chosen
together, by the mean time of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace

from spindle_cli.account.activations import edges_between, order_passes
from spindle_cli.account.device_memory import MEMORY_FORMULA, DeviceMemory, device_memory, optimizer_steps_s
from spindle_cli.account.joint import joint_of
from spindle_cli.account.traffic import communicator_bytes, traffic_of
from spindle_cli.account.types import Pass
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.assemble import make_waves, plan_metaop
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.placing.predict import Prediction, predict
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import placed_slices
from spindle_cli.plan.search.evaluate import has_room
from spindle_cli.plan.search.posed import Posed, Posing
from spindle_cli.plan.sets.restrict import as_early_as_possible, restricted
from spindle_cli.plan.types import (
    Plan,
    PlannedSet,
    Predicted,
    Slice,
    StrategyName,
    bounds_of_any_cut,
    strategies_on,
)
from spindle_cli.profile.types import Profile

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
    profile = profile.sharded(plan.sharding).weighted(plan.shard_weights)
    sets = _Sets.of(plan, profile, make, posing)
    wholes = [sets.told(0, plan.slices)]
    if all(len(task_set.tasks) < len(sets.all_tasks) for task_set in profile.task_sets):
        # No step runs all tasks: their plan is for evaluations, and may be made of the sets' own, so that
        # nothing is held for it alone. Of equals it is that.
        wholes = [*sets.stacked(), *wholes]
    candidates = [sets.best(whole) for whole in wholes]
    fitting = [chosen for chosen in candidates if chosen is not None]
    assert fitting, "what is left of a plan that fits, fits"
    best = min(fitting, key=lambda chosen: chosen.mean_s(sets.shares))
    return sets.written(plan, best)


@dataclass(frozen=True)
class _Sets:
    """Plans of all tasks and of each set.

    Attributes:
        solvers: the problem of all tasks, then that of each set, with how plans of it are found.
        set_slices: of each set, the slices of a plan of its own.
        apart: whether slices say when each of their passes runs; else when both do.
    """

    profile: Profile
    solvers: tuple[Posed, ...]
    set_slices: tuple[tuple[Slice, ...], ...]
    apart: bool

    @classmethod
    def of(cls, plan: Plan, profile: Profile, make: Planner, posing: Posing) -> _Sets:
        profiles = [profile.of_tasks(task_set.tasks) for task_set in profile.task_sets]
        set_slices = [
            plan.slices if len(set_profile.metaops) == len(profile.metaops) else make(set_profile).slices
            for set_profile in profiles
        ]
        apart = plan.cluster.is_mixed or any(
            slice_.backward_s is not None for slices in (plan.slices, *set_slices) for slice_ in slices
        )
        solvers = tuple(posing.posed(some_profile, plan.cluster) for some_profile in (profile, *profiles))
        sets = cls(profile, solvers, (), apart)
        return replace(
            sets, set_slices=tuple(sets.told(number, slices) for number, slices in enumerate(set_slices, 1))
        )

    @property
    def problems(self) -> list[Problem]:
        """The problem of all tasks, then that of each set."""
        return [solver.problem for solver in self.solvers]

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the steps that each set has."""
        return tuple(task_set.share for task_set in self.profile.task_sets)

    @property
    def all_tasks(self) -> frozenset[str]:
        """The names of the workload's tasks."""
        return frozenset(metaop.task for metaop in self.profile.metaops)

    def stacked(self) -> list[tuple[Slice, ...]]:
        """The sets' own plans one behind the other, each task's slices as in the most frequent set that has
        it; none where no set has some task.
        """
        by_name, seen = self.profile.by_name, set[str]()
        slices: list[Slice] = []
        order: list[Pass] = []
        for task_set, set_slices in zip(self.profile.task_sets, self.set_slices, strict=True):
            new = set(task_set.tasks) - seen
            added = [slice_ for slice_ in set_slices if by_name[slice_.metaop].task in new]
            order += (
                pass_._replace(slice_index=pass_.slice_index + len(slices)) for pass_ in self._order(added)
            )
            slices += added
            seen |= new
        if seen != self.all_tasks:
            return []
        return [
            timed(self.problems[0], slices, order) if self.apart else as_early_as_possible(slices, by_name)
        ]

    def told(self, number: int, slices: Sequence[Slice]) -> tuple[Slice, ...]:
        """Slices of a plan, that of all tasks or of the set with this number, with the times that all say."""
        if not self.apart or all(slice_.backward_s is not None for slice_ in slices):
            return tuple(slices)
        return timed(self.problems[number], slices, self._order(slices))

    def _left(self, number: int, whole: Sequence[Slice]) -> tuple[Slice, ...]:
        """What a plan of all tasks runs for the set with this number, as early as it can be."""
        tasks = self.profile.task_sets[number - 1].tasks
        if not self.apart:
            return restricted(whole, tasks, self.profile.by_name)
        some = [slice_ for slice_ in whole if self.profile.by_name[slice_.metaop].task in tasks]
        return timed(self.problems[number], some, self._order(some))

    def _order(self, slices: Sequence[Slice]) -> tuple[Pass, ...]:
        return order_passes(slices, edges_between(slices, self.profile.by_name))

    def best(self, whole: tuple[Slice, ...]) -> InTurn | None:
        """The best choice for the sets beside a plan of all tasks; None where that does not fit."""
        left = [self._left(number, whole) for number in range(1, len(self.solvers))]
        choices = [
            alone if self._keeps_buffers(alone, some) else some
            for alone, some in zip(self.set_slices, left, strict=True)
        ]
        best = self._evaluate(whole, left)
        if choices == left:
            return best
        chosen = left
        if (tried := self._evaluate(whole, choices)) is not None and self._is_better(tried, best):
            best, chosen = tried, choices
        for number in range(len(chosen)):
            for choice in (left[number], choices[number]):
                changed = [*chosen[:number], choice, *chosen[number + 1 :]]
                if changed != chosen:
                    tried = self._evaluate(whole, changed)
                    if tried is not None and self._is_better(tried, best):
                        best, chosen = tried, changed
        return best

    def _evaluate(self, whole: tuple[Slice, ...], sets: Sequence[tuple[Slice, ...]]) -> InTurn | None:
        return evaluate_in_turn(self.problems, [whole, *sets])

    def _is_better(self, tried: InTurn, best: InTurn | None) -> bool:
        return best is None or tried.mean_s(self.shares) < best.mean_s(self.shares)

    def _keeps_buffers(self, alone: Collection[Slice], some: Collection[Slice]) -> bool:
        """Whether what changes buffers runs where it does in the plan of all tasks: they stay there."""
        changing = {metaop.name for metaop in self.profile.metaops if metaop.changes_buffers}

        def places(slices: Collection[Slice]) -> set[object]:
            return {
                (slice_.metaop, slice_.ops, slice_.devices, slice_.dp, slice_.rows)
                for slice_ in slices
                if slice_.metaop in changing
            }

        return places(alone) == places(some)

    def written(self, plan: Plan, chosen: InTurn) -> Plan:
        """The plan with what was chosen."""
        every = [slice_ for slices in chosen.slices for slice_ in slices]
        predicted = [
            _predicted(chosen, number, solver.lower_bound_s) for number, solver in enumerate(self.solvers)
        ]
        predicted[0] = predicted[0].model_copy(update=bounds_of_any_cut(plan.predicted))
        sets = tuple(
            PlannedSet(
                tasks=task_set.tasks, share=task_set.share, predicted=set_predicted, waves=make_waves(slices)
            )
            for task_set, set_predicted, slices in zip(
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
            "schema_": "spindle.plan/2" if self.apart else "spindle.plan/1",
        }
        return Plan(**{**fields, **made})


def _predicted(chosen: InTurn, number: int, lower_bound_s: float) -> Predicted:
    return Predicted(
        **asdict(chosen.predictions[number]),
        lower_bound_s=lower_bound_s,
        peak_memory_bytes=tuple(device.total_bytes for device in chosen.memory[number]),
        memory_formula=MEMORY_FORMULA,
    )


@dataclass(frozen=True)
class InTurn:
    """Plans that run in turn, that of all tasks first: of each its slices, what each device holds, and how
    long its step takes. `sums_by_node`: as a plan says it.
    """

    slices: tuple[tuple[Slice, ...], ...]
    memory: tuple[tuple[DeviceMemory, ...], ...]
    predictions: tuple[Prediction, ...]
    sums_by_node: bool = True

    def mean_s(self, shares: Sequence[float]) -> float:
        """Seconds of an iteration on average; `shares`: of the steps, of every plan but that of all tasks."""
        steps = zip(self.predictions[1:], shares, strict=True)
        return sum(prediction.iteration_s * share for prediction, share in steps)


def evaluate_in_turn(problems: Sequence[Problem], slices: Sequence[tuple[Slice, ...]]) -> InTurn | None:
    """Judge plans that run in turn; None where one does not fit the devices' memory, either with what goes by
    nodes or with all over all devices at once.

    Args:
        problems: of all tasks, then of each set's.
        slices: of each, in order of start.
    """
    by_node = _evaluated(problems, slices, sums_by_node=True)
    return by_node or _evaluated(problems, slices, sums_by_node=False)


def _evaluated(
    problems: Sequence[Problem], slices: Sequence[tuple[Slice, ...]], *, sums_by_node: bool
) -> InTurn | None:
    whole = problems[0]
    joint = joint_of(slices, whole.profile.by_name)
    communicators: tuple[int, ...] | None = None
    memory, predictions = [], []
    for member, (problem, member_slices) in enumerate(zip(problems, slices, strict=True)):
        alone = placed_slices(problem, member_slices)
        placed = replace(alone, joint=joint, member=member, sums_by_node=sums_by_node)
        traffic = traffic_of(placed)
        if communicators is None:  # those of all plans
            communicators = communicator_bytes(placed)
        profile, cluster = problem.profile, problem.cluster
        needs = device_memory(
            profile.metaops, member_slices, cluster, profile, communicators, (joint, member)
        )
        if not has_room(problem, needs):
            return None
        steps_s = optimizer_steps_s(needs, profile.optimizer_s_per_byte)
        compute_s = max(slice_.last_s for slice_ in member_slices)
        memory.append(needs)
        predictions.append(predict(problem, member_slices, traffic, compute_s, steps_s))
    return InTurn(tuple(slices), tuple(memory), tuple(predictions), sums_by_node)


def by_best_strategy(strategy: StrategyName, cluster: Cluster, make: Callable[[StrategyName], Plan]) -> Plan:
    """The plan by a strategy; by `spindle` the fastest in the mean of the steps by any, of equals its own.

    Args:
        make: the plan of all sets by one strategy.

    Raises:
        NoPlanError: there is none.
    """
    if strategy != "spindle":
        return make(strategy)
    plans: list[Plan] = []
    failed: NoPlanError | None = None
    for name in strategies_on(cluster):
        try:
            plans.append(make(name))
        except NoPlanError as error:
            failed = failed or error  # what its own strategy says is told
    if not plans:
        assert failed is not None
        raise failed
    best = min(plans, key=lambda plan: plan.mean_iteration_s)
    if best.strategy == strategy:
        return best
    note = f"No better plan was found than {best.strategy}'s, so this is it."
    return best.model_copy(update={"strategy": strategy, "notes": (*best.notes, note)})
