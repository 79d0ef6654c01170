"""Short, unique, stable names for the MetaOps of a task and for the parameters that they share."""

from __future__ import annotations

from collections.abc import Sequence


def component_path(targets: Sequence[str | None]) -> str:
    """The common dotted path of a run of operators, without their numbers: 'vision.blocks' for
    'vision.blocks.3', ...
    """
    if targets[0] is None:
        return "loss"
    paths = [str(target).split(".") for target in targets]
    common = _common_prefix(paths)
    while len(common) > 1 and common[-1].isdigit():
        common = common[:-1]
    return ".".join(common) or paths[0][0]


def _common_prefix(paths: list[list[str]]) -> list[str]:
    prefix: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        prefix.append(parts[0])
    return prefix


def short_names(paths: Sequence[str]) -> list[str]:
    """A short name for each component path: the fewest leading parts that tell it from the others.

    'model.vision.blocks' and 'model.text.blocks' become 'vision' and 'text'. Equal paths get '-2', '-3', ...
    in order.
    """
    split = [path.split(".") for path in paths]
    shared = 0
    distinct = {tuple(parts) for parts in split}
    if len(distinct) > 1:
        longest = min(len(parts) for parts in distinct) - 1
        while shared < longest and len({parts[shared] for parts in distinct}) == 1:
            shared += 1
    short = {parts: _shortest(parts, distinct, shared) for parts in distinct}
    names: list[str] = []
    for parts in split:
        name = short[tuple(parts)]
        count = sum(earlier == parts for earlier in split[: len(names)])
        names.append(name if count == 0 else f"{name}-{count + 1}")
    return _unique(names)


def _shortest(parts: tuple[str, ...], others: set[tuple[str, ...]], shared: int) -> str:
    for length in range(shared + 1, len(parts)):
        head = parts[:length]
        if all(peer == parts or peer[:length] != head for peer in others):
            return ".".join(parts[shared:length])
    return ".".join(parts[shared:])


def _unique(names: list[str]) -> list[str]:
    """Put a number behind names that are taken already."""
    seen: set[str] = set()
    result = []
    for name in names:
        candidate, count = name, 2
        while candidate in seen:
            candidate, count = f"{name}-{count}", count + 1
        seen.add(candidate)
        result.append(candidate)
    return result
