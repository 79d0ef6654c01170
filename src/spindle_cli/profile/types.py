"""The profile file: the MetaGraph of a workload with the scaling curve of every MetaOp.

It is all that planning needs: no workload code, no torch, no device. Times are seconds per op over the
whole batch, sizes are bytes over the whole batch, unless a key says otherwise.

It says which workload it is for, by which runs its times were corrected and, if it was measured, how
quiet the machine was and what was measured of each op, so that another profile may take it over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.files.sharding import Sharding, ShardingOf, ShardWeights
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.batch_sums import Matrix as Matrix
from spindle_cli.profile.moving import MeasuredLink as MeasuredLink
from spindle_cli.profile.moving import ProcessorCosts as ProcessorCosts
from spindle_cli.profile.moving import RuntimeOverhead as RuntimeOverhead
from spindle_cli.profile.numeric_check import NumericCheck
from spindle_cli.profile.parameter_bytes import OptimizerBytes as OptimizerBytes
from spindle_cli.profile.parameter_bytes import TiedParameters as TiedParameters
from spindle_cli.profile.parameter_bytes import require_among_own
from spindle_cli.profile.points import Bytes as Bytes
from spindle_cli.profile.points import CurvePoint as CurvePoint
from spindle_cli.profile.points import Devices as Devices
from spindle_cli.profile.points import Fit as Fit
from spindle_cli.profile.points import NumOps as NumOps
from spindle_cli.profile.points import OfDevice as OfDevice
from spindle_cli.profile.points import OpMemory as OpMemory
from spindle_cli.profile.points import OpNumber as OpNumber
from spindle_cli.profile.points import OpSeconds as OpSeconds
from spindle_cli.profile.points import PhaseTimes as PhaseTimes
from spindle_cli.profile.points import Ratio as Ratio
from spindle_cli.profile.points import Samples as Samples
from spindle_cli.profile.points import Seconds as Seconds
from spindle_cli.profile.points import ShareTime as ShareTime
from spindle_cli.profile.points import Source as Source
from spindle_cli.profile.points import by_device as by_device
from spindle_cli.profile.points import points_of_shares, require_known, require_own_ops, require_whole
from spindle_cli.workload.file import LossChunks
from spindle_cli.workload.settings.types import LocalSgd as LocalSgd
from spindle_cli.workload.settings.types import TaskLengths, require_sound
from spindle_cli.workload.settings.types import TaskShare as TaskShare

if TYPE_CHECKING:
    from spindle_cli.workload.graph import WorkloadGraph


class Noise(Model):
    """How quiet the machine was while a profile was measured.

    Attributes:
        others_share: Share of the time of the cores that other processes took, 0 to 1.
        spread: Median over the measurements of their spread (interquartile range over median).
        worst_spread: The largest of these spreads.
        measured_again: How many measurements were repeated for their spread.
    """

    others_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    spread: Annotated[float, Field(ge=0)] = 0.0
    worst_spread: Annotated[float, Field(ge=0)] = 0.0
    measured_again: Annotated[int, Field(ge=0)] = 0


class SelectiveMemory(Model):
    """What one op takes on one share if all but what takes longest is recomputed.

    Attributes:
        kept_bytes: Kept from forward to backward, its outputs included.
        share: Share of its forward pass that runs again in the backward pass.
    """

    kept_bytes: Bytes
    share: Annotated[float, Field(ge=0, le=1)]


class ShareMemory(Model):
    """Bytes of one op on one share, beside its parameters, its inputs and the batch's fields.

    Attributes:
        kept_bytes: Kept from forward to backward, its outputs included.
        forward_bytes: The most while it runs forward, what it keeps included.
        backward_bytes: The most while it runs backward, gradients of its outputs and inputs included, beyond
            what it had kept; gradients of its parameters are added to those that are there.
        first_backward_bytes: The same where there are none yet, with those that it makes.
        selective: Where it is recomputed except for what takes longest; absent: not looked at, or it saves
            little.
    """

    kept_bytes: Bytes
    forward_bytes: Bytes
    backward_bytes: Bytes
    first_backward_bytes: Bytes
    selective: SelectiveMemory | None = None


class OpTiming(Model):
    """What is known of one op on one batch share.

    Attributes:
        slowest: By n - 1, times of the slowest of n processes that run the same share each at the same
            moment; one entry where only one process counts.
        activation_bytes: Kept from forward to backward by this share, with the fields of the batch.
        memory: What the share takes, where that was looked at.
        batch_sums: What it sums with the other shares.
        loss_chunks: How many chunks its loss is computed in.
    """

    slowest: Annotated[tuple[PhaseTimes, ...], Field(min_length=1)]
    activation_bytes: Bytes
    memory: ShareMemory | None = None
    batch_sums: tuple[BatchSum, ...] = ()
    loss_chunks: Annotated[int, Field(ge=1)] = 1

    def on(self, num_devices: int) -> PhaseTimes:
        """Times where `num_devices` run a share each; of as many processes as were measured, if fewer."""
        return self.slowest[min(num_devices, len(self.slowest)) - 1]


class Measurements(Model):
    """What a measured profile's curves are made of, so that another one may take it over.

    Attributes:
        nproc: Allocations of up to so many devices were measured on as many processes.
        links: Hash of the links that sums of split layers were taken from; absent: nothing was split.
        timings: What was measured, by a key that equal ops on equally many samples have in every workload.
        failed: Keys of the shares that did not fit the memory.
    """

    nproc: Devices
    links: str | None = None
    timings: dict[str, OpTiming]
    failed: tuple[str, ...] = ()


class WorkloadRef(Model):
    """A reference to a workload: its name, the fingerprint of its MetaGraph, and how to load it again.

    Attributes:
        name: The workload's name.
        fingerprint: Hash of its MetaGraph.
        source: A workload file, or a function.
        lengths: By task whose batches have several shapes, what was seen of them, and which were traced,
            measured and planned for.
    """

    name: str
    fingerprint: str
    source: str
    lengths: dict[str, TaskLengths] = Field(default_factory=dict)

    @classmethod
    def of(cls, graph: WorkloadGraph, source: str) -> WorkloadRef:
        """Refer to a workload that was loaded from `source`."""
        return cls(
            name=graph.workload.name, fingerprint=graph.fingerprint, source=source, lengths=graph.lengths
        )

    @property
    def length_lines(self) -> tuple[str, ...]:
        """What was planned for, for people."""
        return tuple(lengths.line(task) for task, lengths in self.lengths.items())


_Seconds = Annotated[float, Field(ge=0, le=1e12)]
_Count = Annotated[int, Field(ge=1)]


class CalibratedRun(Model):
    """A run that a profile was calibrated by, and how far off its plan was.

    Attributes:
        name: Name of the run's folder.
        sha256: Hash of its predicted.json.
        plan_sha256: Hash of the plan that it ran.
        num_devices: Devices that it ran on.
        num_nodes: Nodes that these are on.
        steps: Steps that its times are medians of.
        predicted_s: Seconds of an iteration by its plan.
        measured_s: Seconds of an iteration as it took.
        metaop_error: How far the MetaOps' seconds, as measured over as the profile had them before, were from
            1, in the median (0.1 is 10 %).
        worst_metaop_error: The largest of these distances.
    """

    name: str
    sha256: str
    plan_sha256: str
    num_devices: _Count
    num_nodes: _Count
    steps: _Count
    predicted_s: _Seconds
    measured_s: _Seconds
    metaop_error: Annotated[float, Field(ge=0)] = 0.0
    worst_metaop_error: Annotated[float, Field(ge=0)] = 0.0

    @property
    def error(self) -> float | None:
        """(measured - predicted) / predicted of the iteration; None where nothing was predicted."""
        return None if self.predicted_s == 0 else self.measured_s / self.predicted_s - 1


class Calibration(Model):
    """The runs that the times of a profile were taken from.

    Attributes:
        runs: The runs, the latest last.
        held_up: Share by which the iterations of the latest runs were longer than all that the profile
            accounts for: devices that were held up in single steps, time between slices, data.
        links: How many times as long as before messages and sums take, by kind of link, where that was
            measured; of the latest calibration.
    """

    runs: Annotated[tuple[CalibratedRun, ...], Field(min_length=1)]
    held_up: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    links: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)


class Device(Model):
    """A type of device that curves are of.

    Attributes:
        type: 'cpu', 'cuda', or a listed device such as 'a800-80gb'.
        name: The model, as the machine names it.
        memory_bytes: Bytes of its memory.
    """

    type: Annotated[str, Field(min_length=1)]
    name: str
    memory_bytes: Bytes


class MetaOp(Model):
    """What both a profile and a plan say of a MetaOp. Bytes are for the whole batch, unless a key says
    otherwise.

    Attributes:
        name: Unique in the file.
        task: Name of the task.
        num_ops: Ops, run one after another; at most 20,000 of all MetaOps together.
        batch_size: Samples per iteration, over all devices.
        inputs: Names of the MetaOps that it consumes: the edges of the MetaGraph.
        inputs_of_every_op: Which of `inputs` every op consumes, and not only the first (an encoder's output
            in a decoder).
        parameters: Key of the parameters that it uses, or null; the same key and block mean the same
            parameters.
        parameter_blocks: Which block of `parameters` each op uses; absent: op k uses block k.
        param_bytes_per_op: Bytes of the parameters of one op, unsharded.
        extra_param_bytes: Bytes that single ops hold beyond `param_bytes_per_op`, by op: parameters of
            neighbouring glue.
        whole_param_bytes_per_op: What tensor parallelism leaves whole on each device, of `param_bytes_per_op`
            (norms).
        split_extra_param_bytes: What tensor parallelism splits of `extra_param_bytes`, by op: heads and
            embeddings over many words.
        tied: Parameters that ops with other keys, or other blocks, of parameters use too (a tied embedding
            and head; words that several encoders look up). A device holds them once.
        trainable_fraction: Share of these bytes that is trained; the rest needs no gradient and no state.
        optimizer: What the optimizer keeps of its parameters, where `train` has optimizer groups; absent: as
            of all.
        activation_bytes_per_op: Bytes that autograd keeps from forward to backward for one op, each storage
            once, and its outputs, without parameters and inputs; the first op's count has the batch's fields.
        memory: What its ops take of a device's memory, by `tp`, then `first_op`; absent: guessed from
            `activation_bytes_per_op`.
        selective_share: Share of an op's forward pass that runs again where the op is recomputed except for
            what takes longest; absent: it cannot be, or that saves little.
        field_bytes: Bytes of the batch's fields that an op reads, by op.
        output_bytes: Bytes that its last op hands on.
        inner_output_bytes: Bytes that an inner op hands to the next; absent: `output_bytes`.
        component: Name of the module that it is part of.
        batch_sums: What one op sums or gathers over the devices of its slice inside of its passes, where they
            run a share each.
        loss_chunks: How many chunks its loss is computed in, by the samples of a share, of the shares where
            there are several.
        changes_buffers: Whether its forward pass changes buffers (running statistics), which stay on the
            devices that run it.
        num_experts: How many experts each op has that tensor parallelism shares out, and samples with them;
            0: none.
        gathered: In a plan, the matrices whose gradients are gathered as rows or factors instead of being
            summed; all MetaOps that use one say it, and each device that holds one steps all of it.
    """

    name: Annotated[str, Field(min_length=1)]
    task: str
    num_ops: NumOps
    batch_size: Samples
    inputs: tuple[str, ...] = ()
    inputs_of_every_op: tuple[str, ...] = ()
    parameters: str | None = None
    parameter_blocks: tuple[int, ...] | None = None
    param_bytes_per_op: Bytes = 0
    extra_param_bytes: dict[int, Bytes] = Field(default_factory=dict)
    whole_param_bytes_per_op: Bytes = 0
    split_extra_param_bytes: dict[int, Bytes] = Field(default_factory=dict)
    tied: tuple[TiedParameters, ...] = ()
    trainable_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    optimizer: OptimizerBytes | None = None
    activation_bytes_per_op: Bytes = 0
    memory: tuple[OpMemory, ...] = ()
    selective_share: Annotated[float, Field(ge=0, le=1)] | None = None
    field_bytes: dict[int, Bytes] = Field(default_factory=dict)
    output_bytes: Bytes = 0
    inner_output_bytes: Bytes | None = None
    component: str | None = None
    batch_sums: tuple[BatchSum, ...] = ()
    loss_chunks: dict[int, Annotated[int, Field(ge=2)]] = Field(default_factory=dict)
    changes_buffers: bool = False
    num_experts: Annotated[int, Field(ge=0)] = 0
    gathered: tuple[Matrix, ...] = ()

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        numbers = {
            "extra_param_bytes": self.extra_param_bytes,
            "field_bytes": self.field_bytes,
            "memory": [entry.first_op for entry in self.memory],
            "gathered": [matrix.op for matrix in self.gathered],
        }
        require_own_ops(numbers, self.num_ops, self.name)
        missing = [name for name in self.inputs_of_every_op if name not in self.inputs]
        if missing:
            raise ValueError(f"inputs_of_every_op: {missing[0]!r} is not among the inputs of {self.name!r}")
        if self.whole_param_bytes_per_op > self.param_bytes_per_op:
            raise ValueError(
                f"whole_param_bytes_per_op: {self.whole_param_bytes_per_op} is more than the "
                f"param_bytes_per_op of {self.name!r}, {self.param_bytes_per_op}"
            )
        for op, split in self.split_extra_param_bytes.items():
            if split > (extra := self.extra_param_bytes.get(op, 0)):
                raise ValueError(
                    f"split_extra_param_bytes: {split} for op {op} is more than the extra_param_bytes of "
                    f"{self.name!r}, {extra}"
                )
        return self

    @model_validator(mode="after")
    def _memory_ascends(self) -> Self:
        order = [(entry.tp, entry.first_op) for entry in self.memory]
        firsts = {entry.tp for entry in self.memory if entry.first_op == 0}
        if order != sorted(set(order)) or firsts != {entry.tp for entry in self.memory}:
            raise ValueError(
                f"memory: expected entries of {self.name!r} by tp, then by first_op from 0, each once"
            )
        whole = [entry for entry in self.memory if entry.tp == 1]
        if self.selective_share is not None and not (whole and all(entry.selective_bytes for entry in whole)):
            raise ValueError(
                f"selective_share: expected selective_bytes in all entries of {self.name!r} with tp 1 under "
                "memory"
            )
        return self


class MetaOpProfile(MetaOp):
    """A MetaOp and its scaling curve.

    Attributes:
        op_kind: Class of the layer.
        coupled: Whether its samples depend on each other, so that the batch is never split: no point of
            `curve` has another `dp` than 1, and there are no `shares` and no `batch_sums`.
        flops_per_op: Floating-point operations of an op forward, for the whole batch.
        curve: Every valid allocation, ascending; nothing else may be allocated. It may be empty where
            `shares` are not: those whose samples divide the batch are its points then.
        shares: What one device, or one tensor-parallel group, takes for one op on shares of these sizes,
            ascending: the curve's, and smaller ones for micro-batches. Between two of the same `tp` time is
            linear; beyond the largest and below the smallest nothing is planned. Where an op stays in one
            micro-batch (`batch_sums`, `changes_buffers`), the curve's alone.
        fit: The segments of the fitted curve, and its leave-one-out error.
        matrices: Trained matrices of its ops whose gradients a plan may gather as rows or factors.
    """

    op_kind: str | None = None
    coupled: bool = False
    flops_per_op: Annotated[float, Field(ge=0)] | None = None
    curve: tuple[CurvePoint, ...]
    shares: tuple[ShareTime, ...] = ()
    fit: Fit | None = None
    matrices: tuple[Matrix, ...] = ()

    @field_validator("curve")
    @classmethod
    def _curve_ascends(cls, curve: tuple[CurvePoint, ...]) -> tuple[CurvePoint, ...]:
        for points in by_device(curve).values():
            order = [(point.num_devices, point.tp) for point in points]
            if order != sorted(set(order)):
                raise ValueError(
                    "expected ascending num_devices (then tp), each allocation once"
                    + ("" if points[0].device is None else f", of the points for {points[0].device!r}")
                )
            if all(point.op_s == 0 for point in points):
                of_type = "" if points[0].device is None else f" for {points[0].device!r}"
                raise ValueError(
                    f"every point of the curve{of_type} takes zero seconds; "
                    "expected positive forward_s or backward_s"
                )
        return curve

    @field_validator("shares")
    @classmethod
    def _shares_ascend(cls, shares: tuple[ShareTime, ...]) -> tuple[ShareTime, ...]:
        for of_device in by_device(shares).values():
            order = [(share.samples, share.tp) for share in of_device]
            if order != sorted(set(order)):
                raise ValueError(
                    "expected ascending samples (then tp), each share once"
                    + ("" if of_device[0].device is None else f", of the shares for {of_device[0].device!r}")
                )
            nothing = next((share for share in of_device if share.forward_s + share.backward_s == 0), None)
            if nothing is not None:
                of_type = "" if nothing.device is None else f" for {nothing.device!r}"
                raise ValueError(
                    f"the share of {nothing.samples} samples{of_type} takes zero seconds; "
                    "expected positive forward_s or backward_s"
                )
        return shares

    @model_validator(mode="after")
    def _shares_stand_in_for_the_curve(self) -> MetaOpProfile:
        if not self.curve:
            curve = points_of_shares(self.shares, self.batch_size)
            if not curve:
                raise ValueError(
                    f"curve: no points; expected one at least, or shares of {self.name!r} whose samples "
                    f"divide its batch_size {self.batch_size}"
                )
            object.__setattr__(self, "curve", curve)
        return self

    @model_validator(mode="after")
    def _keys_agree(self) -> MetaOpProfile:
        for point in self.curve:
            if self.batch_size % point.dp:
                raise ValueError(
                    f"curve: dp {point.dp} does not divide batch_size {self.batch_size} of {self.name!r}"
                )
        require_own_ops({"matrices": [matrix.op for matrix in self.matrices]}, self.num_ops, self.name)
        if self.coupled:
            require_whole(self)
        require_among_own(self.tied, self.num_ops, self._op_param_bytes, self.name)
        if self.parameter_blocks is not None and len(self.parameter_blocks) != self.num_ops:
            raise ValueError(
                f"parameter_blocks: {len(self.parameter_blocks)} entries; expected one for each of the "
                f"{self.num_ops} ops of {self.name!r}"
            )
        return self

    def _op_param_bytes(self, op: int) -> int:
        return self.param_bytes_per_op + self.extra_param_bytes.get(op, 0)

    @cached_property
    def best_points(self) -> tuple[CurvePoint, ...]:
        """The fastest mix of dp and tp for each number of devices, ascending; of the first type of device."""
        best: dict[int, CurvePoint] = {}
        for point in by_device(self.curve)[self.curve[0].device]:
            held = best.get(point.num_devices)
            if held is None or point.op_s < held.op_s:
                best[point.num_devices] = point
        return tuple(best[n] for n in sorted(best))


class TrainedArtifact(Artifact):
    """A file that says what a step of training takes: a profile, and the plans made from it.

    Attributes:
        optimizer_state_per_param: Bytes of optimizer state for each byte of trained parameters (AdamW 2, SGD
            0).
        optimizer_state_sharded: Whether devices that hold the same parameters share their optimizer state.
        update_bytes_per_param: Bytes that the update takes, and gives back, for each byte of the parameters
            that a device updates (float32 gradients for masters).
        gradient_bytes_per_param: Bytes of gradients for each byte of trained parameters (2: bfloat16's, added
            up in float32).
        clips_gradients: Whether a step sums the gradients' norm over all devices, to scale them down to a
            norm.
        scales_losses: Whether a step sums, with that or alone, whether a gradient has overflowed.
        updates_by_parts: Whether parameters may be updated before the gradients of others are summed.
        accumulate: Batches of every task in one step, whose gradients are added up.
        loss_chunks: The train setting that times and memory are for; absent: 1.
        local_sgd: Islands that train copies of the model, as the train settings have them; times, bytes and
            `batch_size` are then of an island's part of the batches.
        optimizer_s_per_byte: Seconds of the optimizer's step for each byte of the trained parameters that a
            device updates.
        processor: Seconds of a device for each message, byte and sample beside its ops.
    """

    schema_: Annotated[str, Field(alias="schema")]
    optimizer_state_per_param: Ratio = 2.0
    optimizer_state_sharded: bool = False
    update_bytes_per_param: Ratio = 0.0
    gradient_bytes_per_param: Ratio = 1.0
    clips_gradients: bool = False
    scales_losses: bool = False
    updates_by_parts: bool = False
    accumulate: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    loss_chunks: LossChunks = 1
    local_sgd: LocalSgd | None = None
    optimizer_s_per_byte: Ratio = 0.0
    processor: ProcessorCosts = Field(default_factory=ProcessorCosts)

    @property
    def training(self) -> dict[str, Any]:
        """The settings of the training, by their keys."""
        names = set(TrainedArtifact.model_fields) - {"schema_"}
        return {name: getattr(self, name) for name in type(self).model_fields if name in names}


class Profile(TrainedArtifact):
    """The profile file.

    Attributes:
        workload: Which workload it is for.
        device: Which type of device its curves are of; of several types, the first.
        devices: All types of device, `device` first, where there are curves of several. Entries of `curve`
            and `shares` then may name one of them.
        environment: Versions, threads and settings that it was measured with, `compile` and `float32_matmul`
            among them.
        noise: How quiet the machine was; absent: an estimate, or not known.
        links: Links as measured.
        metaops: The MetaOps.
        measurements: What each op took on each share, for `--reuse`.
        numeric_check: What was checked by numbers before anything was measured; absent from older files.
        task_sets: The sets of tasks that steps run, each with its share of all steps; empty: every step runs
            all tasks.
        calibration: The runs that its times were corrected by; absent: none.
    """

    KIND: ClassVar[str] = "profile"

    schema_: Annotated[Literal["spindle.profile/1"], Field(alias="schema")] = "spindle.profile/1"
    workload: WorkloadRef
    device: Device
    devices: tuple[Device, ...] = ()
    environment: dict[str, Any] = Field(default_factory=dict)
    noise: Noise | None = None
    links: tuple[MeasuredLink, ...] = ()
    metaops: Annotated[tuple[MetaOpProfile, ...], Field(min_length=1)]
    measurements: Measurements | None = None
    numeric_check: NumericCheck | None = None
    task_sets: tuple[TaskShare, ...] = ()
    calibration: Calibration | None = None
    _sharding: dict[str, Sharding] = PrivateAttr(default_factory=dict)
    _shard_weights: ShardWeights = PrivateAttr(default=())
    _equal_shares: bool = PrivateAttr(default=False)
    _sha256: str | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _metagraph_is_a_dag(self) -> Profile:
        from spindle_cli.profile.metagraph import check_metagraph

        check_metagraph(self.metaops)
        return self

    @property
    def sharding(self) -> ShardingOf:
        """What a plan that is looked for shares out; a profile itself says nothing of it."""
        return self._sharding

    @property
    def shard_weights(self) -> ShardWeights:
        """How much of what is shared out each device has, in a plan that is looked for."""
        return self._shard_weights

    @property
    def equal_shares(self) -> bool:
        """Whether a plan that is looked for has equal shares alone."""
        return self._equal_shares

    def in_equal_shares(self) -> Profile:
        """Return this profile for plans of equal shares."""
        return self._with(_equal_shares=True)

    def sharded(self, sharding: ShardingOf) -> Profile:
        """Return this profile for plans that shard parameters so."""
        return self._with(_sharding=dict(sharding))

    def weighted(self, weights: ShardWeights) -> Profile:
        """Return this profile for plans whose devices have shards of such sizes."""
        return self._with(_shard_weights=weights)

    def of_file(self, sha256: str) -> Profile:
        """Return this profile as a part of a profile of that hash."""
        return self._with(_sha256=sha256)

    def sharded_as(self, reference: Profile) -> Profile:
        """Return this profile for plans that shard parameters and cut batches as those of another one do."""
        return self._with(
            _sharding=reference.sharding,
            _shard_weights=reference.shard_weights,
            _equal_shares=reference.equal_shares,
        )

    def sha256(self) -> str:
        """Return the hash of the profile as it was read, which this may be a part of."""
        return self._sha256 or super().sha256()

    def of_tasks(self, tasks: Collection[str]) -> Profile:
        """Return the profile of some tasks alone, and of steps that run just these."""
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        metaops = tuple(metaop for metaop in self.metaops if metaop.task in tasks)
        just_these = TaskShare(tasks=tuple(tasks), share=1.0)
        return Profile(**{**fields, "metaops": metaops, "task_sets": (just_these,)}).sharded_as(self)

    def of_an_island(self) -> Profile:
        """Return the profile as of a workload that is one island's alone; as it is without islands."""
        if self.local_sgd is None:
            return self
        return self.model_copy(update={"local_sgd": None}).of_file(self.sha256())

    def with_metaops(self, metaops: Sequence[MetaOpProfile]) -> Profile:
        """Return this profile with other MetaOps, which are not looked at again."""
        return self._with(metaops=tuple(metaops))

    def _with(self, **changes: Any) -> Profile:
        fields: dict[str, Any] = {name: changes.get(name, value) for name, value in self}
        copy = Profile.model_construct(**fields)
        for name in ("_sharding", "_shard_weights", "_equal_shares", "_sha256"):
            setattr(copy, name, changes.get(name, getattr(self, name)))
        return copy

    @model_validator(mode="after")
    def _entries_name_its_devices(self) -> Profile:
        types_listed = [device.type for device in self.devices or (self.device,)]
        if self.devices and self.devices[0] != self.device:
            raise ValueError(
                f"devices: expected `device`, {self.device.type!r}, first (found {types_listed[0]!r})"
            )
        if len(set(types_listed)) < len(types_listed):
            raise ValueError(f"devices: expected each type once (found {', '.join(types_listed)})")
        for metaop in self.metaops:
            named = {"curve": set(by_device(metaop.curve)), "shares": set(by_device(metaop.shares))}
            for key, types in named.items():
                require_known(types, types_listed, f"metaops: {metaop.name}.{key}")
        return self

    @model_validator(mode="after")
    def _sets_make_up_all_steps(self) -> Profile:
        if self.task_sets:
            require_sound(self.task_sets, {metaop.task for metaop in self.metaops})
        return self

    @property
    def unchecked(self) -> dict[str, str]:
        """MetaOps, and tasks as wholes, that were not checked by numbers, and why."""
        if self.numeric_check is None:
            return {}
        return self.numeric_check.unchecked([metaop.name for metaop in self.metaops if not metaop.coupled])

    @property
    def compiled_by(self) -> str | None:
        """The backend of torch.compile for the layers that were measured; None where it was not used."""
        backend = self.environment.get("compile")
        return backend if isinstance(backend, str) else None

    @cached_property
    def by_name(self) -> dict[str, MetaOpProfile]:
        """MetaOps by their unique names, in file order."""
        return {metaop.name: metaop for metaop in self.metaops}
