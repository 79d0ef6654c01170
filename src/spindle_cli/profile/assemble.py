"""From the times of single ops to a profile: each MetaOp with its sizes and its scaling curve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spindle_cli.analysis.rules.batch_norms import changes_buffers
from spindle_cli.costs.beyond_curve import batch_sums_s
from spindle_cli.errors import RunFailedError
from spindle_cli.files.cluster import MAX_DEVICES, Cluster
from spindle_cli.operators.tensor_parallel import LayerSplit, layer_split
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.checking.matrices import Matrices
from spindle_cli.profile.fit import (
    Shares,
    choose_measured,
    fit_curve,
    fitted_point,
    op_memory,
    selective_share,
)
from spindle_cli.profile.numeric_check import NumericCheck
from spindle_cli.profile.op.jobs import JobTable, OpRef, degrees_beyond, is_cut, valid_degrees
from spindle_cli.profile.parameters.sizes import KeptByOptimizers, parameter_sizes
from spindle_cli.profile.parameters.tying import Tying
from spindle_cli.profile.points import Fit
from spindle_cli.profile.types import (
    CurvePoint,
    Device,
    MeasuredLink,
    Measurements,
    MetaOpProfile,
    Noise,
    OpMemory,
    OpTiming,
    PhaseTimes,
    ProcessorCosts,
    Profile,
    ShareTime,
    Source,
    WorkloadRef,
)
from spindle_cli.training.optimizing.groups import StateSizes, groups_of_graph, kept_per_param
from spindle_cli.training.sampling import sampled_sets, turns_of
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import MetaOp, Op, ParameterTable, TaskGraph, ValueSpec, WorkloadGraph


@dataclass(frozen=True)
class Times:
    """What is known of the ops' times, and how to say where it comes from.

    Attributes:
        by_key: of the jobs that could be timed.
        flops: forward floating-point operations of each op for its task's whole batch.
        source_of: what a point of so many devices, and so much tensor parallelism, says about itself.
        value_bytes: bytes of a value between ops for the whole batch.
        by_tp: like `by_key` for ops split by tensor parallelism, by its degree.
        cluster: on whose links shares sum the statistics of batch norms; None: curves leave that time out.
    """

    by_key: Mapping[str, OpTiming]
    flops: Mapping[OpRef, float]
    source_of: Callable[[int, int], Source]
    value_bytes: Callable[[ValueSpec], int]
    by_tp: Mapping[int, Mapping[str, OpTiming]] = field(default_factory=dict)
    cluster: Cluster | None = None


@dataclass(frozen=True)
class Extent:
    """Up to how many devices curves reach, and at most about how many of their points are timed."""

    max_devices: int
    max_points: int


def assemble(
    graph: WorkloadGraph,
    table: JobTable,
    times: Times,
    extent: Extent,
    *,
    source: str,
    train: TrainSettings,
    device: Device,
    environment: Mapping[str, Any],
    optimizer_s_per_byte: float,
    processor: ProcessorCosts | None = None,
    noise: Noise | None = None,
    links: tuple[MeasuredLink, ...] = (),
    measurements: Measurements | None = None,
    numeric_check: NumericCheck | None = None,
) -> Profile:
    """Return the profile of a workload from its ops' times.

    Raises:
        RunFailedError: an op fits the device's memory on no batch share.
    """
    kept = None
    if train.groups is not None:
        kept = KeptByOptimizers(StateSizes(train, groups_of_graph(train, graph)), ParameterTable.of(graph))
    matrices = Matrices.find(graph, train)
    tying = Tying.find(graph, partial(_first_split, graph, times), matrices.names)
    return Profile(
        workload=WorkloadRef.of(graph, source),
        device=device,
        environment=dict(environment),
        optimizer_state_per_param=kept_per_param(train, graph),
        optimizer_state_sharded=train.shards_optimizer_state,
        update_bytes_per_param=train.update_bytes_per_param,
        gradient_bytes_per_param=train.gradient_bytes_per_param,
        clips_gradients=train.clip_norm is not None,
        scales_losses=train.scaling is not None,
        updates_by_parts=train.updates_by_parts,
        accumulate=train.accumulate,
        loss_chunks=train.loss_chunks,
        local_sgd=train.local_sgd,
        optimizer_s_per_byte=optimizer_s_per_byte,
        processor=processor or ProcessorCosts(),
        noise=noise,
        links=links,
        metaops=tuple(
            _MetaOpAssembly(graph, metaop, table, times, extent, kept, matrices, tying).profile()
            for metaop in graph.metaops
        ),
        measurements=measurements,
        numeric_check=numeric_check,
        task_sets=sampled_sets(turns_of(train, graph.workload.tasks)),
    )


class _MetaOpAssembly:
    def __init__(
        self,
        graph: WorkloadGraph,
        metaop: MetaOp,
        table: JobTable,
        times: Times,
        extent: Extent,
        kept: KeptByOptimizers | None,
        matrices: Matrices,
        tying: Tying,
    ) -> None:
        self._kept = kept
        self._matrices = matrices
        self._tying = tying
        self._graph = graph
        self._workload = graph.workload
        self._metaop = metaop
        self._task = graph.tasks[metaop.task]
        self._ops = [self._task.ops[index] for index in metaop.ops]
        self._table = table
        self._times = times
        self._extent = extent
        self._batch_size = self._task.task.batch_size

    def profile(self) -> MetaOpProfile:
        metaop = self._metaop
        valid = valid_degrees(metaop, self._batch_size, self._extent.max_devices)
        points = self._timed_points(valid)
        # An estimate has a point for every number of devices: nothing lies between, and nothing was measured.
        fit = None if points[0].source == "estimated" else fit_curve(points, valid[-1])
        sizes = parameter_sizes(self._task, self._ops, self._split)
        sums = self._batch_sums(valid)
        return MetaOpProfile(
            name=metaop.name,
            task=metaop.task,
            num_ops=len(metaop.ops),
            batch_size=self._batch_size,
            inputs=metaop.inputs,
            inputs_of_every_op=metaop.inputs_of_every_op,
            parameters=metaop.parameters,
            parameter_blocks=metaop.parameter_blocks,
            param_bytes_per_op=sizes.layer_bytes,
            extra_param_bytes=sizes.extra_bytes,
            whole_param_bytes_per_op=sizes.whole_bytes,
            split_extra_param_bytes=sizes.split_extra_bytes,
            tied=self._tying.of(metaop.name),
            trainable_fraction=sizes.trained_share,
            optimizer=None if self._kept is None else self._kept.by(self._task, self._ops),
            activation_bytes_per_op=self._activation_bytes(),
            memory=self._memory(),
            selective_share=selective_share([self._shares(op, self._times.by_key) for op in self._ops]),
            field_bytes=self._field_bytes(),
            output_bytes=self._output_bytes(self._ops[-1]),
            inner_output_bytes=self._output_bytes(self._ops[0]) if len(self._ops) > 1 else None,
            component=metaop.component,
            op_kind=self._table.class_of[OpRef(metaop.task, self._ops[len(self._ops) // 2].index)],
            coupled=metaop.coupled,
            flops_per_op=self._mean(self._times.flops[self._ref(op)] for op in self._ops),
            batch_sums=sums,
            loss_chunks=self._loss_chunks(valid),
            changes_buffers=any(changes_buffers(self._task, op) for op in self._ops),
            num_experts=min(self._num_experts(op) for op in self._ops),
            curve=self._curve(points, fit, valid, sums),
            shares=self._share_times(valid, sums),
            fit=fit,
            matrices=self._matrices.of_ops(metaop.task, self._ops, self._split),
        )

    def _curve(
        self,
        points: Sequence[CurvePoint],
        fit: Fit | None,
        valid: Sequence[int],
        sums: Sequence[BatchSum],
    ) -> tuple[CurvePoint, ...]:
        """The points that were timed, those of tensor parallelism, and between them those of the fit."""
        timed_degrees = {point.num_devices for point in points}
        between = [n for n in valid if n > points[0].num_devices and n not in timed_degrees]
        fitted = [] if fit is None else [fitted_point(points, fit, n) for n in between]
        every = (*points, *self._tensor_parallel_points(valid), *fitted)
        with_sums = [self._with_sums(point, sums) for point in every]
        return tuple(sorted(with_sums, key=lambda point: (point.num_devices, point.tp)))

    def _timed_points(self, valid: Sequence[int]) -> list[CurvePoint]:
        """Points whose ops were all timed; a share that did not fit the memory is no allocation."""
        points = []
        for dp in choose_measured(valid, self._extent.max_points):
            timings = self._timings(dp)
            if timings is not None:
                points.append(self._point(dp, [timing.on(dp) for timing in timings]))
        if not points:
            raise RunFailedError(
                f"{self._metaop.name}: no share of its batch of {self._batch_size} samples "
                "fits the device's memory",
                hint="Use a smaller batch_size, or devices with more memory.",
            )
        return points

    def _tensor_parallel_points(self, valid: Sequence[int]) -> list[CurvePoint]:
        """Points of every degree that all ops can be split by."""
        points = []
        for tp, by_key in self._times.by_tp.items():
            for dp in valid:
                timings = self._timings(dp, by_key)
                if timings is not None and dp * tp <= self._extent.max_devices:
                    points.append(self._point(dp, [timing.on(dp * tp) for timing in timings], tp))
        return points

    def _share_times(self, valid: Sequence[int], sums: Sequence[BatchSum]) -> tuple[ShareTime, ...]:
        """Return the times of all shares that were measured: those of the curve's points, with what these
        sum, and smaller ones for micro-batches.
        """
        extent = self._extent
        beyond = degrees_beyond(self._graph, self._metaop, extent.max_devices, extent.max_points)
        if len(valid) == 1 and not is_cut(self._graph, self._metaop):
            return ()
        shares = []
        for tp, by_key in ((1, self._times.by_key), *self._times.by_tp.items()):
            # No cluster has devices for more shares than that at once.
            for cuts in (cuts for cuts in (*valid, *beyond) if cuts * tp <= MAX_DEVICES):
                timings = self._timings(cuts, by_key)
                if timings is not None:
                    busy = min(cuts * tp, extent.max_devices)
                    point = self._point(cuts, [timing.on(busy) for timing in timings], tp)
                    point = self._with_sums(point, sums)
                    shares.append(
                        ShareTime(
                            samples=self._batch_size // cuts,
                            tp=tp,
                            forward_s=point.forward_s,
                            backward_s=point.backward_s,
                            source=self._times.source_of(busy, tp),
                            communication_s=point.communication_s,
                        )
                    )
        return tuple(sorted(shares, key=lambda share: (share.samples, share.tp)))

    def _timings(self, dp: int, by_key: Mapping[str, OpTiming] | None = None) -> list[OpTiming] | None:
        timing_by_key = self._times.by_key if by_key is None else by_key
        keys = [
            self._table.key(self._ref(op), self._batch_size // dp, sums_shares=dp > 1 and op.talks)
            for op in self._ops
        ]
        timings = [timing_by_key.get(key) for key in keys]
        measured = [timing for timing in timings if timing is not None]
        return measured if len(measured) == len(timings) else None

    def _point(self, dp: int, ops: Sequence[PhaseTimes], tp: int = 1) -> CurvePoint:
        spreads = [times.spread for times in ops if times.spread is not None]
        repeats = [times.repeats for times in ops if times.repeats is not None]
        return CurvePoint(
            num_devices=dp * tp,
            dp=dp,
            tp=tp,
            forward_s=sum(times.forward_s for times in ops) / len(ops),
            backward_s=sum(times.backward_s for times in ops) / len(ops),
            source=self._times.source_of(dp * tp, tp),
            spread=max(spreads) if spreads else None,
            repeats=min(repeats) if repeats else None,
            communication_s=sum(times.communication_s for times in ops) / len(ops),
        )

    def _batch_sums(self, valid: Sequence[int]) -> tuple[BatchSum, ...]:
        """Return what one op sums or gathers over its shares, on average over the ops; for any number of
        shares.
        """
        for dp in valid[1:]:
            timings = self._timings(dp)
            if timings is not None:
                by_size: dict[tuple[Any, int], list[BatchSum]] = {}
                for batch_sum in (batch_sum for timing in timings for batch_sum in timing.batch_sums):
                    by_size.setdefault((batch_sum.kind, batch_sum.num_bytes), []).append(batch_sum)
                return tuple(
                    BatchSum(
                        kind=kind,
                        num_bytes=num_bytes,
                        forward=self._mean(batch_sum.forward for batch_sum in alike),
                        backward=self._mean(batch_sum.backward for batch_sum in alike),
                    )
                    for (kind, num_bytes), alike in sorted(by_size.items())
                )
        return ()

    def _loss_chunks(self, valid: Sequence[int]) -> dict[int, int]:
        """Return how many chunks a share's loss is computed in, by its samples, where there are several."""
        timings_by_rows = {self._batch_size // dp: self._timings(dp) for dp in reversed(valid)}
        chunks = {
            rows: max(timing.loss_chunks for timing in ops) for rows, ops in timings_by_rows.items() if ops
        }
        return {rows: count for rows, count in chunks.items() if count > 1}

    def _with_sums(self, point: CurvePoint, sums: Sequence[BatchSum]) -> CurvePoint:
        """Return a point of the op's own work with what its shares sum, over neighbours."""
        if not sums or point.dp == 1 or self._times.cluster is None:
            return point
        forward_s, backward_s = batch_sums_s(sums, range(point.dp), self._times.cluster)
        return point.model_copy(
            update={
                "source": "composed" if point.source == "measured" else point.source,
                "forward_s": point.forward_s + forward_s,
                "backward_s": point.backward_s + backward_s,
                "communication_s": forward_s + backward_s,
            }
        )

    def _activation_bytes(self) -> int:
        """Mean of the ops, for the whole batch, from the largest share that was timed."""
        for dp in valid_degrees(self._metaop, self._batch_size, self._extent.max_devices):
            timings = self._timings(dp)
            if timings is not None:
                return round(self._mean(timing.activation_bytes * dp for timing in timings))
        raise AssertionError("a MetaOp without timed points is refused before")

    def _shares(self, op: Op, by_key: Mapping[str, OpTiming]) -> Shares:
        """Return what is known of the op's memory, also from equal ops of other tasks."""
        timings_by_rows = {
            rows: by_key.get(
                self._table.key(self._ref(op), rows, sums_shares=op.talks and rows < self._batch_size)
            )
            for rows in self._table.rows
        }
        return [(rows, timing.memory) for rows, timing in timings_by_rows.items() if timing and timing.memory]

    def _memory(self) -> tuple[OpMemory, ...]:
        """Return what the ops take of memory, for every degree of tensor parallelism that was looked at."""
        memory: list[OpMemory] = []
        for tp, by_key in ((1, self._times.by_key), *self._times.by_tp.items()):
            ops = [self._shares(op, by_key) for op in self._ops]
            joined = [self._joined_bytes(op, tp) for op in self._ops] if tp > 1 else ()
            memory.extend(op_memory(ops, tp, self._batch_size, joined))
        return tuple(memory)

    def _joined_bytes(self, op: Op, tp: int) -> int:
        split = layer_split(self._workload, self._task, op, tp)
        return self._output_bytes(op) if split is not None and split.is_handed_on else 0

    def _field_bytes(self) -> dict[int, int]:
        return {
            position: sum(self._times.value_bytes(self._task.fields[name]) for name in op.fields)
            for position, op in enumerate(self._ops)
            if op.fields
        }

    def _split(self, op: Op) -> LayerSplit | None:
        return _first_split(self._graph, self._times, self._task, op)

    def _num_experts(self, op: Op) -> int:
        """Return the fewest of a module of its layer; 0 where they are not shared out."""
        split = self._split(op)
        return 0 if split is None or split.experts is None else min(split.experts.modules.values())

    def _output_bytes(self, op: Op) -> int:
        """Return the bytes of a whole batch that the op hands on; a loss is handed to nobody."""
        return sum(self._times.value_bytes(self._task.values[name]) for name in op.outputs)

    def _ref(self, op: Op) -> OpRef:
        return OpRef(self._metaop.task, op.index)

    def _mean(self, values: Any) -> float:
        return float(sum(values)) / len(self._ops)


def _first_split(graph: WorkloadGraph, times: Times, task: TaskGraph, op: Op) -> LayerSplit | None:
    """Return how an op is split, in the first way of those that were looked at."""
    splits = (layer_split(graph.workload, task, op, tp) for tp in times.by_tp)
    return next((split for split in splits if split is not None), None)
