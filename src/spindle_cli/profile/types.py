"""The profile file: the MetaGraph of a workload with the scaling curve of every MetaOp.

It is all that planning needs: no workload code, no torch, no device. Times are seconds per op over the whole
batch, sizes are bytes over the whole batch, unless a key says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.files.sharding import Sharding, ShardingOf, ShardWeights
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.batch_sums import Matrix as Matrix
from spindle_cli.profile.calibration import CalibratedRun as CalibratedRun
from spindle_cli.profile.calibration import Calibration as Calibration
from spindle_cli.profile.measurements import Measurements as Measurements
from spindle_cli.profile.measurements import Noise as Noise
from spindle_cli.profile.measurements import OpTiming as OpTiming
from spindle_cli.profile.measurements import SelectiveMemory as SelectiveMemory
from spindle_cli.profile.measurements import ShareMemory as ShareMemory
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
from spindle_cli.profile.workload_ref import WorkloadRef as WorkloadRef
from spindle_cli.workload.file import LossChunks
from spindle_cli.workload.settings.local_sgd import LocalSgd as LocalSgd
from spindle_cli.workload.settings.sampling import TaskShare as TaskShare
from spindle_cli.workload.settings.sampling import require_sound


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
