"""Analyses of many like workloads: what was found of the layers of one serves for all."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

from spindle_cli.analysis.analyse import analyse_for_others
from spindle_cli.analysis.localise import rebind
from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.settings.types import Lengths
from spindle_cli.workload.types import Workload

_graphs: dict[str, WorkloadGraph] = {}  # the last of each kind
_memos: dict[str, AnalysisMemo] = {}  # by a workload's name


class Analyses:
    """Analyses workloads; `memo`: what all of them have found."""

    def __init__(self) -> None:
        self.memo: AnalysisMemo | None = None

    def of(
        self, workload: Workload, lengths: Lengths | None = None, *, evaluates: bool = False
    ) -> tuple[WorkloadGraph, AnalysisMemo]:
        graph, self.memo = analyse_for_others(workload, self.memo, lengths, evaluates=evaluates)
        return graph, self.memo


@cache
def analyses() -> Analyses:
    """Those of this process."""
    return Analyses()


def built_by(source: str) -> str:
    """What a workload's file says of the workload itself, whatever it is trained with."""
    said = yaml.safe_load(Path(source).read_text())
    return repr((said["model"], said.get("args")))


def built_before(key: str, graph: WorkloadGraph) -> None:
    """Have `analysed_before` know the graph of a build."""
    _graphs[key] = graph


def analysed_before(key: str, workload: Workload) -> WorkloadGraph:
    """The graph of a workload that is built as others of this key were: theirs, bound to it."""
    known = _graphs.get(key)
    bound = None if known is None else rebind(known, workload)
    _graphs[key] = analysed(workload) if bound is None else bound
    return _graphs[key]


def analysed(workload: Workload, lengths: Lengths | None = None, *, evaluates: bool = False) -> WorkloadGraph:
    """What `analyse` gives, sooner."""
    return analyses().of(workload, lengths, evaluates=evaluates)[0]


def analysed_again(
    workload: Workload,
    memo: AnalysisMemo | None = None,
    lengths: Lengths | None = None,
    *,
    evaluates: bool = False,
) -> tuple[WorkloadGraph, AnalysisMemo]:
    """What `analyse_for_others` gives, sooner where this process has analysed a workload of this name."""
    known = memo or _memos.get(workload.name)
    graph, _memos[workload.name] = analyse_for_others(workload, known, lengths, evaluates=evaluates)
    return graph, _memos[workload.name]
