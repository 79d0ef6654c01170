"""All mutants of a file: where, what becomes what, and a name that stays when the lines around it move."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import unified_diff
from functools import cached_property
from pathlib import Path

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from mutants.slips import slips

_KEPT = Path("build/mutants/found")
_CODE = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("making.py", "slips.py"))
# Not code that runs (annotations), or texts for people (messages), or what only a broken Spindle would show.
_SKIPPED = (
    cst.Annotation,
    cst.Decorator,
    cst.Raise,
    cst.Assert,
    cst.FormattedString,
    cst.ImportFrom,
    cst.Import,
)


@dataclass(frozen=True)
class Mutant:
    """A file with one bug in it.

    Attributes:
        name: `<file>:<function>:<operator>:<a few digits>`, of what changes, not of the line's number.
        path: of the file in the tree.
        line: the first that changes, from 1.
        last_line: the last that the changed piece stands on.
        column: where the piece begins; with `line`, its place.
        before, after: the piece's code.
    """

    name: str
    path: Path
    line: int
    last_line: int
    column: int
    before: str
    after: str


class File:
    """A parsed file and its mutants."""

    def __init__(self, path: Path, text: str) -> None:
        """Args: path: in the tree; text: of the file."""
        self.path, self.text = path, text

    @cached_property
    def _found(self) -> _Finder:
        wrapper = MetadataWrapper(cst.parse_module(self.text))
        found = _Finder(wrapper.module, self.path)
        wrapper.visit(found)
        return found

    @cached_property
    def mutants(self) -> Sequence[Mutant]:
        """All of them, in the order of the text; kept in a file, as finding them takes a while."""
        digits = hashlib.sha256(_CODE + self.text.encode() + bytes(self.path)).hexdigest()[:16]
        kept = _KEPT / f"{digits}.json"
        if kept.exists():
            return [Mutant(**each | {"path": self.path}) for each in json.loads(kept.read_text())]
        mutants = self._found.mutants
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps([asdict(each) | {"path": ""} for each in mutants]))
        partial.rename(kept)
        return mutants

    def mutated(self, mutant: Mutant) -> str:
        """The file's text with the bug."""
        node, other = self._found.nodes[mutant.name]
        changed = self._found.module.deep_replace(node, other)
        assert isinstance(changed, cst.Module)
        return changed.code

    def diff(self, mutant: Mutant) -> str:
        """What the bug changes, as a patch."""
        before, after = self.text.splitlines(), self.mutated(mutant).splitlines()
        lines = unified_diff(before, after, str(mutant.path), str(mutant.path), n=1, lineterm="")
        return "\n".join(lines)


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, module: cst.Module, path: Path) -> None:
        super().__init__()
        self.mutants: list[Mutant] = []
        self.nodes: dict[str, tuple[cst.CSTNode, cst.CSTNode]] = {}
        self.module, self._path = module, path
        self._inside: list[str] = []
        self._seen: Counter[tuple[str, ...]] = Counter()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _SKIPPED) or _is_for_types(node) or _is_strict(node):
            return False
        for operator, other in slips(node):
            self._note(operator, node, other)
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self._inside.append(node.name.value)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, (cst.FunctionDef, cst.ClassDef)):
            self._inside.pop()

    def _note(self, operator: str, node: cst.CSTNode, other: cst.CSTNode) -> None:
        where = self.get_metadata(PositionProvider, node)
        assert isinstance(where, CodeRange)
        before, after = (self._code(each) for each in (node, other))
        function = ".".join(self._inside) or "top"
        key = (function, operator, before, after)
        digits = hashlib.sha256("\0".join((*key, str(self._seen[key]))).encode()).hexdigest()[:6]
        self._seen[key] += 1
        name = f"{self._path.relative_to('src/spindle_cli')}:{function}:{operator}:{digits}"
        last = where.start.line if isinstance(node, cst.If) else where.end.line
        self.nodes[name] = (node, other)
        self.mutants.append(
            Mutant(name, self._path, where.start.line, last, where.start.column, before, after)
        )

    def _code(self, node: cst.CSTNode) -> str:
        """A node's text; of an `if` its condition, as what hangs on it does not change."""
        return self.module.code_for_node(node.test if isinstance(node, cst.If) else node).strip()


def _is_for_types(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.If) and isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING"


def _is_strict(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == "strict"
