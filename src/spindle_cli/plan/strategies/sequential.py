"""`sequential`: one MetaOp after another, each on the fastest of its allocations.

How DeepSpeed and Megatron run such models, every MetaOp with the parallelism that suits it best.
"""

from __future__ import annotations

from spindle_cli.plan.placing.calendar import first_devices
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Draft, UnplacedSlice, whole_slice
from spindle_cli.plan.strategies.lanes import all_or_none


def sequential(problem: Problem) -> Draft:
    """The schedule, in the order of the tasks as far as the edges allow, always from device 0 on."""
    pieces: list[UnplacedSlice] = []
    now_s = 0.0
    for i in problem.order:
        node = problem.nodes[i]
        end_s = now_s + node.shortest_s
        pieces.append(whole_slice(node, node.points[-1], now_s, end_s))
        now_s = end_s
    devices = [first_devices(problem.cluster, piece.point, range(problem.num_devices)) for piece in pieces]
    return Draft("sequential", tuple(pieces), all_or_none(devices), after=tuple(range(len(pieces))))
