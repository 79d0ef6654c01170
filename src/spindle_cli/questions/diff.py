"""What changed between two plans, for code review and CI."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from rich import box
from rich.table import Table

from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.plan.types import Plan, Slice, format_devices
from spindle_cli.units import format_bytes, format_seconds


class Change(Model):
    """A property that differs.

    Attributes:
        what: Which property.
        before: What it was; null where that plan lacks it.
        after: What it is; null where that plan lacks it.
    """

    what: str
    before: str | None
    after: str | None


class Figure(Model):
    """A predicted figure of both plans.

    Attributes:
        what: Which figure.
        unit: Its unit.
        before: Its value in the first plan.
        after: Its value in the second plan.
        growth: after over before, less 1; null if before is 0.
    """

    what: str
    unit: Literal["s", "bytes"]
    before: float
    after: float
    growth: float | None


class Difference(Artifact):
    """The document of `spindle diff --json`.

    Attributes:
        before: The first plan.
        after: The second plan.
        same: Whether nothing differs.
        figures: Predicted figures.
        changes: What differs: the plans' origin first, then MetaOp by MetaOp.
    """

    KIND: ClassVar[str] = "difference"

    schema_: Annotated[Literal["spindle.difference/1"], Field(alias="schema")] = "spindle.difference/1"
    before: str
    after: str
    same: bool
    figures: tuple[Figure, ...]
    changes: tuple[Change, ...]

    @property
    def iteration(self) -> Figure:
        """The predicted iteration, which `--max-growth` judges."""
        return self.figures[0]


def diff(before: Plan, after: Plan, *, before_name: str, after_name: str) -> Difference:
    """Compare two plans: predictions (`Plan.of_steps`), origin, and the slices of each MetaOp, in the plans
    of all tasks.
    """
    return Difference(
        before=before_name,
        after=after_name,
        same=before == after,
        figures=_figures(before, after),
        changes=(*_origin_changes(before, after), *_metaop_changes(before, after)),
    )


def _figures(before: Plan, after: Plan) -> tuple[Figure, ...]:
    def figure(what: str, unit: Literal["s", "bytes"], old: float, new: float) -> Figure:
        return Figure(what=what, unit=unit, before=old, after=new, growth=new / old - 1 if old else None)

    old, new = before.of_steps, after.of_steps
    return (
        figure("iteration", "s", old.iteration_s, new.iteration_s),
        figure("compute", "s", old.compute_s, new.compute_s),
        figure("lower bound", "s", old.lower_bound_s, new.lower_bound_s),
        figure("transfers", "s", old.transfer_s, new.transfer_s),
        figure("processor", "s", old.processor_s, new.processor_s),
        figure("gradient sums", "s", old.gradient_sum_s, new.gradient_sum_s),
        figure("optimizer", "s", old.optimizer_s, new.optimizer_s),
        *([figure("held up", "s", old.held_up_s, new.held_up_s)] if old.held_up_s or new.held_up_s else []),
        figure(
            "peak memory",
            "bytes",
            max(old.peak_memory_bytes, default=0),
            max(new.peak_memory_bytes, default=0),
        ),
    )


def _origin_changes(before: Plan, after: Plan) -> list[Change]:
    pairs = (
        ("strategy", before.strategy, after.strategy),
        ("workload", before.workload.name, after.workload.name),
        ("workload fingerprint", before.workload.fingerprint, after.workload.fingerprint),
        ("profile", before.profile.sha256, after.profile.sha256),
        ("cluster", _cluster(before), _cluster(after)),
        ("tasks of the steps", _sets(before), _sets(after)),
        ("waves", str(len(before.waves)), str(len(after.waves))),
        ("slices", str(len(before.slices)), str(len(after.slices))),
    )
    return [Change(what=what, before=old, after=new) for what, old, new in pairs if old != new]


def _sets(plan: Plan) -> str:
    return (
        "; ".join(f"{task_share.share:.0%} {', '.join(task_share.tasks)}" for task_share in plan.task_sets)
        or "all"
    )


def _cluster(plan: Plan) -> str:
    cluster = plan.cluster
    return f"{cluster.name} ({cluster.num_devices} x {cluster.device_type}, {len(cluster.node_sizes)} nodes)"


def _metaop_changes(before: Plan, after: Plan) -> list[Change]:
    changes: list[Change] = []
    for name in dict.fromkeys((*before.by_name, *after.by_name)):
        old, new = _allocation(before, name), _allocation(after, name)
        if old != new:
            changes.append(Change(what=name, before=old, after=new))
    return changes


def _allocation(plan: Plan, metaop: str) -> str | None:
    """Return how a MetaOp runs: 'ops 0-5 on devices 0-3 (dp 4), ...'; None if the plan has no such MetaOp."""
    if metaop not in plan.by_name:
        return None
    parts: list[str] = []
    for slice_ in sorted((p for p in plan.slices if p.metaop == metaop), key=_place):
        devices = ", ".join(str(item) for item in format_devices(slice_.devices))
        degrees = f"dp {slice_.dp}" + (f", tp {slice_.tp}" if slice_.tp > 1 else "")
        moved = ", ".join(f"{first}:{last}" for first, last in slice_.offload)
        memory = f", {moved} in host memory" if moved else ""
        memory += ", recomputed" if slice_.num_recomputed else ""
        memory += " but for what takes longest" if slice_.num_recomputed and slice_.selective else ""
        degrees += f", rows {list(slice_.rows)}" if slice_.rows is not None else ""
        ops = f"{slice_.ops[0]}:{slice_.ops[1]}{slice_.part}"
        parts.append(f"ops {ops} on [{devices}] ({degrees}{memory})")
    return "; ".join(parts)


def _place(slice_: Slice) -> tuple[int, tuple[int, int]]:
    return slice_.micro_batch, slice_.ops


def figure_table(difference: Difference) -> Table:
    """Predictions before and after."""
    table = Table(
        title=f"{difference.before} -> {difference.after}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("predicted")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for figure in difference.figures:
        show = format_seconds if figure.unit == "s" else format_bytes
        growth = "" if figure.growth is None else f"{figure.growth:+.1%}"
        table.add_row(figure.what, show(figure.before), show(figure.after), growth)
    return table


def change_lines(difference: Difference) -> str:
    """Return what differs, two lines each, like a diff."""
    if difference.same:
        return "the plans are the same"
    if not difference.changes:
        return "the same slices on the same devices; only predictions or times differ"
    lines: list[str] = []
    for change in difference.changes:
        lines.append(change.what)
        lines += [
            f"  {sign} {text}"
            for sign, text in (("-", change.before), ("+", change.after))
            if text is not None
        ]
    return "\n".join(lines)
