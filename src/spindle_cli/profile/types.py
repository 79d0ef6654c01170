"""The profile file: the MetaGraph of a workload with the scaling curve of every MetaOp.

It is all that planning needs: no workload code, no torch, no device. Times are seconds per op over the
whole batch, sizes are bytes over the whole batch, unless a key says otherwise.

It says which workload it is for, by which runs its times were corrected and, if it was measured, how
quiet the machine was and what was measured of each op, so that another profile may take it over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.files.sharding import Sharding, ShardingOf, ShardWeights
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.batch_sums import Matrix as Matrix
from spindle_cli.profile.moving import MeasuredLink as MeasuredLink
from spindle_cli.profile.moving import ProcessorCosts as ProcessorCosts
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
from spindle_cli.workload.settings.lengths import TaskLengths
from spindle_cli.workload.settings.local_sgd import LocalSgd as LocalSgd
from spindle_cli.workload.settings.sampling import TaskShare as TaskShare
from spindle_cli.workload.settings.sampling import require_sound

if TYPE_CHECKING:
    from spindle_cli.workload.graph import WorkloadGraph


class Noise(Model):
    """How quiet the machine was while a profile was measured.

    Attributes:
        others_share: of the time of the cores, what other processes took, 0 to 1.
        spread, worst_spread: median over the measurements of their spread (interquartile range over median),
            and the largest.
        measured_again: measurements that were repeated for their spread.
    """

    others_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    spread: Annotated[float, Field(ge=0)] = 0.0
    worst_spread: Annotated[float, Field(ge=0)] = 0.0
    measured_again: Annotated[int, Field(ge=0)] = 0


class SelectiveMemory(Model):
    """What is known of one op on one share of which all but what takes longest is recomputed.

    Attributes:
        kept_bytes: kept from forward to backward, its outputs included.
        share: of its forward pass, what runs again in the backward pass.
    """

    kept_bytes: Bytes
    share: Annotated[float, Field(ge=0, le=1)]


class ShareMemory(Model):
    """Bytes of one op on one share, beside its parameters, its inputs and the batch's fields.

    Attributes:
        kept_bytes: kept from forward to backward, its outputs included.
        forward_bytes: the most while it runs forward, what it keeps included.
        backward_bytes: the most while it runs backward, gradients of its outputs and inputs included, beyond
            what it had kept; gradients of its parameters are added to those that are there.
        first_backward_bytes: the same where there are none yet, with those that it makes.
        selective: where it is recomputed but for what takes longest; None: not looked at, or it saves little.
    """

    kept_bytes: Bytes
    forward_bytes: Bytes
    backward_bytes: Bytes
    first_backward_bytes: Bytes
    selective: SelectiveMemory | None = None


class OpTiming(Model):
    """What is known of one op on one batch share.

    `slowest[n - 1]`: times of the slowest of n processes that run the same share each at the same moment; one
    entry where only one process counts. `activation_bytes`: kept from forward to backward by this share, with
    the fields of the batch. `memory`: what the share takes, where that was looked at. `batch_sums`: what it
    sums with the other shares. `loss_chunks`: how many chunks its loss is computed in.
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
        nproc: allocations of up to so many devices were measured on as many processes.
        links: hash of the links that sums of split layers were taken from; None: nothing was split.
        timings: by a key that equal ops on equally many samples have in every workload.
        failed: keys of the shares that did not fit the memory.
    """

    nproc: Devices
    links: str | None = None
    timings: dict[str, OpTiming]
    failed: tuple[str, ...] = ()


class WorkloadRef(Model):
    """Which workload: its name, the fingerprint of its MetaGraph, and how to load it again.

    `source`: a workload file or function. `lengths`: by task, of those whose batches have several shapes,
    what was seen of them, and which were traced, measured and planned for.
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
        name: of its folder. `sha256`: of its predicted.json.
        plan_sha256: of the plan that it ran, on `num_devices` devices of `num_nodes` nodes.
        steps: that its times are medians of.
        predicted_s, measured_s: of an iteration, by its plan and as it took.
        metaop_error: of the MetaOps' seconds, as measured over as the profile had them before, the median
            distance from 1. `worst_metaop_error`: the largest.
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
    """The runs that the times of a profile were taken from, the latest last.

    Attributes:
        held_up: share by which the iterations of the latest runs were longer than all that the profile
            accounts for: devices that were held up in single steps, time between slices, data.
        links: how many times as long as before messages and sums take, by kind of link, where that was
            measured; of the latest calibration.
    """

    runs: Annotated[tuple[CalibratedRun, ...], Field(min_length=1)]
    held_up: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    links: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)


