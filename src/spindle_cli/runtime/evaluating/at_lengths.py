"""Tasks made ready to be evaluated at other lengths than the planned ones: when a length comes, and kept."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping

from spindle_cli.runtime.evaluating.prepared import Prepared, Preparing
from spindle_cli.units import format_seconds
from spindle_cli.workload.building.abstract import load_abstract
from spindle_cli.workload.evaluated.at_lengths import EvaluationTracer
from spindle_cli.workload.training.item_draws import generators_kept

Shape = tuple[int, ...]  # of one sample

# Lengths of each task that are kept; of more, those that came last.
_KEPT = 64


class EvaluatedAtLengths:
    """On one rank."""

    def __init__(self, preparing: Preparing) -> None:
        self._preparing = preparing
        self._tracer: EvaluationTracer | None = None
        self._made: dict[str, OrderedDict[tuple[tuple[str, Shape], ...], Prepared]] = {}

    def of(self, planned: Prepared, shapes: Mapping[str, Shape]) -> Prepared:
        """A task for batches with these shapes of one sample, by field; of this rank alone.

        Args:
            planned: at the planned length.

        Raises:
            WorkloadError: it cannot be evaluated at this length, or a field is missing.
        """
        graph = planned.graph
        key = tuple((name, tuple(shapes[name])) for name in graph.varying if name in shapes)
        if all(_is_planned(planned, name, shape) for name, shape in key):
            return planned
        kept = self._made.setdefault(graph.task.name, OrderedDict())
        if key not in kept:
            began = time.monotonic()
            kept[key] = self._at(planned, dict(key))
            shown = ", ".join(f"{field} of {shape}" for field, shape in key)
            what = f"task {graph.task.name!r}: ready to be evaluated on samples with {shown}"
            print(f"{what}: {format_seconds(time.monotonic() - began)}", flush=True)
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]

    def _at(self, planned: Prepared, shapes: Mapping[str, Shape]) -> Prepared:
        if self._tracer is None:
            with generators_kept():
                other = load_abstract(self._preparing.source, reads_initial=False).workload
                self._tracer = EvaluationTracer(other, self._preparing.model.memo)
        return self._preparing.at_length(planned, self._tracer.at(planned.route.traced, shapes))


def _is_planned(planned: Prepared, name: str, shape: Shape) -> bool:
    """Whether it is as planned, or cannot be run at all: who takes the batch then says why."""
    spec, varies = planned.graph.fields[name].shape[1:], planned.graph.varying[name]
    fits = len(shape) == len(spec) and all(
        differs or size == own for size, own, differs in zip(shape, spec, varies, strict=True)
    )
    return shape == spec or not fits
