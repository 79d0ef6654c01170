"""What a small bug is: operators that turn a piece of code into another that somebody might have written.

Most are mutmut's. Left out of those: other texts in strings, `None` for a value or an argument, a positional
argument lost; any test that runs the line fails by them, so that they say nothing about a test's sharpness.
Nor is `zip(strict=True)` touched: it states an invariant, as an assertion does.
Added: a lost term or factor, the other extreme, a special case forgotten or always taken, a filter or a
statement lost, one less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import libcst as cst
from mutmut.mutation import mutators

_OTHER = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "floor": "ceil",
    "ceil": "floor",
    "bisect_left": "bisect_right",
    "bisect_right": "bisect_left",
}
_COMMUTES = (cst.Add, cst.Multiply, cst.BitOr, cst.BitAnd)


def lost_term(node: cst.BinaryOperation) -> Iterator[cst.BaseExpression]:
    """`a * b` becomes `a`, and `b` where they change places freely."""
    kept = [node.left, node.right] if isinstance(node.operator, _COMMUTES) else [node.left]
    for each in kept:
        yield each.with_changes(lpar=[*node.lpar, *each.lpar], rpar=[*each.rpar, *node.rpar])


def lost_condition(node: cst.BooleanOperation) -> Iterator[cst.BaseExpression]:
    """`a and b` becomes `a`, or `b`."""
    for each in (node.left, node.right):
        yield each.with_changes(lpar=[*node.lpar, *each.lpar], rpar=[*each.rpar, *node.rpar])


def other_function(node: cst.Call) -> Iterator[cst.BaseExpression]:
    """`min` for `max` and the like; what was reversed is not."""
    if not isinstance(node.func, cst.Name):
        return
    if node.func.value in _OTHER:
        yield node.with_changes(func=cst.Name(_OTHER[node.func.value]))
    if node.func.value == "reversed":
        yield node.with_changes(func=cst.Name("list"))


def lost_keyword(node: cst.Call) -> Iterator[cst.Call]:
    """A call without one of its named arguments."""
    for index, argument in enumerate(node.args):
        if argument.keyword is not None and argument.keyword.value != "strict":
            yield node.with_changes(args=[*node.args[:index], *node.args[index + 1 :]])


def decided(node: cst.If | cst.IfExp) -> Iterator[cst.CSTNode]:
    """A special case that is always taken, or never."""
    for answer in ("True", "False"):
        yield node.with_changes(test=cst.Name(answer), whitespace_before_test=cst.SimpleWhitespace(" "))


def decided_expression(node: cst.IfExp) -> Iterator[cst.BaseExpression]:
    """`a if c else b` becomes `a`, or `b`."""
    for each in (node.body, node.orelse):
        yield each.with_changes(lpar=[*node.lpar, *each.lpar], rpar=[*each.rpar, *node.rpar])


def lost_filter(node: cst.CompFor) -> Iterator[cst.CompFor]:
    """A comprehension that takes all."""
    if node.ifs:
        yield node.with_changes(ifs=[])


def lost_statement(node: cst.SimpleStatementLine) -> Iterator[cst.SimpleStatementLine]:
    """A call for its effect that is not made."""
    only = node.body[0]
    if len(node.body) == 1 and isinstance(only, cst.Expr) and isinstance(only.value, cst.Call):
        yield node.with_changes(body=[cst.Pass()])


def other_number(node: cst.BaseNumber) -> Iterator[cst.BaseNumber]:
    """One less of what is counted, half of what is measured."""
    if isinstance(node, cst.Integer) and node.evaluated_value > 0:
        yield node.with_changes(value=repr(node.evaluated_value - 1))
    if isinstance(node, cst.Float) and node.evaluated_value != 0.0:
        yield node.with_changes(value=repr(node.evaluated_value / 2))


Operator = Callable[[Any], Iterable[cst.CSTNode]]
# Kind of node, what it is called in a mutant's name, and the operator.
OPERATORS: tuple[tuple[type[cst.CSTNode], str, Operator], ...] = (
    (cst.BaseNumber, "number", mutators.operator_number),
    (cst.BaseNumber, "number", other_number),
    (cst.Name, "boolean", mutators.operator_name),
    (cst.AugAssign, "assignment", mutators.operator_augmented_assignment),
    (cst.UnaryOperation, "sign", mutators.operator_remove_unary_ops),
    (cst.Call, "method", mutators.operator_symmetric_string_methods_swap),
    (cst.Call, "method", mutators.operator_unsymmetrical_string_methods_swap),
    (cst.CSTNode, "keyword", mutators.operator_keywords),
    (cst.CSTNode, "operator", mutators.operator_swap_op),
    (cst.Match, "case", mutators.operator_match),
    (cst.BinaryOperation, "term", lost_term),
    (cst.BooleanOperation, "condition", lost_condition),
    (cst.Call, "function", other_function),
    (cst.Call, "argument", lost_keyword),
    (cst.If, "decided", decided),
    (cst.IfExp, "decided", decided_expression),
    (cst.CompFor, "filter", lost_filter),
    (cst.SimpleStatementLine, "statement", lost_statement),
)


def slips(node: cst.CSTNode) -> Iterator[tuple[str, cst.CSTNode]]:
    """What may stand in a node's place, each with its operator's name."""
    for kind, name, operator in OPERATORS:
        if isinstance(node, kind):
            for other in operator(node):
                yield name, other
