"""Sections of the MetaGraph: consecutive ops that the same MetaOps run with the same parameters.

What is in one lane of a section is there for all of its MetaOps, so that its gradients need no sum between
lanes. A section may be cut between any two of its ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spindle_cli.plan.problem import Problem

# An op of a MetaOp: its name, and the op's index.
Op = tuple[str, int]


@dataclass(frozen=True)
class Section:
    """Ops in a row.

    Attributes:
        users: the MetaOps that run it, each with the first of its ops; a MetaOp that uses the same parameters
            in several places is there as often, in a section of one op.
        num_bytes: of the trained parameters of each op.
    """

    users: tuple[Op, ...]
    num_bytes: tuple[int, ...]

    @property
    def num_ops(self) -> int:
        """Ops of each of its MetaOps."""
        return len(self.num_bytes)


def sections_of(problem: Problem) -> tuple[Section, ...]:
    """All of a problem, in the order of the MetaOps and ops that come first in each."""
    columns = _columns(problem)
    starts = [users for users in columns if _moved(users, -1) not in columns]
    return tuple(_section(users, columns) for users in starts)


def _section(users: tuple[Op, ...], columns: Mapping[tuple[Op, ...], int]) -> Section:
    num_bytes = []
    now = users
    while now in columns:
        num_bytes.append(columns[now])
        now = _moved(now, 1)
    return Section(users, tuple(num_bytes))


def _moved(users: tuple[Op, ...], by: int) -> tuple[Op, ...]:
    return tuple((name, op + by) for name, op in users)


def _join(column_of: dict[Op, dict[Op, None]], first: Op, second: Op) -> None:
    """Make one of the columns of two ops, where these are not in the same one."""
    if column_of[first] is not column_of[second]:
        joined = column_of[first] | column_of[second]
        for member in joined:
            column_of[member] = joined


def _columns(problem: Problem) -> dict[tuple[Op, ...], int]:
    """The ops that use the same parameters, and the bytes of these; of an op without, itself alone."""
    by_name = {(metaop := problem.nodes[i].metaop).name: metaop for i in problem.order}
    order = [(name, op) for name, metaop in by_name.items() for op in range(metaop.num_ops)]
    column_of: dict[Op, dict[Op, None]] = {op: {op: None} for op in order}  # ordered sets
    first_user: dict[tuple[str, int], Op] = {}
    bytes_of: dict[tuple[str, int], int] = {}
    for op in order:
        for block in problem.uses[op]:
            place = (block.key, block.block)
            bytes_of[place] = max(bytes_of.get(place, 0), block.num_bytes)
            first = first_user.setdefault(place, op)
            _join(column_of, first, op)
    num_bytes = {id(column): 0 for column in column_of.values()}
    for place, op in first_user.items():
        num_bytes[id(column_of[op])] += bytes_of[place]
    return {tuple(column): num_bytes[id(column)] for column in column_of.values()}