class Device(Model):
    """What curves are of. `type`: 'cpu', 'cuda', or a listed device such as 'a800-80gb'."""

    type: Annotated[str, Field(min_length=1)]
    name: str
    memory_bytes: Bytes


class MetaOp(Model):
    """What both a profile and a plan say of a MetaOp. Bytes are for the whole batch."""

    name: Annotated[str, Field(min_length=1)]
    task: str
    num_ops: NumOps
    batch_size: Samples
    inputs: tuple[str, ...] = ()
    # of `inputs`, those that every op consumes and not only the first (an encoder's output in a decoder)
    inputs_of_every_op: tuple[str, ...] = ()
    parameters: str | None = None
    # which block of `parameters` each op uses; absent: op k uses block k
    parameter_blocks: tuple[int, ...] | None = None
    param_bytes_per_op: Bytes = 0
    # parameters of neighbouring glue held with an op, {op index: bytes}, beyond param_bytes_per_op
    extra_param_bytes: dict[int, Bytes] = Field(default_factory=dict)
    # of param_bytes_per_op, those that tensor parallelism leaves whole on each device
    whole_param_bytes_per_op: Bytes = 0
    # of extra_param_bytes, those that tensor parallelism splits: a head and an embedding over many words
    split_extra_param_bytes: dict[int, Bytes] = Field(default_factory=dict)
    # of both, what ops with other keys or blocks of parameters use too
    tied: tuple[TiedParameters, ...] = ()
    # of param_bytes_per_op (and the extra), the share that is trained: the rest needs no gradient or state
    trainable_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    # of trained parameters with optimizer settings of their own; absent: as of all
    optimizer: OptimizerBytes | None = None
    activation_bytes_per_op: Bytes = 0
    # by tp, then first_op; absent: guessed from activation_bytes_per_op
    memory: tuple[OpMemory, ...] = ()
    # of an op's forward pass, what runs again where it is recomputed but for what takes longest; absent: it
    # cannot be, or that saves nothing
    selective_share: Annotated[float, Field(ge=0, le=1)] | None = None
    # fields of the batch that an op reads, whole batch, {op index: bytes}
    field_bytes: dict[int, Bytes] = Field(default_factory=dict)
    output_bytes: Bytes = 0
    # what an inner op hands to the next op of the same MetaOp; output_bytes if absent
    inner_output_bytes: Bytes | None = None
    component: str | None = None
    # what an op sums over its shares inside of its passes
    batch_sums: tuple[BatchSum, ...] = ()
    # {samples of a share: chunks that its loss is computed in}, where there are several
    loss_chunks: dict[int, Annotated[int, Field(ge=2)]] = Field(default_factory=dict)
    # its forward pass changes buffers (running statistics), which stay on the devices that run it
    changes_buffers: bool = False
    num_experts: Annotated[int, Field(ge=0)] = 0  # of each op, that tensor parallelism shares out; 0: none
    gathered: tuple[Matrix, ...] = ()  # of which rows or factors are, in place of gradients' sums

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
        order = [(entry.tp, entry.first_op) for entry in self.memory]
        firsts = {entry.tp for entry in self.memory if entry.first_op == 0}
        if order != sorted(set(order)) or firsts != {entry.tp for entry in self.memory}:
            raise ValueError(
                f"memory: expected entries of {self.name!r} by tp, then by first_op from 0, each once"
            )
        whole = [entry for entry in self.memory if entry.tp == 1]
        if self.selective_share is not None and not (whole and all(each.selective_bytes for each in whole)):
            raise ValueError(
                f"selective_share: expected selective_bytes in all entries of {self.name!r} with tp 1 under "
                "memory"
            )
        return self


