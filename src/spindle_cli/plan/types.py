"""The plan file: waves of placed slices, and the predictions they rest on.

A plan is complete in itself: with the cluster and the summary of every MetaOp inside, it can be checked,
drawn, simulated and turned into each rank's program without the profile or the workload.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, PrivateAttr, model_validator

from spindle_cli.account.joint import joint_of
from spindle_cli.account.types import Joint
from spindle_cli.files.artifact import Model, shown, validate
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import LARGEST_WEIGHT, Sharding
from spindle_cli.plan.sharing_out import SharingOut, require_kept, require_weights, with_kept
from spindle_cli.plan.slices import Slice as Slice
from spindle_cli.plan.slices import Wave as Wave
from spindle_cli.plan.slices import fitted_to
from spindle_cli.plan.slices import format_devices as format_devices
from spindle_cli.plan.slices import parse_devices as parse_devices
from spindle_cli.profile.metagraph import check_metagraph
from spindle_cli.profile.types import (
    Bytes,
    CurvePoint,
    MetaOp,
    Profile,
    Seconds,
    ShareTime,
    TrainedArtifact,
    WorkloadRef,
)
from spindle_cli.units import format_seconds
from spindle_cli.workload.settings.types import TaskShare, require_told_apart

StrategyName = Literal["spindle", "sequential", "distmm", "optimus", "dp-even", "dp-flops"]
# How gradients are summed: each matrix in its fastest way; all as they are; all that can, in one way.
Sums = Literal["auto", "dense", "rows", "factors"]
# What `spindle` is compared with, on devices of one type and of several.
ON_ONE_TYPE: tuple[StrategyName, ...] = ("spindle", "sequential", "distmm", "optimus")
ON_SEVERAL_TYPES: tuple[StrategyName, ...] = ("spindle", "sequential", "dp-even", "dp-flops")


def strategies_on(cluster: Cluster) -> tuple[StrategyName, ...]:
    """The strategies that plan for a cluster."""
    return ON_SEVERAL_TYPES if cluster.is_mixed else ON_ONE_TYPE


class Predicted(Model):
    """What the plan is expected to do. `compute_s` and the parts below it add up to `iteration_s`.

    Attributes:
        iteration_s: Seconds of one batch of every task, on average over the batches of a step.
        compute_s: When the last pass of the schedule ends.
        lower_bound_s: The optimum of the linear program over the whole graph: no schedule in which slices run
            forward and backward together ends before it. A plan of version 2 may.
        lower_bound_any_s: What no schedule ends before, into however many micro-batches and shares batches
            are cut. Absent: the planner has not said; so are the next two.
        lower_bound_with_memory_s: The same of schedules that fit the devices' memory.
        lower_bound_with_links_s: What no iteration is shorter than, with what messages and sums take.
        peak_memory_bytes: Bytes of each device at its fullest moment. With `task_sets`, what it uses in any
            of them counts.
        host_memory_bytes: Bytes of activations in the memory of each node, under `offload`. Absent: none are
            there.
        memory_formula: Which account of memory is behind `peak_memory_bytes`. Absent: that of versions that
            did not note it.
        transfer_s: Added by transfers, copies and gathers that passes wait for.
        processor_s: Added by what communication, reading and the runtime take of processors that compute.
        gradient_sum_s: Added by gradient sums, and by gathers of the parameters that they have updated.
        optimizer_s: Added by the optimizer's step.
        held_up_s: Added by what runs have shown beyond all that, where the profile is calibrated.
    """

    iteration_s: Seconds
    compute_s: Seconds
    lower_bound_s: Seconds
    lower_bound_any_s: Seconds | None = None
    lower_bound_with_memory_s: Seconds | None = None
    lower_bound_with_links_s: Seconds | None = None
    peak_memory_bytes: tuple[Bytes, ...]
    host_memory_bytes: tuple[Bytes, ...] = ()
    memory_formula: Annotated[int, Field(ge=1)] = 1
    transfer_s: Seconds = 0.0
    processor_s: Seconds = 0.0
    gradient_sum_s: Seconds = 0.0
    optimizer_s: Seconds = 0.0
    held_up_s: Seconds = 0.0


# The bounds of batches cut in any way, with what reports call them.
BOUNDS_OF_ANY_CUT = {
    "lower_bound_any_s": "however batches are cut",
    "lower_bound_with_memory_s": "with memory",
    "lower_bound_with_links_s": "with links",
}


class _HasBounds(Protocol):
    @property
    def lower_bound_any_s(self) -> float | None: ...
    @property
    def lower_bound_with_memory_s(self) -> float | None: ...
    @property
    def lower_bound_with_links_s(self) -> float | None: ...


def bounds_of_any_cut(of: _HasBounds) -> dict[str, float | None]:
    """The bounds of batches cut in any way, by their keys."""
    return {name: getattr(of, name) for name in BOUNDS_OF_ANY_CUT}


def describe_bounds(of: _HasBounds) -> str | None:
    """The words for the bounds of batches cut in any way; None: nobody has said them."""
    bounds = bounds_of_any_cut(of).items()
    said = [f"{format_seconds(s)} {BOUNDS_OF_ANY_CUT[name]}" for name, s in bounds if s is not None]
    return ", ".join(said) or None


class PlanMetaOp(MetaOp):
    """A MetaOp as the plan needs it: the profile's entry, with only the curve points and shares that the plan
    uses.

    Attributes:
        flops_per_op: As in the profile.
        curve: Those points of the profile's curve that the plan's allocations use.
        shares: Times of shares that the plan's micro-batches and unequal shares use.
    """

    flops_per_op: Annotated[float, Field(ge=0)] | None = None
    curve: tuple[CurvePoint, ...] = ()
    shares: tuple[ShareTime, ...] = ()


class ProfileRef(Model):
    """Which profile the plan was made from.

    Attributes:
        sha256: Of its canonical JSON. In a plan that another tool wrote it may also be that of its bytes.
        processors: On a cluster with CPUs of several types, the model on which each type was measured.
    """

    sha256: str
    processors: dict[str, str] = Field(default_factory=dict)


class PlannedSet(TaskShare):
    """What the steps run that run just these tasks: their slices, and what is predicted of them.

    Devices hold what they use in any set, and in the plan of all tasks: `peak_memory_bytes` counts it.

    Attributes:
        predicted: What is predicted of such a step.
        waves: Slices of the MetaOps of these tasks.
    """

    predicted: Predicted
    waves: Annotated[tuple[Wave, ...], Field(min_length=1)]


class PlannedIslands(Model):
    """Where the islands of `train.local_sgd` are, and what outer steps take; the rest of a plan is of one.

    Attributes:
        cluster: The cluster file's content. Island i has the i-th of as many equal runs of its nodes; the
            plan's `cluster` is the first of them.
        outer_step_bytes: By device of an island, what it sends to its peer replicas in each outer step.
        outer_step_s: Seconds that an outer step adds to the step before it.
        without_s: Predicted seconds of an iteration with a plan for all devices, which average gradients in
            every step. Absent: there is no such plan, or nobody knows.
    """

    cluster: Cluster
    outer_step_bytes: tuple[Bytes, ...]
    outer_step_s: Seconds
    without_s: Seconds | None = None


class Plan(TrainedArtifact):
    """The plan file: waves of slices on a cluster, with all that is needed to check, draw, simulate and run
    them.

    In version 1 the times of a slice cover its forward and backward pass together, the backward passes
    mirroring the forward ones. In version 2 the two are jobs of their own. Version 1 is still written
    wherever an order of the passes of its own would gain next to nothing.

    Attributes:
        strategy: Which strategy made it.
        workload: The workload that it is for.
        profile: The profile that it was made from.
        cluster: The cluster file's content; with `islands`, the part of it that the first island has.
        threads_per_process: torch's threads of each process in which the curves were measured: launch gives
            its workers as many.
        compile: By what `torch.compile` compiled the layers that were measured. Absent: by nothing.
        unchecked: By the name of a MetaOp that the plan splits over the batch, or of a task as a whole, why
            the profile has not checked by numbers that it is trained as in one process.
        notes: What the planner has to say, such as that no plan beats `sequential`.
        predicted: What is predicted of an iteration; with `task_sets`, of one of all tasks.
        metaops: What the slices run. Absent from a plan that another tool wrote: `spindle check --profile`
            fills it in.
        micro_batches: By task, into how many equal parts its batch is cut; K divides the batch. Tasks that
            exchange values have as many, and one where an op needs the whole batch. Absent: one. In version 2
            alone.
        sharding: By key of parameters (`parameters` of a MetaOp, or its name), what the devices that hold
            them share out among themselves (ZeRO-0 to 3): `none`, not even optimizer state, `optimizer`,
            their state, `gradients`, or `parameters`. Absent: as the train settings say. In version 2 alone,
            with `optimizer_state_sharded`.
        sharding_kept: Those of the keys with `parameters` whose parameters, once gathered for a slice's
            forward pass, stay whole until its backward pass is through (FSDP's
            `reshard_after_forward=False`). Absent: none.
        shard_weights: Of each device, how much it has of what devices share out: of every component, those
            that hold it have ranges in proportion to their own, cut at multiples of 64 bytes of parameters,
            in the order of the devices. Ranges of small parameters may be empty. Absent: equal ranges. It
            needs `optimizer_state_sharded`.
        sums_by_node: Whether what devices of several nodes sum and gather may go inside of these and between
            them by itself, where that is worth it.
        waves: Groups of slices that run side by side; in version 2, of their forward passes.
        task_sets: Where not every step runs all tasks (`train.sampling`), a plan for each set of tasks that
            some steps run; `waves` and `predicted` stay those of a step of all tasks.
        islands: Where `local_sgd` has islands; all else is then of each of them.
    """

    KIND: ClassVar[str] = "plan"

    MAJORS: ClassVar[tuple[int, ...]] = (1, 2)

    schema_: Annotated[Literal["spindle.plan/1", "spindle.plan/2"], Field(alias="schema")] = "spindle.plan/1"
    strategy: StrategyName
    workload: WorkloadRef
    profile: ProfileRef
    cluster: Cluster
    threads_per_process: Annotated[int, Field(ge=1)] | None = None
    compile: str | None = None
    unchecked: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    predicted: Predicted
    metaops: tuple[PlanMetaOp, ...] = ()
    micro_batches: dict[str, Annotated[int, Field(ge=2, le=2**31)]] = Field(default_factory=dict)
    sharding: dict[str, SharingOut] = Field(default_factory=dict)
    sharding_kept: tuple[str, ...] = ()
    shard_weights: tuple[Annotated[int, Field(ge=1, le=LARGEST_WEIGHT)], ...] = ()
    sums_by_node: bool = True
    waves: Annotated[tuple[Wave, ...], Field(min_length=1)]
    task_sets: tuple[PlannedSet, ...] = ()
    islands: PlannedIslands | None = None
    _joint: Joint | None = PrivateAttr(default=None)
    _member: int = PrivateAttr(default=0)

    @model_validator(mode="after")
    def _metagraph_is_a_dag(self) -> Plan:
        check_metagraph(self.metaops)
        return self

    @model_validator(mode="after")
    def _version_says_what_times_are_of(self) -> Plan:
        # Not by `slices`, which is kept: a copy with other waves would keep it too.
        waves = (*self.waves, *(wave for task_set in self.task_sets for wave in task_set.waves))
        for slice_ in (slice_ for wave in waves for slice_ in wave.slices):
            if (slice_.backward_s is not None) != (self.schema_ == "spindle.plan/2"):
                is_first = self.schema_ == "spindle.plan/1"
                expected = "none in version 1" if is_first else "one for every slice of version 2"
                raise ValueError(f"slice {slice_.label}: backward_start_s: expected {expected}")
            if slice_.rows is not None and self.schema_ == "spindle.plan/1":
                raise ValueError(f"slice {slice_.label}: rows: expected none in version 1")
        return self

    @model_validator(mode="after")
    def _micro_batches_are_sound(self) -> Plan:
        if self.micro_batches and self.schema_ == "spindle.plan/1":
            raise ValueError("micro_batches: expected none in version 1")
        if not self.metaops:
            return self
        for metaop in self.metaops:
            count = self.micro_batches.get(metaop.task, 1)
            if metaop.batch_size % count:
                raise ValueError(
                    f"micro_batches: {count} of task {metaop.task!r} does not divide its batch of "
                    f"{metaop.batch_size} samples"
                )
        unknown = self.micro_batches.keys() - {metaop.task for metaop in self.metaops}
        if unknown:
            raise ValueError(f"micro_batches: no MetaOp is of a task {min(unknown)!r}")
        # Slices of a file do not say of how many micro-batches theirs is one, nor how many samples that has.
        by_name = {metaop.name: metaop for metaop in self.metaops}
        fitted = tuple(fitted_to(wave, by_name, self.micro_batches) for wave in self.waves)
        object.__setattr__(self, "waves", fitted)
        return self

    @model_validator(mode="before")
    @classmethod
    def _what_is_kept_is_a_level(cls, data: Any) -> Any:
        return with_kept(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _sharding_is_sound(self) -> Plan:
        require_kept(self.sharding_kept, self.sharding)
        kept = tuple(key for key, level in self.sharding.items() if level is Sharding.KEPT)
        object.__setattr__(self, "sharding_kept", kept)
        if not self.sharding:
            return self
        if self.schema_ == "spindle.plan/1":
            raise ValueError("sharding: expected none in version 1")
        if not self.optimizer_state_sharded:
            raise ValueError(
                "sharding: expected none where the train settings do not let devices share optimizer state"
            )
        keys = {metaop.parameters or metaop.name for metaop in self.metaops}
        unknown = self.sharding.keys() - keys
        if self.metaops and unknown:
            raise ValueError(
                f"sharding: no MetaOp has parameters {shown(min(unknown))}; expected one of "
                f"{', '.join(sorted(keys))}"
            )
        return self

    @model_validator(mode="after")
    def _islands_are_asked_for(self) -> Plan:
        if (self.islands is None) != (self.local_sgd is None):
            missing, there = ("islands", "local_sgd") if self.islands is None else ("local_sgd", "islands")
            raise ValueError(f"{missing}: this key is missing; expected both, as there is {there}")
        if self.islands is not None and self.task_sets:
            raise ValueError("islands: expected no task_sets beside them")
        return self

    @model_validator(mode="after")
    def _shard_weights_are_sound(self) -> Plan:
        require_weights(self.shard_weights, self.cluster, is_sharded=self.optimizer_state_sharded)
        return self

    @model_validator(mode="after")
    def _sets_are_told_apart(self) -> Plan:
        require_told_apart(self.task_sets)
        for task_set in self.task_sets if self.metaops else ():
            expected_names = {metaop.name for metaop in self.metaops if metaop.task in task_set.tasks}
            named = {slice_.metaop for wave in task_set.waves for slice_ in wave.slices}
            if expected_names != named:
                expected = ", ".join(sorted(expected_names)) or "those of tasks in metaops"
                raise ValueError(
                    f"task_sets: the slices of {', '.join(task_set.tasks)} are of "
                    f"{', '.join(sorted(named))}; expected {expected}"
                )
        return self

    @cached_property
    def joint(self) -> Joint | None:
        """This plan's slices with those of its sets; None where every step runs all tasks, and where
        no `metaops` say what they are.
        """
        if self._joint is not None or not self.task_sets or not self.metaops:
            return self._joint
        of_sets = [
            [slice_ for wave in task_set.waves for slice_ in wave.slices] for task_set in self.task_sets
        ]
        return joint_of([self.slices, *of_sets], self.by_name)

    @property
    def mean_iteration_s(self) -> float:
        """Predicted seconds of an iteration on average over the steps, by how many run each set of tasks."""
        return self.of_steps.iteration_s

    @cached_property
    def of_steps(self) -> Predicted:
        """What is predicted of the steps: where these run several sets of tasks, the mean of their seconds,
        by how many run each, and the most memory that each device needs in any. With islands, each step has
        its part of the outer step.
        """
        if self.islands is not None:
            whole_s = self.predicted.iteration_s + self.outer_share_s
            return self.predicted.model_copy(update={"iteration_s": whole_s})
        if not self.task_sets:
            return self.predicted
        mean = {
            name: sum(task_set.share * getattr(task_set.predicted, name) for task_set in self.task_sets)
            for name in Predicted.model_fields
            if name.endswith("_s") and name not in BOUNDS_OF_ANY_CUT
        }
        needs = zip(*(task_set.predicted.peak_memory_bytes for task_set in self.task_sets), strict=True)
        return self.predicted.model_copy(update={**mean, "peak_memory_bytes": tuple(map(max, needs))})

    @property
    def outer_share_s(self) -> float:
        """Seconds that outer steps add to an iteration on average; nothing without islands."""
        if self.islands is None or self.local_sgd is None:
            return 0.0
        return self.islands.outer_step_s / (self.local_sgd.every * self.accumulate)

    @property
    def whole_cluster(self) -> Cluster:
        """All devices that it runs on: the cluster file's."""
        return self.cluster if self.islands is None else self.islands.cluster

    @property
    def turn(self) -> tuple[Joint, int] | None:
        """`joint` and `member`, where there are any."""
        return None if self.joint is None else (self.joint, self._member)

    @property
    def every_slice(self) -> tuple[Slice, ...]:
        """The slices of this plan, and behind them what its sets have besides."""
        return self.slices if self.joint is None else self.joint.slices  # type: ignore[return-value]  # of plans they are Slices

    @property
    def member(self) -> int:
        """Which of the plans of `joint` this is; 0 is that of all tasks."""
        return self._member

    @cached_property
    def set_plans(self) -> dict[tuple[str, ...], Plan]:
        """By its tasks, the plan of each set: of their MetaOps alone, but on devices that hold what they use
        in any set.
        """
        plans = {}
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        for number, task_set in enumerate(self.task_sets):
            metaops = tuple(metaop for metaop in self.metaops if metaop.task in task_set.tasks)
            keys = {metaop.parameters or metaop.name for metaop in metaops}
            of_set = {
                "predicted": task_set.predicted,
                "waves": task_set.waves,
                "metaops": metaops,
                "micro_batches": {
                    task: k for task, k in self.micro_batches.items() if task in task_set.tasks
                },
                "sharding": {key: level for key, level in self.sharding.items() if key in keys},
                "sharding_kept": tuple(key for key in self.sharding_kept if key in keys),
                "task_sets": (),
            }
            # What others of these devices share out is held in such steps, too.
            all_shards = {"sharding": self.sharding, "sharding_kept": self.sharding_kept}
            plan = Plan(**{**fields, **of_set}).model_copy(update=all_shards)
            plan._joint, plan._member = self.joint, number + 1
            plans[task_set.tasks] = plan
        return plans

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """All slices in the order of their waves."""
        return tuple(slice_ for wave in self.waves for slice_ in wave.slices)

    @cached_property
    def by_name(self) -> dict[str, PlanMetaOp]:
        """MetaOps by their unique names, in file order."""
        return {metaop.name: metaop for metaop in self.metaops}

    def with_metaops_of(self, profile: Profile) -> Plan:
        """This plan; where it has no `metaops`, with the profile's, and with its optimizer and threads."""
        if self.metaops:
            return self
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        threads = profile.environment.get("threads_per_process")
        taken = {
            **profile.training,
            "threads_per_process": threads if isinstance(threads, int) and threads >= 1 else None,
            "compile": profile.compiled_by,
        }
        shared = set(PlanMetaOp.model_fields)
        metaops = [
            PlanMetaOp(**{name: getattr(metaop, name) for name in shared}) for metaop in profile.metaops
        ]
        return validate(Plan, {**taken, **fields, "metaops": tuple(metaops)}, where="the plan")

    def outlined(self) -> Plan:
        """This plan; where it has no `metaops`, with what its slices tell of them.

        Names, numbers of ops, and the part of the name before '/' as the task; no inputs, curves or sizes,
        and a batch size that only stands in. Enough to draw and to compare slices, not to predict or run.
        """
        if self.metaops:
            return self
        num_ops: dict[str, int] = {}
        for slice_ in self.slices:
            num_ops[slice_.metaop] = max(num_ops.get(slice_.metaop, 0), slice_.ops[1])
        metaops = tuple(
            PlanMetaOp(name=name, task=task, num_ops=count, batch_size=self.micro_batches.get(task, 1))
            for name, count in num_ops.items()
            for task in [name.partition("/")[0]]
        )
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return validate(Plan, {**fields, "metaops": metaops}, where="the plan")
