"""Which tensor of which file each parameter and buffer of a workload starts from.

The message of a checkpoint whose names, shapes or dtypes do not fit a workload.

What of a workload has initial values: its parameters, and the buffers that a state_dict would hold.

What a rank has of a parameter of which it keeps a part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import shown
from spindle_cli.workload.graph import root_of
from spindle_cli.workload.init_from import InitFrom, InitSource, Pattern
from spindle_cli.workload.initial.tensor_files import TensorPlace, tensors_in
from spindle_cli.workload.initial.types import InitialValues
from spindle_cli.workload.types import Workload

# PEFT puts a layer that it adapts one step further down, under this name.
_PEFT_STEP = ".base_layer."


@dataclass
class Holders:
    """By canonical name, as `ParameterTable` gives them ('<first task that has it>.<dotted name there>').

    Attributes:
        tensors: each distinct one once, in the workload's order.
        canonical: every name that one has in any task -> its canonical name; of what PEFT has wrapped also
            the name that it had before.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    canonical: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: Workload) -> Holders:
        """Return the holders of a built workload, whether its parameters are real or not."""
        holders, by_id = cls(), dict[int, str]()
        for task in workload.all_tasks:
            root = root_of(task)
            passing = _not_saved(root)
            for dotted, tensor in (
                *root.named_parameters(remove_duplicate=False),
                *root.named_buffers(remove_duplicate=False),
            ):
                name = f"{task.name}.{dotted}"
                if dotted in passing or is_lazy(tensor):
                    continue
                first_name = by_id.setdefault(id(tensor), name)
                holders.tensors.setdefault(first_name, tensor)
                holders.canonical[name] = first_name
        for name, first_name in list(holders.canonical.items()):
            holders.canonical.setdefault(name.replace(_PEFT_STEP, "."), first_name)
        return holders

    @property
    def names(self) -> dict[str, list[str]]:
        """Canonical name -> all names of the same tensor."""
        names: dict[str, list[str]] = {name: [] for name in self.tensors}
        for name, canonical in self.canonical.items():
            names[canonical].append(name)
        return names


def _not_saved(root: nn.Module) -> set[str]:
    """Dotted names of the buffers that a state_dict would not hold."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in root.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


SHOWN = 4  # of each kind
_LIKE_ENOUGH = 0.5
_COMPARED = 40  # names that end alike

Shape = tuple[int, ...]


@dataclass
class Misfits:
    """All that does not fit.

    Attributes:
        left_over: source, name in it, what it maps to, its shape.
        missing: name in the workload and its shape.
        twice: name in the workload, and two tensors (source, name) that map to it.
        shapes, dtypes: name in the workload, what it has, and the tensor.
    """

    left_over: list[tuple[int, str, str | None, Shape]] = field(default_factory=list)
    missing: list[tuple[str, Shape]] = field(default_factory=list)
    twice: list[tuple[str, tuple[int, str], tuple[int, str]]] = field(default_factory=list)
    shapes: list[tuple[str, Shape, TensorPlace]] = field(default_factory=list)
    dtypes: list[tuple[str, torch.dtype, TensorPlace]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.left_over, self.missing, self.twice, self.shapes, self.dtypes))


def refusal(
    misfits: Misfits, init_from: InitFrom, holders: Holders, taken: Mapping[str, TensorPlace]
) -> InputError:
    """Return the error that says all of it. `taken`: what fits, by the workload's name."""
    free = [name for name, _ in misfits.missing]
    over = [name for _, name, _, _ in misfits.left_over]
    lines = [
        *_kind(
            f"in no file, {len(misfits.missing)} of the workload's {len(holders.tensors)}",
            (f"{name} {list(shape)}{_closest(name, over)}" for name, shape in misfits.missing),
        ),
        *_kind(
            f"left over, as the workload has nothing of that name, {len(misfits.left_over)}",
            (
                f"{_in_source(init_from, index, name)} {list(shape)}{_mapped(name, target)}"
                f"{_closest(target or name, free or list(holders.tensors))}"
                for index, name, target, shape in misfits.left_over
            ),
        ),
        *_kind(
            f"given twice, {len(misfits.twice)}",
            (
                f"{name}: by {_in_source(init_from, *first)} and {_in_source(init_from, *second)}"
                for name, first, second in misfits.twice
            ),
        ),
        *_kind(
            f"of another shape, {len(misfits.shapes)}",
            (
                f"{name} has {list(shape)}; {place.name} in {place.file.name} has {list(place.shape)}"
                for name, shape, place in misfits.shapes
            ),
        ),
        *_kind(
            f"of another dtype, {len(misfits.dtypes)}",
            (
                f"{name} is {_dtype(dtype)}; {place.name} in {place.file.name} is {_dtype(place.dtype)}"
                for name, dtype, place in misfits.dtypes
            ),
        ),
    ]
    head = f"{init_from.file}: init_from does not fit the workload ({len(taken)} tensors have a place):"
    return InputError("\n  ".join((head, *lines)), hint=_way_out(misfits))