class MetaOpProfile(MetaOp):
    """A MetaOp and its scaling curve."""

    op_kind: str | None = None
    coupled: bool = False
    flops_per_op: Annotated[float, Field(ge=0)] | None = None  # forward, whole batch
    # may be empty where `shares` are not: their times are its points then
    curve: tuple[CurvePoint, ...]
    # what one device, or one tensor-parallel group, takes for one op on shares of these sizes
    shares: tuple[ShareTime, ...] = ()
    fit: Fit | None = None
    # those that plans may gather so
    matrices: tuple[Matrix, ...] = ()

    @field_validator("curve")
    @classmethod
    def _curve_ascends(cls, curve: tuple[CurvePoint, ...]) -> tuple[CurvePoint, ...]:
        for own in by_device(curve).values():
            order = [(point.num_devices, point.tp) for point in own]
            if order != sorted(set(order)):
                raise ValueError(
                    "expected ascending num_devices (then tp), each allocation once"
                    + ("" if own[0].device is None else f", of the points for {own[0].device!r}")
                )
            if all(point.op_s == 0 for point in own):
                of_type = "" if own[0].device is None else f" for {own[0].device!r}"
                raise ValueError(
                    f"every point of the curve{of_type} takes zero seconds; "
                    "expected positive forward_s or backward_s"
                )
        return curve

    @field_validator("shares")
    @classmethod
    def _shares_ascend(cls, shares: tuple[ShareTime, ...]) -> tuple[ShareTime, ...]:
        for own in by_device(shares).values():
            order = [(share.samples, share.tp) for share in own]
            if order != sorted(set(order)):
                raise ValueError(
                    "expected ascending samples (then tp), each share once"
                    + ("" if own[0].device is None else f", of the shares for {own[0].device!r}")
                )
            nothing = next((share for share in own if share.forward_s + share.backward_s == 0), None)
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
    """A file that says what a step of training takes: a profile, and the plans made from it."""

    schema_: Annotated[str, Field(alias="schema")]
    # multiplies parameter bytes to optimizer-state bytes (AdamW 2.0, SGD 0.0), as the train settings say
    optimizer_state_per_param: Ratio = 2.0
    # devices that hold the same parameters share their optimizer state, as the train settings say
    optimizer_state_sharded: bool = False
    # bytes that the update takes for each byte of the parameters that a device updates, and lets go of again
    # (float32 gradients for masters)
    update_bytes_per_param: Ratio = 0.0
    # bytes of gradients for each byte of the trained parameters (2.0: bfloat16's, added up in float32)
    gradient_bytes_per_param: Ratio = 1.0
    # the gradients of all parameters together are scaled down to a norm before the update
    clips_gradients: bool = False
    # losses are scaled: before the update all devices learn whether a gradient of any has overflowed
    scales_losses: bool = False
    # parameters may be updated before the gradients of others are summed, as the train settings say
    updates_by_parts: bool = False
    # batches of every task in one step, whose gradients are added up
    accumulate: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    # how losses with wide values are computed, as the train settings say: in chunks by size, or in so many
    loss_chunks: LossChunks = 1
    # islands train copies, each on its part of every batch, of which times are
    local_sgd: LocalSgd | None = None
    # seconds of the optimizer's step on one device for each byte of the trained parameters that it updates
    optimizer_s_per_byte: Ratio = 0.0
    processor: ProcessorCosts = Field(default_factory=ProcessorCosts)

    @property
    def training(self) -> dict[str, Any]:
        """These numbers by their keys."""
        own = set(TrainedArtifact.model_fields) - {"schema_"}
        return {name: getattr(self, name) for name in type(self).model_fields if name in own}


