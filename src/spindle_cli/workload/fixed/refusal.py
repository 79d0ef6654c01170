"""Code that reads values: which of the batch's fields they come from."""

from __future__ import annotations

from torch import fx

from spindle_cli.errors import WorkloadError


class ReadsValuesError(WorkloadError):
    """Values are read before there are any; `fields`: of the batch, those that they come from."""

    fields: frozenset[str] = frozenset()

    @classmethod
    def at(cls, error: WorkloadError, fields: frozenset[str]) -> ReadsValuesError:
        """The same error, which knows the fields."""
        made = cls(*error.args, hint=error.hint)
        made.fields = fields
        return made


def fields_behind(node: fx.Node) -> frozenset[str]:
    """Names of the fields that a node's arguments come from."""
    seen, left = {node}, [node]
    while left:
        for source in left.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                left.append(source)
    return frozenset(str(each.target) for each in seen if each.op == "placeholder")