def _kind(what: str, faults: Iterable[str]) -> Iterator[str]:
    lines = list(faults)
    if lines:
        yield f"{what}:"
        yield from (f"  {line}" for line in lines[:SHOWN])
        if len(lines) > SHOWN:
            yield f"  and {len(lines) - SHOWN} more"


def _in_source(init_from: InitFrom, index: int, name: str) -> str:
    return f"{shown(name)} of {init_from.sources[index].path}"


def _mapped(name: str, target: str | None) -> str:
    if target is None:
        return ", which no rule of `names` matches"
    return "" if target == name else f", mapped to {shown(target)}"


def _closest(name: str, others: list[str]) -> str:
    """Return the name that is most like this one, for people; nothing where none is."""
    parts = name.split(".")

    def same_end(candidate: str) -> int:
        pairs = zip(reversed(parts), reversed(candidate.split(".")), strict=False)
        return next((count for count, (ours, theirs) in enumerate(pairs) if ours != theirs), len(parts))

    candidates = sorted(others, key=same_end, reverse=True)[:_COMPARED]
    likeness = {
        candidate: SequenceMatcher(None, name, candidate, autojunk=False).ratio() for candidate in candidates
    }
    best = max(likeness, key=lambda candidate: (same_end(candidate) > 0, likeness[candidate]), default=None)
    return "" if best is None or likeness[best] < _LIKE_ENOUGH else f"; closest: {shown(best)}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _way_out(misfits: Misfits) -> str:
    ways = []
    if misfits.missing or misfits.left_over:
        ways.append("map names with `names: {pattern: name}`")
    if misfits.missing:
        ways.append("let what is new keep its values from build with `missing: [pattern]`")
    if misfits.left_over or misfits.twice:
        ways.append("leave out of a file with `skip: [pattern]`")
    if misfits.shapes:
        ways.append(
            "a shape has to be the workload's: to begin such a part anew, `skip` the tensor in the file "
            "and list the part under `missing`"
        )
    if misfits.dtypes:
        ways.append("round to fewer bits with `round: true`; other dtypes have to be the same")
    text = "; ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def find_initial(init_from: InitFrom, workload: Workload) -> InitialValues:
    """Match the tensors of all sources with a workload; only the files' headers are read.

    Raises:
        InputError: a source cannot be read; or names, shapes or dtypes do not fit: all that do not, at once.
    """
    if not init_from.sources:
        return InitialValues()
    holders, misfits = Holders.of(workload), Misfits()
    sources: dict[str, int] = {}
    places: dict[str, TensorPlace] = {}
    for index, source in enumerate(init_from.sources):
        there = tensors_in(init_from.path(index), init_from.place(index))
        taken = _taken(source, there, init_from.place(index))
        for name, target in _renamed(source, taken, init_from.place(index)).items():
            canonical = None if target is None else holders.canonical.get(target)
            if canonical is None:
                misfits.left_over.append((index, name, target, there[name].shape))
            elif canonical in places:
                first = sources[canonical], places[canonical].name
                misfits.twice.append((canonical, first, (index, name)))
            else:
                sources[canonical], places[canonical] = index, there[name]
                _require_fit(misfits, canonical, holders.tensors[canonical], there[name], source)
    new = tuple(name for name in holders.tensors if name not in places)
    misfits.missing.extend(_missing(new, init_from, holders))
    if misfits:
        raise refusal(misfits, init_from, holders, places)
    return InitialValues(
        places,
        sources,
        {name: holders.tensors[name].dtype for name in places},
        new,
        init_from.paths,
        tuple(source.path for source in init_from.sources),
    )