class Profile(TrainedArtifact):
    """The profile file."""

    KIND: ClassVar[str] = "profile"

    schema_: Annotated[Literal["spindle.profile/1"], Field(alias="schema")] = "spindle.profile/1"
    workload: WorkloadRef
    device: Device
    # where there are curves of several types of device: all of them, `device` first
    devices: tuple[Device, ...] = ()
    environment: dict[str, Any] = Field(default_factory=dict)
    noise: Noise | None = None  # of what was measured; None: of an estimate, or not known
    links: tuple[MeasuredLink, ...] = ()
    metaops: Annotated[tuple[MetaOpProfile, ...], Field(min_length=1)]
    measurements: Measurements | None = None
    # None: the file does not say
    numeric_check: NumericCheck | None = None
    # the sets of tasks that steps run, as the train settings say; none: every step runs all tasks
    task_sets: tuple[TaskShare, ...] = ()
    # the runs that its times were corrected by; None: there are none
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
        """This profile, for plans of equal shares."""
        return self._with(_equal_shares=True)

    def recomputed_whole(self) -> Profile:
        """This profile, for plans that recompute ops whole or not at all; itself where nothing else is
        known.
        """
        if all(metaop.selective_share is None for metaop in self.metaops):
            return self
        return self.with_metaops(
            [metaop.model_copy(update={"selective_share": None}) for metaop in self.metaops]
        )

    def sharded(self, sharding: ShardingOf) -> Profile:
        """This profile, for plans that share parameters out so."""
        return self._with(_sharding=dict(sharding))

    def weighted(self, weights: ShardWeights) -> Profile:
        """This profile, for plans whose devices have such parts of what they share out."""
        return self._with(_shard_weights=weights)

    def of_file(self, sha256: str) -> Profile:
        """This profile, as a part of a profile of that hash."""
        return self._with(_sha256=sha256)

    def asked_as(self, other: Profile) -> Profile:
        """This profile, for plans that share out and cut batches as those that are looked for of another
        one.
        """
        return self._with(
            _sharding=other.sharding, _shard_weights=other.shard_weights, _equal_shares=other.equal_shares
        )

    def sha256(self) -> str:
        """The hash of the profile as it was read, which this may be a part of."""
        return self._sha256 or super().sha256()

    def with_metaops(self, metaops: Sequence[MetaOpProfile]) -> Profile:
        """This profile with other MetaOps, which are not looked at again."""
        return self._with(metaops=tuple(metaops))

    def _with(self, **own: Any) -> Profile:
        fields: dict[str, Any] = {name: own.get(name, value) for name, value in self}
        copy = Profile.model_construct(**fields)
        for name in ("_sharding", "_shard_weights", "_equal_shares", "_sha256"):
            setattr(copy, name, own.get(name, getattr(self, name)))
        return copy

    @model_validator(mode="after")
    def _entries_name_its_devices(self) -> Profile:
        known = [device.type for device in self.devices or (self.device,)]
        if self.devices and self.devices[0] != self.device:
            raise ValueError(f"devices: expected `device`, {self.device.type!r}, first (found {known[0]!r})")
        if len(set(known)) < len(known):
            raise ValueError(f"devices: expected each type once (found {', '.join(known)})")
        for metaop in self.metaops:
            named = {"curve": set(by_device(metaop.curve)), "shares": set(by_device(metaop.shares))}
            for key, types in named.items():
                require_known(types, known, f"metaops: {metaop.name}.{key}")
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
        return self.numeric_check.unchecked([each.name for each in self.metaops if not each.coupled])

    @property
    def compiled_by(self) -> str | None:
        """By what torch.compile compiled the layers that were measured; None: by nothing."""
        backend = self.environment.get("compile")
        return backend if isinstance(backend, str) else None

    @cached_property
    def by_name(self) -> dict[str, MetaOpProfile]:
        """MetaOps by their unique names, in file order."""
        return {metaop.name: metaop for metaop in self.metaops}
