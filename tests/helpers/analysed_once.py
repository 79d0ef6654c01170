"""What many requests of one process train, analysed once."""

from __future__ import annotations

from functools import partial
from typing import Any

from helpers.analysed import analyses
from spindle_cli.analysis import localise
from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.workload.building.load import Source, build
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.settings.types import Lengths

Key = tuple[str, str]  # of a source, and of how its graph is found
analyse_source = localise.in_the_abstract
analysed: dict[Key, Any] = {}  # for the first alone of the requests that train it, each in another way


def key_of(source: Source) -> str:
    return repr((source.build.__module__, source.build.__qualname__, source.args))


def in_the_abstract(source: Source, find_graph: partial[WorkloadGraph]) -> Any:
    """Analyses a workload once: that is much of what a request takes, and nothing of it is trained. What no
    memo is given for finds what other tests of this process have found of the same layers.
    """
    asked = {name: value for name, value in find_graph.keywords.items() if name != "memo"}
    key = key_of(source), repr(asked)
    if key not in analysed:
        memo = find_graph.keywords.get("memo") or analyses().memo
        analysed[key] = analyse_source(source, partial(find_graph, memo=memo))
    return analysed[key]


def analysed_for_requests(source: Source, lengths: Lengths) -> tuple[WorkloadGraph, AnalysisMemo]:
    """The graph of a workload, which requests of this process that train it are given too; and what others
    need not find again.
    """
    find = partial(analyses().of, lengths=lengths, evaluates=True)
    try:
        found = analyse_source(source, lambda workload: find(workload)[0])
    except localise.NotInPartError:
        return find(build(source))
    analysed[key_of(source), repr({"lengths": lengths, "evaluates": True})] = found
    memo = analyses().memo
    assert memo is not None
    return found[1], memo
