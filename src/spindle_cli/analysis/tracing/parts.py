"""Statements of a function as a function of their own: which ones, what they take and give, and the code of
the function with calls in their places.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import gc
import inspect
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from spindle_cli.analysis.tracing.faithful import is_in_place_name

_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LEAVES = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Nonlocal, ast.Global)


@dataclass(frozen=True)
class Cut:
    """Which statements of a function's body are a region; `end` is behind the last."""

    start: int
    end: int

    def has(self, statement: int) -> bool:
        """Whether a statement is in the cut."""
        return self.start <= statement < self.end


def statement_at(body: Sequence[ast.stmt], line: int) -> int | None:
    indices = range(first_statement(body), len(body))
    return next((i for i in indices if body[i].lineno <= line <= _end(body[i])), None)


def body_of(code: types.CodeType) -> list[ast.stmt]:
    return tree_of(code).body


def _end(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno


def first_statement(body: Sequence[ast.stmt]) -> int:
    """The first statement that is no docstring."""
    is_text = bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return 1 if is_text else 0


def whole_lines(body: Sequence[ast.stmt], cut: Cut, buffers: frozenset[str]) -> Cut:
    """A cut of whole lines, as places are told by lines alone, that ends with the function where it leaves
    it, or sets attributes that later code may read; of buffers it is known who reads them.
    """
    start, end = cut.start, cut.end
    while start > first_statement(body) and _end(body[start - 1]) >= body[start].lineno:
        start -= 1
    while end < len(body) and body[end].lineno <= _end(body[end - 1]):
        end += 1
    cut = Cut(start, end)
    inside = [node for statement in body[cut.start : cut.end] for node in _walk(statement)]
    leaves = any(isinstance(node, ast.Return) for node in inside)
    stored = [node for node in inside if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    sets = any(node.attr not in buffers for node in stored)
    return replace(cut, end=len(body)) if leaves or sets else cut


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and what is in it, but for the bodies of functions."""
    yield node
    if not isinstance(node, _FUNCTIONS):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


def function_of(code: types.CodeType, root: nn.Module | None) -> types.FunctionType | None:
    """The one function of some code that can be written anew; None where there is none. Of those that several
    builds have made, that of the modules of `root` and of their classes.
    """
    generators = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    if code.co_flags & generators:
        return None
    try:
        tree = tree_of(code)
    except (OSError, SyntaxError, TypeError, IndexError):
        return None
    if any(isinstance(node, _LEAVES[1:]) for statement in tree.body for node in _walk(statement)):
        return None
    if (named := _named_function_of(code)) is not None:
        return named
    # What a function makes, a class with its methods or an attribute, it makes anew in each call.
    held = {} if root is None else {id(f): f for f in _functions_held_by(root) if f.__code__ is code}
    # Last, as all objects that there are are looked at.
    functions = list(held.values()) or [
        f for f in _referrers(code) if isinstance(f, types.FunctionType) and f.__code__ is code
    ]
    return functions[0] if len(functions) == 1 else None


def _functions_held_by(root: nn.Module) -> Iterator[types.FunctionType]:
    """The functions that a module, its parts and their classes have as attributes, under any decorators."""
    modules = list(root.modules())
    classes = dict.fromkeys(base for module in modules for base in type(module).__mro__)
    for holder in (*modules, *classes):
        for attribute in list(vars(holder).values()):
            while attribute is not None:
                if isinstance(attribute, types.FunctionType):
                    yield attribute
                attribute = _decorated(attribute)


def _named_function_of(code: types.CodeType) -> types.FunctionType | None:
    """The function of some code that its file, or a class there, has by the code's own name, under whatever
    decorators; None where there is none, as of functions that are made in others.
    """
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("__file__") != code.co_filename:
            continue
        resolved: Any = module
        for name in code.co_qualname.split("."):
            resolved = getattr(resolved, "__dict__", {}).get(name)
        while resolved is not None and getattr(resolved, "__code__", None) is not code:
            resolved = _decorated(resolved)
        if isinstance(resolved, types.FunctionType):
            return resolved
    return None


def _decorated(value: object) -> Any:
    """What a decorator was given that has made a value; None where that is not known."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return vars(value).get("__wrapped__") if isinstance(value, types.FunctionType) else None


def _referrers(value: object) -> list[Any]:
    """What refers to a value, also of what was taken from the garbage collector for good."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    referrers = gc.get_referrers(value)
    if is_frozen:
        gc.freeze()
    return referrers


def tree_of(code: types.CodeType) -> ast.FunctionDef:
    """A function's source, with the lines that it has in its file and with private names as they are kept."""
    source = textwrap.dedent(inspect.getsource(code))
    tree = ast.parse(source)
    made = tree.body[0]
    # A lambda may begin in the line in which the function begins that it stands in.
    if not isinstance(made, ast.FunctionDef) or made.name != code.co_name:
        raise SyntaxError("no function of its own")
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    owner = code.co_qualname.split(".")[-2:-1]
    return _Mangled(owner[0]).visit(made) if owner and owner[0] != "<locals>" else made


class _Mangled(ast.NodeTransformer):
    """Writes a class's private names (`self.__x`) out as they are kept."""

    def __init__(self, owner: str) -> None:
        self._owner = owner.lstrip("_")

    def _of(self, name: str) -> str:
        is_private = name.startswith("__") and not name.endswith("__") and bool(self._owner)
        return f"_{self._owner}{name}" if is_private else name

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = self._of(node.attr)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._of(node.id)
        return node


def _names(nodes: Sequence[ast.AST], kinds: type | tuple[type, ...]) -> list[str]:
    name_nodes = (node for root in nodes for node in ast.walk(root) if isinstance(node, ast.Name))
    return list(dict.fromkeys(node.id for node in name_nodes if isinstance(node.ctx, kinds)))


def names_changed(nodes: Sequence[ast.AST]) -> list[str]:
    """Names whose objects statements may change in place: `x[i] = y`, `x += y`, `x.add_(y)`."""
    changed: dict[str, None] = {}
    for node in (inner for root in nodes for inner in ast.walk(root)):
        target: ast.AST | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node
        elif isinstance(node, ast.AugAssign):
            target = node.target
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func if is_in_place_name(node.func.attr) else None
        while isinstance(target, ast.Subscript | ast.Attribute):
            target = target.value
        if isinstance(target, ast.Name):
            changed[target.id] = None
    return list(changed)


@dataclass(frozen=True)
class Part:
    """The statements of a function that are a region: what they take and give, by name.

    `gives`: None where the region ends with the function, whose result is then its own.
    """

    function: types.FunctionType
    tree: ast.FunctionDef
    cut: Cut
    takes: tuple[str, ...]
    gives: tuple[str, ...] | None

    @classmethod
    def of(cls, function: types.FunctionType, cut: Cut) -> Part:
        """Make the part of a function that a cut marks."""
        code = function.__code__
        tree = tree_of(code)
        inside, after = tree.body[cut.start : cut.end], tree.body[cut.end :]
        loaded = [*_names(inside, (ast.Load, ast.Del)), *names_changed(inside)]
        first = code.co_varnames[:1] if "super" in loaded else ()
        takes = tuple(dict.fromkeys([*first, *loaded]))
        if not after:
            return cls(function, tree, cut, takes, None)
        later = set(_names(after, ast.Load))
        made = [name for name in (*_names(inside, ast.Store), *names_changed(inside)) if name in later]
        made = [name for name in made if name != "self"]  # what it changes in place is a buffer of it
        return cls(function, tree, cut, takes, tuple(dict.fromkeys(made)))

    @property
    def changes(self) -> list[str]:
        """The names of what it may change in place."""
        return names_changed(self.tree.body[self.cut.start : self.cut.end])

    def names_around(self) -> frozenset[str]:
        """The names and attributes that the other statements of the function have."""
        others = [*self.tree.body[: self.cut.start], *self.tree.body[self.cut.end :]]
        nodes = [node for statement in others for node in ast.walk(statement)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        return frozenset(names | {node.attr for node in nodes if isinstance(node, ast.Attribute)})

    @property
    def line(self) -> int:
        """The line of its file in which the part begins."""
        return self.tree.body[self.cut.start].lineno

    def inner(self, takes: Sequence[str]) -> types.FunctionType:
        """The region as a function of these values."""
        tree = copy.deepcopy(self.tree)
        body = tree.body[self.cut.start : self.cut.end]
        if self.gives is not None:
            bound: list[ast.expr] = [ast.Name(variable, ast.Load()) for variable in self.gives]
            body.append(ast.Return(ast.Tuple(bound, ast.Load())))
        tree.body = body
        tree.args = ast.arguments([], [ast.arg(variable) for variable in takes], None, [], [], None, [])
        code = _compiled(self.function, tree)
        closure = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True))
        cells = tuple(closure[name] for name in code.co_freevars)
        return types.FunctionType(code, self.function.__globals__, code.co_name, None, cells)

    def text(self) -> str:
        """The source text of the part."""
        return ast.unparse(ast.Module(self.tree.body[self.cut.start : self.cut.end], []))


def rewritten(function: types.FunctionType, parts: Mapping[str, Part]) -> types.CodeType:
    """A function's code, with calls of these names in the places of its regions."""
    tree = tree_of(function.__code__)
    for name, part in reversed(list(parts.items())):
        statements = tree.body[part.cut.start : part.cut.end]
        call = ast.Call(ast.Name(name, ast.Load()), [ast.Call(ast.Name("locals", ast.Load()), [], [])], [])
        made: ast.stmt = ast.Return(call)
        if part.gives is not None:
            names: list[ast.expr] = [ast.Name(statement, ast.Store()) for statement in part.gives]
            made = ast.Assign([ast.Tuple(names, ast.Store())], call) if names else ast.Expr(call)
        # What the region alone takes of the functions around stays known to the code.
        kept = ast.If(ast.Constant(False), statements, [])
        for statement in (kept, made):
            ast.copy_location(statement, statements[0])
        tree.body[part.cut.start : part.cut.end] = [kept, made]
    code = _compiled(function, tree)
    assert code.co_freevars == function.__code__.co_freevars
    return code


def _compiled(function: types.FunctionType, tree: ast.FunctionDef) -> types.CodeType:
    """Compiled inside of a function that has the variables around it."""
    tree.decorator_list = []
    around = list(function.__code__.co_freevars)
    owner = ast.FunctionDef(
        "around",
        ast.arguments([], [ast.arg(name) for name in around], None, [], [], None, []),
        [tree, ast.Return(ast.Name(tree.name, ast.Load()))],
        [],
    )
    if "type_params" in ast.FunctionDef._fields:  # from Python 3.12 on
        vars(owner)["type_params"] = []
    module = ast.fix_missing_locations(ast.Module([owner], []))
    code = function.__code__
    flags = code.co_flags & _FUTURE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = compile(module, code.co_filename, "exec", flags, dont_inherit=True)
    (outer,) = (constant for constant in compiled.co_consts if isinstance(constant, types.CodeType))
    (inner,) = (
        constant
        for constant in outer.co_consts
        if isinstance(constant, types.CodeType) and constant.co_name == tree.name
    )
    return inner.replace(co_qualname=code.co_qualname)
