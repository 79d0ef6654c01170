"""Which tensor of which file each parameter and buffer of a workload starts from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from spindle_cli.errors import InputError
from spindle_cli.files.parsing import shown
from spindle_cli.workload.initial.holders import Holders
from spindle_cli.workload.initial.misfits import Misfits, refusal
from spindle_cli.workload.initial.own import OwnValues, fingerprint
from spindle_cli.workload.initial.tensor_files import Ranges, TensorPlace, read_parts, tensors_in
from spindle_cli.workload.names.init_from import InitFrom, InitSource
from spindle_cli.workload.names.patterns import Pattern
from spindle_cli.workload.types import Workload


@dataclass(frozen=True)
class InitialValues:
    """Where the initial values of a workload are.

    Attributes:
        places: canonical name of a parameter or buffer -> the tensor that it starts from.
        sources: of each of these the index of its source.
        dtypes: those that the workload's own build has given them.
        new: what keeps the values of the build, in the workload's order.
        paths: of the sources; `given`: as the workload file has them.
    """

    places: Mapping[str, TensorPlace] = field(default_factory=dict)
    sources: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    new: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()
    given: tuple[str, ...] = ()

    def fill(self, parts: Mapping[str, tuple[str, Tensor, Ranges]]) -> None:
        """Put initial values into parts of parameters and buffers; of what has none nothing is changed.

        Args:
            parts: any key -> canonical name, the part's memory, and which [first, last) of each dimension it
                is; None: all of it.

        Raises:
            InputError: a file cannot be read.
        """
        wanted = {
            key: (self.places[name], ranges)
            for key, (name, _, ranges) in parts.items()
            if name in self.places
        }
        with torch.no_grad():
            for key, values in read_parts(wanted):
                name, target, _ = parts[key]
                target.copy_(values.to(self.dtypes[name]))  # a run may compute in other numbers than build's

    def fill_own(self, own: Mapping[str, tuple[str, OwnValues]]) -> dict[str, OwnValues]:
        """Fill parts of which only some elements are there, and give what then is there of each, where
        initial values are in a file, of which one part at a time is read.

        Args:
            own: any key -> canonical name, and what there is.

        Raises:
            InputError: a file cannot be read.
        """
        wanted = {
            key: (self.places[name], values.part.ranges)
            for key, (name, values) in own.items()
            if name in self.places
        }
        filled = {}
        for key, box in read_parts(wanted):
            name, values = own[key]
            values.values.copy_(values.part.in_box(box.to(self.dtypes[name])))
            filled[key] = replace(values, fingerprint=fingerprint(box))
        return filled

    def lines(self) -> Iterator[str]:
        """What is taken from where, for people."""
        counts = Counter(self.sources.values())
        for index, path in enumerate(self.paths):
            yield f"initial values of {_counted(counts[index])} from {path}"
        if self.new:
            yield f"new, with the values of build: {_counted(len(self.new))}"


def _counted(count: int) -> str:
    return "1 parameter or buffer" if count == 1 else f"{count} parameters and buffers"


def find_initial(init_from: InitFrom, workload: Workload) -> InitialValues:
    """Match the tensors of all sources with a workload; only the files' headers are read.

    Raises:
        InputError: a source cannot be read; or names, shapes or dtypes do not fit: all that do not, at once.
    """
    if not init_from.sources:
        return InitialValues()
    holders, misfits = Holders.of(workload), Misfits()
    found: dict[str, tuple[int, TensorPlace]] = {}
    for index, source in enumerate(init_from.sources):
        there = tensors_in(init_from.path(index), init_from.place(index))
        taken = _taken(source, there, init_from.place(index))
        for name, target in _renamed(source, taken, init_from.place(index)).items():
            known = None if target is None else holders.canonical.get(target)
            if known is None:
                misfits.left_over.append((index, name, target, there[name].shape))
            elif known in found:
                misfits.twice.append((known, (found[known][0], found[known][1].name), (index, name)))
            else:
                found[known] = index, there[name]
                _require_fit(misfits, known, holders.tensors[known], there[name], source)
    new = tuple(name for name in holders.tensors if name not in found)
    allowed, names = _may_be_missing(init_from, holders), holders.names
    misfits.missing.extend(
        (name, tuple(holders.tensors[name].shape)) for name in new if not any(map(allowed, names[name]))
    )
    if misfits:
        places = {name: place for name, (_, place) in found.items()}
        raise refusal(misfits, init_from, holders, places)
    return InitialValues(
        {name: place for name, (_, place) in found.items()},
        {name: index for name, (index, _) in found.items()},
        {name: holders.tensors[name].dtype for name in found},
        new,
        tuple(init_from.path(index) for index in range(len(init_from.sources))),
        tuple(source.path for source in init_from.sources),
    )


def fill_whole(initial: InitialValues, workload: Workload, *, where: Callable[[Tensor], bool]) -> None:
    """Put initial values into those parameters and buffers of a workload that `where` chooses.

    Raises:
        InputError: a file cannot be read.
    """
    tensors = Holders.of(workload).tensors
    initial.fill({name: (name, tensor, None) for name, tensor in tensors.items() if where(tensor)})


def _taken(source: InitSource, names: Mapping[str, TensorPlace], place: str) -> list[str]:
    """The names in a file that are not left out.

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
        if (only is None or any(each.matches(name) for each in only))
        and not any(each.matches(name) for each in skip)
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
