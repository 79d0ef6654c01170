"""The plan file: waves of placed slices, and the predictions they rest on.

A plan is complete in itself: with the cluster and the summary of every MetaOp inside, it can be checked,
drawn, simulated and turned into each rank's program without the profile or the workload.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from spindle_cli.account.joint import joint_of
from spindle_cli.account.types import Joint
from spindle_cli.files.artifact import Model, validate
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.parsing import shown
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
from spindle_cli.workload.settings.sampling import TaskShare, require_told_apart

StrategyName = Literal["spindle", "sequential", "distmm", "optimus", "dp-even", "dp-flops"]
# How gradients are summed: each matrix in its fastest way; all as they are; all that can, in one way.
Sums = Literal["auto", "dense", "rows", "factors"]
# What `spindle` is compared with, on devices of one type and of several.
ON_ONE_TYPE: tuple[StrategyName, ...] = ("spindle", "sequential", "distmm", "optimus")
ON_SEVERAL_TYPES: tuple[StrategyName, ...] = ("spindle", "sequential", "dp-even", "dp-flops")


def strategies_on(cluster: Cluster) -> tuple[StrategyName, ...]:
    """Those that plan for a cluster."""
    return ON_SEVERAL_TYPES if cluster.is_mixed else ON_ONE_TYPE


class Predicted(Model):
    """What the plan is expected to do; docs/contracts.md says each key. The parts add up to `iteration_s`."""

    iteration_s: Seconds
    compute_s: Seconds
    lower_bound_s: Seconds
    # of every schedule, however batches are cut; None: the planner has not said
    lower_bound_any_s: Seconds | None = None
    peak_memory_bytes: tuple[Bytes, ...]
    host_memory_bytes: tuple[Bytes, ...] = ()  # of activations, per node; absent: none are there
    memory_formula: Annotated[int, Field(ge=1)] = 1  # of account/device_memory.py, behind peak_memory_bytes
    transfer_s: Seconds = 0.0  # added to the iteration by transfers that do not overlap with compute
    processor_s: Seconds = 0.0  # by what communication and reading take of the processors that compute
    gradient_sum_s: Seconds = 0.0  # the same for gradient sums
    optimizer_s: Seconds = 0.0  # added by the optimizer's step
    held_up_s: Seconds = 0.0  # by what runs have shown beyond all that, where the profile is calibrated


class PlanMetaOp(MetaOp):
    """A MetaOp as the plan needs it: the profile's entry, with only the curve points and shares that the plan
    uses.
    """

    flops_per_op: Annotated[float, Field(ge=0)] | None = None  # as in the profile
    curve: tuple[CurvePoint, ...] = ()
    shares: tuple[ShareTime, ...] = ()  # those that the plan's micro-batches and unequal shares use


class ProfileRef(Model):
    """Which profile the plan was made from: sha256 of its canonical JSON.

    `processors`: on a cluster with CPUs of several types, the model on which each type was measured.
    """

    sha256: str
    processors: dict[str, str] = Field(default_factory=dict)


class PlannedSet(TaskShare):
    """What the steps run that run just these tasks: their slices, and what is predicted of them.

    Devices hold what they use in any set, and in the plan of all tasks: `peak_memory_bytes` counts it.
    """

    predicted: Predicted
    waves: Annotated[tuple[Wave, ...], Field(min_length=1)]


class PlannedIslands(Model):
    """Where the islands of `train.local_sgd` are, and what outer steps take; the rest of a plan is of one.

    Attributes:
        cluster: the cluster file's content. Island i has the i-th of as many equal runs of its nodes; the
            plan's `cluster` is the first of them.
        outer_step_bytes: by device of an island, what it sends to its counterparts in each outer step.
        outer_step_s: seconds that an outer step adds to the step before it.
        without_s: predicted seconds of an iteration with a plan for all devices, which average gradients in
            every step; None: there is no such plan, or nobody knows.
    """

    cluster: Cluster
    outer_step_bytes: tuple[Bytes, ...]
    outer_step_s: Seconds
    without_s: Seconds | None = None


class Plan(TrainedArtifact):
    """The plan file."""

    KIND: ClassVar[str] = "plan"

    MAJORS: ClassVar[tuple[int, ...]] = (1, 2)

    # 2: slices say when they run forward and when backward
    schema_: Annotated[Literal["spindle.plan/1", "spindle.plan/2"], Field(alias="schema")] = "spindle.plan/1"
    strategy: StrategyName
    workload: WorkloadRef
    profile: ProfileRef
    cluster: Cluster
    # torch threads of each process in which the curves were measured: launch gives its workers as many
    threads_per_process: Annotated[int, Field(ge=1)] | None = None
    # by what torch.compile compiled the layers that were measured; None: by nothing
    compile: str | None = None
    # what the profile has not checked by numbers of what is split over the batch, and of tasks as wholes; why
    unchecked: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what the planner has to say, e.g. that no plan beats `sequential`
    predicted: Predicted
    # what the slices run; absent from a plan that another tool wrote: `with_metaops_of` fills it in
    metaops: tuple[PlanMetaOp, ...] = ()
    # by task, into how many equal parts its batch is cut, each run forward and backward by slices of its own;
    # absent: one
    micro_batches: dict[str, Annotated[int, Field(ge=2, le=2**31)]] = Field(default_factory=dict)
    # by key of parameters, what their devices share out among themselves; absent: as the train settings say
    sharding: dict[str, SharingOut] = Field(default_factory=dict)
    # of the keys that share out `parameters`, those that stay whole from a slice's forward pass to its
    # backward pass: in a file alone; here `sharding` says it
    sharding_kept: tuple[str, ...] = ()
    # of each device, how much it has of what devices share out: of each component, among those that hold it,
    # a range in proportion to its own; absent: equal ranges
    shard_weights: tuple[Annotated[int, Field(ge=1, le=LARGEST_WEIGHT)], ...] = ()
    # whether what devices of several nodes sum and gather may go inside of these and between them by itself
    sums_by_node: bool = True
    waves: Annotated[tuple[Wave, ...], Field(min_length=1)]
    # where not every step runs all tasks: a plan for each set of tasks that some steps run
    task_sets: tuple[PlannedSet, ...] = ()
    # where `local_sgd` has islands: all else is of each of them
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
        waves = (*self.waves, *(wave for each in self.task_sets for wave in each.waves))
        for piece in (piece for wave in waves for piece in wave.slices):
            if (piece.backward_s is not None) != (self.schema_ == "spindle.plan/2"):
                is_first = self.schema_ == "spindle.plan/1"
                expected = "none in version 1" if is_first else "one for every slice of version 2"
                raise ValueError(f"slice {piece.label}: backward_start_s: expected {expected}")
            if piece.rows is not None and self.schema_ == "spindle.plan/1":
                raise ValueError(f"slice {piece.label}: rows: expected none in version 1")
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
        known = {metaop.parameters or metaop.name for metaop in self.metaops}
        unknown = self.sharding.keys() - known
        if self.metaops and unknown:
            raise ValueError(
                f"sharding: no MetaOp has parameters {shown(min(unknown))}; expected one of "
                f"{', '.join(sorted(known))}"
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
        for each in self.task_sets if self.metaops else ():
            own = {metaop.name for metaop in self.metaops if metaop.task in each.tasks}
            named = {piece.metaop for wave in each.waves for piece in wave.slices}
            if own != named:
                expected = ", ".join(sorted(own)) or "those of tasks in metaops"
                raise ValueError(
                    f"task_sets: the slices of {', '.join(each.tasks)} are of {', '.join(sorted(named))}; "
                    f"expected {expected}"
                )
        return self

    @cached_property
    def joint(self) -> Joint | None:
        """This plan's slices with those of its sets; None where every step runs all tasks, and where
        no `metaops` say what they are.
        """
        if self._joint is not None or not self.task_sets or not self.metaops:
            return self._joint
        of_sets = [[piece for wave in each.waves for piece in wave.slices] for each in self.task_sets]
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
            name: sum(each.share * getattr(each.predicted, name) for each in self.task_sets)
            for name in Predicted.model_fields
            if name.endswith("_s") and name != "lower_bound_any_s"
        }
        needs = zip(*(each.predicted.peak_memory_bytes for each in self.task_sets), strict=True)
        return self.predicted.model_copy(update={**mean, "peak_memory_bytes": tuple(map(max, needs))})

    @property
    def outer_share_s(self) -> float:
        """Of an iteration's mean seconds, what outer steps are; nothing without islands."""
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
        found = {}
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        for number, each in enumerate(self.task_sets):
            own = {
                "predicted": each.predicted,
                "waves": each.waves,
                "metaops": tuple(metaop for metaop in self.metaops if metaop.task in each.tasks),
                "task_sets": (),
            }
            plan = Plan(**{**fields, **own})
            plan._joint, plan._member = self.joint, number + 1
            found[each.tasks] = plan
        return found

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """All slices in the order of their waves."""
        return tuple(piece for wave in self.waves for piece in wave.slices)

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
        metaops = [PlanMetaOp(**{name: getattr(each, name) for name in shared}) for each in profile.metaops]
        return validate(Plan, {**taken, **fields, "metaops": tuple(metaops)}, where="the plan")

    def outlined(self) -> Plan:
        """This plan; where it has no `metaops`, with what its slices tell of them.

        Names, numbers of ops, and the part of the name before '/' as the task; no inputs, curves or sizes,
        and a batch size that only stands in. Enough to draw and to compare slices, not to predict or run.
        """
        if self.metaops:
            return self
        num_ops: dict[str, int] = {}
        for piece in self.slices:
            num_ops[piece.metaop] = max(num_ops.get(piece.metaop, 0), piece.ops[1])
        metaops = tuple(
            PlanMetaOp(name=name, task=task, num_ops=count, batch_size=self.micro_batches.get(task, 1))
            for name, count in num_ops.items()
            for task in [name.partition("/")[0]]
        )
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return validate(Plan, {**fields, "metaops": metaops}, where="the plan")
