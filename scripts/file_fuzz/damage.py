"""Damage to the text of a whole file: to its bytes, to its words, to its tree of values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

# What stands where something else is expected. Text that a parser may take for more than a text, too.
NUMBERS = (
    *("-1", "0", "1", "-0.0", "0.5", "1e999", "-1e999", "1e308", "5e-324", ".nan", "NaN", ".inf", "1_000"),
    *("0x10", "0o7", "1e3", "9007199254740993", "1" + "0" * 12, "1" + "0" * 30, "9" * 5000, "true", "null"),
    *("~", "12:30:45"),
)
TEXTS = (
    *("", " ", "-", "x" * 300, "x" * 70_000, "\x1b[31mred\x1b[0m", "\x00", "\u202eabc", "\ud800", "../../x"),
    *("/dev/null", "/", "a/b", "a,b", "0-7", "0-1000000", "7-0", "0-", "-3", "1,2,,3", "é" * 10, "<script>"),
    *("{}", "spindle.plan/1", "spindle.plan/2", "spindle.profile/99", "NaN", "sha256:0", "${HOME}", "%s%n"),
    "2026-01-01",
)
SNIPPETS = (
    *("!!python/object/apply:os.getpid []\n", "!!binary aGk=", "!!bool maybe", "!!timestamp 2026-99-99"),
    *("!!int x", "&a [*a]", "*nothing", "? [1, 2]\n: 3\n", "<<: *x", "---\n", "...\n", "%YAML 9.9\n", "\t"),
    *("\r", "\x00", "\x85", "\u2028", "\ufeff", "[" * 2000, "{a: " * 500, "- " * 5000, "#", '"', "'", "|"),
    *(">", "{", "}", "]", ":", ","),
)
_NESTED = 120
_LENGTH_BYTES, _IN_HEADER = 8, 0.7  # of safetensors files: of the header's length; how often it is damaged


def damaged_file(path: Path, random: Random) -> bytes:
    """The bytes of a file that is damaged; of a safetensors file mostly in what it says of its tensors."""
    content = path.read_bytes()
    if path.suffix == ".safetensors" and random.random() < _IN_HEADER:
        length = int.from_bytes(content[:_LENGTH_BYTES], "little")
        begin, end = _LENGTH_BYTES, _LENGTH_BYTES + length
        header = damaged(content[begin:end], random, is_json=True)
        return len(header).to_bytes(_LENGTH_BYTES, "little") + header + content[end:]
    return damaged(content, random, is_json=path.suffix in (".json", ".jsonl"))


def damaged(text: bytes, random: Random, *, is_json: bool) -> bytes:
    """The file's bytes with one to three places damaged."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        how = random.choice((_in_bytes, _in_words, _in_tree, _in_tree, _in_tree))
        text = how(text, random, is_json)
    return text


def _in_bytes(text: bytes, random: Random, is_json: bool) -> bytes:
    at, end = sorted((random.randint(0, len(text)), random.randint(0, len(text))))
    noise = random.randbytes(random.choice((1, 1, 4, 64)))
    return random.choice(
        (
            text[:at],
            text[:at] + noise + text[at:],
            text[:at] + noise + text[at + len(noise) :],
            text[:at] + text[min(end, at + 200) :],
            text[:at] + text[at : at + 500] * 2 + text[at + 500 :],
            text + text,
            noise,
            b"",
        )
    )


def _in_words(text: bytes, random: Random, is_json: bool) -> bytes:
    """Put a snippet, a number or a text of ours in the place of a word, or before it."""
    words = text.split(b" ")
    at = random.randrange(len(words))
    put = random.choice((*SNIPPETS, *NUMBERS, *TEXTS)).encode("utf-8", "surrogatepass")
    words[at] = put if random.random() < 0.5 else put + words[at]
    return b" ".join(words)


def _in_tree(text: bytes, random: Random, is_json: bool) -> bytes:
    """Change one value or key of the file's data; the file as it is where that cannot be read."""
    try:
        data = json.loads(text) if is_json else yaml.safe_load(text)
        places = list(_places(data))
        if not places:
            return text
        holder, key = random.choice(places)
        random.choice(_CHANGES)(holder, key, data, random)
        written = json.dumps(data) if is_json else yaml.safe_dump(data, sort_keys=False)
    except (ValueError, yaml.YAMLError, RecursionError, TypeError, AttributeError, LookupError):
        return text
    return written.encode("utf-8", "surrogatepass")


def _places(data: Any) -> Any:
    """Every (list or dict, index or key) in the data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(items):
        yield data, key
        yield from _places(value)


def _new_value(random: Random) -> Any:
    numbers: tuple[Any, ...] = (
        -1,
        0,
        1,
        2,
        3,
        1.5,
        1e308,
        1e-308,
        -0.0,
        10**12,
        10**30,
        2**63,
        float("nan"),
        True,
    )
    others: tuple[Any, ...] = (None, [], {}, [[]], {"a": 1}, [1, 2, 3], float("inf"))
    return random.choice((random.choice(numbers), random.choice(TEXTS), random.choice(others)))


def _replace(holder: Any, key: Any, data: Any, random: Random) -> None:
    holder[key] = _new_value(random)


def _scale(holder: Any, key: Any, data: Any, random: Random) -> None:
    if isinstance(holder[key], int | float):
        holder[key] = holder[key] * random.choice((0, -1, 2, 0.5, 3, 1e-12, 1e12)) + random.choice(
            (0, 0, 1, -1)
        )


def _remove(holder: Any, key: Any, data: Any, random: Random) -> None:
    del holder[key]


def _repeat(holder: Any, key: Any, data: Any, random: Random) -> None:
    if isinstance(holder, list):
        holder[key:key] = [holder[key]] * random.choice((1, 1, 50))
    else:
        holder[random.choice(TEXTS)] = holder[key]


def _exchange(holder: Any, key: Any, data: Any, random: Random) -> None:
    other, at = random.choice(list(_places(data)))
    other[at], holder[key] = holder[key], other[at]


def _nest(holder: Any, key: Any, data: Any, random: Random) -> None:
    for _ in range(random.choice((1, 2, _NESTED))):
        holder[key] = random.choice(([holder[key]], {"x": holder[key]}))


_CHANGES: tuple[Callable[[Any, Any, Any, Random], None], ...] = (
    _replace, _replace, _replace, _scale, _scale, _remove, _repeat, _exchange, _nest,
)  # fmt: skip
