"""The planned schedule, its MetaOps and its memory, for the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.traffic import communicator_bytes
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile
from spindle_cli.report.rows import Rows
from spindle_cli.report.runs import equal_runs, runs_of
from spindle_cli.report.types import MemoryUse, MetaOpView, SliceView


def short_name(name: str, task: str) -> str:
    """A MetaOp's name without its task."""
    return name.removeprefix(f"{task}/")


def components(plan: Plan) -> dict[str, str]:
    """The component of each MetaOp, by its name; where the plan does not say, its short name."""
    return {metaop.name: metaop.component or short_name(metaop.name, metaop.task) for metaop in plan.metaops}


def metaop_views(plan: Plan, profile: Profile | None) -> tuple[MetaOpView, ...]:
    """MetaOps in the plan's order; curves and fits are the profile's where it is given."""
    device_s: dict[str, float] = defaultdict(float)
    for piece in plan.slices:
        device_s[piece.metaop] += piece.busy_s * len(piece.devices)
    index_of = {metaop.name: index for index, metaop in enumerate(plan.metaops)}
    component_of = components(plan)
    views = []
    for metaop in plan.metaops:
        profiled = None if profile is None else profile.by_name.get(metaop.name)
        views.append(
            MetaOpView(
                name=metaop.name,
                short=short_name(metaop.name, metaop.task),
                task=metaop.task,
                component=component_of[metaop.name],
                num_ops=metaop.num_ops,
                batch_size=metaop.batch_size,
                inputs=tuple(index_of[name] for name in metaop.inputs),
                curve=metaop.curve if profiled is None else profiled.curve,
                fit=None if profiled is None else profiled.fit,
                device_s=device_s[metaop.name],
            )
        )
    return tuple(views)


def slice_views(plan: Plan, by_task: Rows, by_component: Rows) -> tuple[SliceView, ...]:
    """Slices in the order of `plan.slices`."""
    index_of = {metaop.name: index for index, metaop in enumerate(plan.metaops)}
    wave_of = [wave.index for wave in plan.waves for _ in wave.slices]
    return tuple(
        SliceView(
            metaop=index_of[piece.metaop],
            ops=piece.ops,
            wave=wave_of[index],
            runs=runs_of(piece.devices),
            num_devices=len(piece.devices),
            dp=piece.dp,
            tp=piece.tp,
            rows=piece.rows,
            part=piece.part,
            recompute=piece.recompute,
            selective=piece.selective,
            offload=piece.offload,
            start_s=piece.start_s,
            end_s=piece.end_s,
            backward_s=piece.backward_s,
            task_row=by_task.row_of[index],
            component_row=by_component.row_of[index],
        )
        for index, piece in enumerate(plan.slices)
    )


def memory_views(plan: Plan) -> tuple[MemoryUse, ...]:
    """Memory of every device by account/device_memory.py, neighbours with the same merged."""
    held = device_memory(plan.metaops, plan.slices, plan.cluster, plan, communicator_bytes(plan), plan.turn)
    both: Sequence[object] = list(zip(held, plan.cluster.memory_bytes, strict=True))
    return tuple(
        MemoryUse(
            run=run,
            parameter_bytes=held[run[0]].parameter_bytes,
            gradient_bytes=held[run[0]].gradient_bytes,
            optimizer_bytes=held[run[0]].optimizer_bytes,
            activation_bytes=held[run[0]].activation_bytes,
            buffer_bytes=held[run[0]].buffer_bytes,
            allocator_bytes=held[run[0]].allocator_bytes,
            outside_bytes=held[run[0]].outside_bytes,
            capacity_bytes=plan.cluster.memory_bytes[run[0]],
        )
        for run, _ in equal_runs(both)
    )