def fill_whole(initial: InitialValues, workload: Workload, *, where: Callable[[Tensor], bool]) -> None:
    """Put initial values into those parameters and buffers of a workload that `where` chooses.

    Raises:
        InputError: a file cannot be read.
    """
    tensors = Holders.of(workload).tensors
    initial.fill({name: (name, tensor, None) for name, tensor in tensors.items() if where(tensor)})


def _missing(
    new: Sequence[str], init_from: InitFrom, holders: Holders
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of what has no initial value and may not be without one."""
    allowed, names = _may_be_missing(init_from, holders), holders.names
    for name in new:
        if not any(map(allowed, names[name])):
            yield name, tuple(holders.tensors[name].shape)


def _taken(source: InitSource, names: Mapping[str, TensorPlace], place: str) -> list[str]:
    """Return the names in a file that are not left out.

    Raises:
        InputError: a pattern is of none of them.
    """
    only = None if source.only is None else [Pattern(text) for text in source.only]
    skip = [Pattern(text) for text in source.skip]
    for key, patterns in (("only", only or ()), ("skip", skip)):
        for number, pattern in enumerate(patterns):
            if not any(map(pattern.matches, names)):
                raise _of_none(f"{place}.{key}[{number}]", pattern, "in the file", min(names))
    return [
        name
        for name in names
        if (only is None or any(pattern.matches(name) for pattern in only))
        and not any(pattern.matches(name) for pattern in skip)
    ]


def _renamed(source: InitSource, names: list[str], place: str) -> dict[str, str | None]:
    """Name in the file -> the workload's, by the first rule that matches; None where none does.

    Raises:
        InputError: a rule is of none of them.
    """
    if not source.names:
        return {name: name for name in names}
    rules = [(Pattern(text), replacement) for text, replacement in source.names.items()]
    for pattern, _ in rules:
        if names and not any(map(pattern.matches, names)):
            raise _of_none(f"{place}.names", pattern, "that is taken", min(names))
    return {
        name: next((new for pattern, to in rules if (new := pattern.renamed(name, to)) is not None), None)
        for name in names
    }


def _may_be_missing(init_from: InitFrom, holders: Holders) -> Callable[[str], bool]:
    """Whether the workload's name may be in no file.

    Raises:
        InputError: a pattern is of none of the workload's names.
    """
    patterns: list[Pattern] = []
    for index, source in enumerate(init_from.sources):
        for number, text in enumerate(source.missing):
            patterns.append(Pattern(text))
            if not any(map(patterns[-1].matches, holders.canonical)):
                place = f"{init_from.place(index)}.missing[{number}]"
                raise _of_none(place, patterns[-1], "of the workload", min(holders.canonical))
    return lambda name: any(pattern.matches(name) for pattern in patterns)


def _of_none(place: str, pattern: Pattern, what: str, example: str) -> InputError:
    return InputError(
        f"{place}: {shown(pattern.text)} matches no name {what}",
        hint=f"A pattern is of a whole name, such as {example!r}; '*' stands for any text.",
    )


def _require_fit(misfits: Misfits, name: str, wanted: Tensor, place: TensorPlace, source: InitSource) -> None:
    if tuple(wanted.shape) != place.shape:
        misfits.shapes.append((name, tuple(wanted.shape), place))
    elif not _takes(wanted.dtype, place.dtype, rounds=source.round):
        misfits.dtypes.append((name, wanted.dtype, place))


def _takes(wanted: torch.dtype, saved: torch.dtype, *, rounds: bool) -> bool:
    """Whether every number of the dtype `saved` is one of `wanted`, or may be rounded to one."""
    if wanted == saved:
        return True
    if not (wanted.is_floating_point and saved.is_floating_point):
        return False
    ours, theirs = torch.finfo(wanted), torch.finfo(saved)
    exact = ours.eps <= theirs.eps and ours.max >= theirs.max and ours.tiny <= theirs.tiny
    return exact or rounds
