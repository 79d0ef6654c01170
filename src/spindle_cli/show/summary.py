"""The documents of `spindle show --json`: a plan's numbers, and with `--rank` one rank's program."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.files.sharding import Sharding, WeightReport, weight_reports
from spindle_cli.plan.types import Plan, bounds_of_any_cut
from spindle_cli.program.transfers import communicator_memory
from spindle_cli.program.types import Program
from spindle_cli.show.grid import length_s
from spindle_cli.show.text import format_action


class Allocation(Model):
    """Ops of a MetaOp on `dp` x `tp` devices.

    Attributes:
        num_ops: How many ops.
        dp: Shares of the batch.
        tp: Devices that hold each.
        equal_shares: Whether all shares have as many samples.
    """

    num_ops: int
    dp: int
    tp: int
    equal_shares: bool = True


class MetaOpSummary(Model):
    """A MetaOp as planned.

    Attributes:
        name: Its name.
        task: Its task.
        num_ops: How many ops it has.
        batch_size: Samples of a batch; null where the plan has no `metaops` to say it.
        allocations: What its ops run on, the widest first.
        start_s: When its first slice starts.
        end_s: When its last slice ends.
        busy_s: Its slices' seconds.
        device_s: These times their devices.
    """

    name: str
    task: str
    num_ops: int
    batch_size: int | None
    allocations: tuple[Allocation, ...]
    start_s: float
    end_s: float
    busy_s: float
    device_s: float


class ShowReport(Artifact):
    """The document of `spindle show --json`.

    Attributes:
        strategy: Which strategy made the plan.
        workload: The workload's name.
        cluster: The cluster's name.
        num_devices: Devices of the cluster.
        num_waves: Waves of the plan.
        num_slices: Slices of the plan.
        iteration_s: Predicted seconds of an iteration.
        compute_s: When the schedule ends.
        lower_bound_s: Seconds that no schedule can be shorter than.
        lower_bound_any_s: The same however batches are cut, where the plan says it.
        lower_bound_with_memory_s: The same of schedules that fit the devices' memory.
        lower_bound_with_links_s: The same of iterations, with what messages and sums take.
        gap: How far the schedule is above the lower bound, as a share of the bound; None if the bound is
            zero.
        device_use: Share of the schedule in which each device runs a slice.
        peak_memory_bytes: Predicted bytes of each device at its fullest moment.
        num_recomputed: Ops of all slices that are recomputed.
        num_selective: Of these, ops that keep what takes longest.
        num_offloaded: Ops whose activations are in host memory.
        host_memory_bytes: Predicted bytes of activations in the memory of each node.
        sharding: What is shared out of which parameters, where the plan says so.
        shard_weights: How much of it each device has, where that is not the same for all.
        metaops: One entry for each MetaOp.
        notes: What the planner has to say.
    """

    KIND: ClassVar[str] = "show"

    schema_: Annotated[Literal["spindle.show/1"], Field(alias="schema")] = "spindle.show/1"
    strategy: str
    workload: str
    cluster: str
    num_devices: int
    num_waves: int
    num_slices: int
    iteration_s: float
    compute_s: float
    lower_bound_s: float
    lower_bound_any_s: float | None = None
    lower_bound_with_memory_s: float | None = None
    lower_bound_with_links_s: float | None = None
    gap: float | None
    device_use: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    num_recomputed: int = 0  # ops, of all slices
    num_selective: int = 0  # of these, those that keep what takes longest
    num_offloaded: int = 0  # the same, whose activations are in host memory
    host_memory_bytes: tuple[int, ...] = ()  # of each node, as predicted
    sharding: dict[str, Sharding] = Field(default_factory=dict)
    shard_weights: tuple[WeightReport, ...] = ()
    metaops: tuple[MetaOpSummary, ...]
    notes: tuple[str, ...]


def summarise(plan: Plan) -> ShowReport:
    """Return the numbers of a plan."""
    predicted = plan.predicted
    bound_s = predicted.lower_bound_s
    return ShowReport(
        strategy=plan.strategy,
        workload=plan.workload.name,
        cluster=plan.cluster.name,
        num_devices=plan.cluster.num_devices,
        num_waves=len(plan.waves),
        num_slices=len(plan.slices),
        iteration_s=predicted.iteration_s,
        compute_s=predicted.compute_s,
        lower_bound_s=bound_s,
        **bounds_of_any_cut(predicted),
        gap=predicted.compute_s / bound_s - 1 if bound_s > 0 else None,
        device_use=_device_use(plan),
        peak_memory_bytes=predicted.peak_memory_bytes,
        num_recomputed=sum(slice_.num_recomputed for slice_ in plan.slices),
        num_selective=sum(slice_.num_recomputed for slice_ in plan.slices if slice_.selective),
        num_offloaded=sum(slice_.num_offloaded for slice_ in plan.slices),
        host_memory_bytes=predicted.host_memory_bytes,
        sharding=plan.sharding,
        shard_weights=weight_reports(plan.shard_weights, plan.cluster),
        metaops=_metaops(plan),
        notes=plan.notes,
    )


def _device_use(plan: Plan) -> tuple[float, ...]:
    busy_s = [0.0] * plan.cluster.num_devices
    for slice_ in plan.slices:
        for device in slice_.devices:
            busy_s[device] += slice_.busy_s
    whole_s = length_s(plan)
    return tuple(seconds / whole_s for seconds in busy_s)


def _metaops(plan: Plan) -> tuple[MetaOpSummary, ...]:
    summaries = []
    for metaop in plan.outlined().metaops:
        slices = [slice_ for slice_ in plan.slices if slice_.metaop == metaop.name]
        ops: Counter[tuple[int, int, bool]] = Counter()
        for (first, last), dp, tp, equal in {(p.ops, p.dp, p.tp, p.rows is None) for p in slices}:
            ops[dp, tp, equal] += last - first
        widest_first = sorted(ops.items(), key=lambda entry: (-entry[0][0] * entry[0][1], entry[0]))
        summaries.append(
            MetaOpSummary(
                name=metaop.name,
                task=metaop.task,
                num_ops=metaop.num_ops,
                batch_size=metaop.batch_size if plan.metaops else None,
                allocations=tuple(
                    Allocation(num_ops=n, dp=dp, tp=tp, equal_shares=equal)
                    for (dp, tp, equal), n in widest_first
                ),
                start_s=min((slice_.start_s for slice_ in slices), default=0.0),
                end_s=max((slice_.last_s for slice_ in slices), default=0.0),
                busy_s=sum(slice_.busy_s for slice_ in slices),
                device_s=sum(slice_.busy_s * len(slice_.devices) for slice_ in slices),
            )
        )
    return tuple(summaries)


class CommunicatorView(Model):
    """A communicator of a rank.

    Attributes:
        index: Its number: what actions name as `on INDEX`.
        purpose: What it is for.
        devices: Its devices.
        memory_bytes: Bytes that it takes of the rank's device.
        senders: Of messages, the devices whose go over it.
    """

    index: int
    purpose: str
    devices: tuple[int, ...]
    memory_bytes: int
    senders: tuple[int, ...] = ()


class RankReport(Artifact):
    """One rank's program.

    Attributes:
        rank: The rank.
        actions: Its actions in their text form, in order.
        communicators: Its communicators.
    """

    KIND: ClassVar[str] = "rank-program"

    schema_: Annotated[Literal["spindle.rank-program/1"], Field(alias="schema")] = "spindle.rank-program/1"
    rank: int
    actions: tuple[str, ...]
    communicators: tuple[CommunicatorView, ...] = ()

    @classmethod
    def of(cls, program: Program, rank: int) -> RankReport:
        """Return the program of a rank that the plan has."""
        taken = communicator_memory(program, rank)
        communicators = tuple(
            CommunicatorView(
                index=index,
                purpose=str(program.communicators[index].purpose),
                devices=program.communicators[index].ranks,
                memory_bytes=num_bytes,
                senders=program.communicators[index].senders,
            )
            for index, num_bytes in taken.items()
        )
        actions = tuple(map(format_action, program.actions[rank]))
        return cls(rank=rank, actions=actions, communicators=communicators)
