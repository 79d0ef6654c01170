"""Conversions between what is stored (seconds, bytes, bytes per second) and what people read.

GB is 10**9 bytes and GiB is 2**30 bytes, always.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9
TERA = 10**12
US = 1e-6
MS = 1e-3
HOUR_S = 3600
J_PER_KWH = 3.6e6


def format_seconds(seconds: float) -> str:
    """A duration for people: '12.3 us', '4.56 ms', '1.23 s', '2 min 03 s', '5 h 07 min', '2 d 03 h'."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds == 0:
        return "0 s"
    if seconds < MS:
        return f"{seconds / US:.3g} us"
    if seconds < 1:
        return f"{seconds / MS:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"


def format_bytes(count: float) -> str:
    """A size for people, in binary units: '512 B', '1.5 KiB', '3.2 GiB'."""
    if count < 0:
        return "-" + format_bytes(-count)
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def format_joules(joules: float) -> str:
    """Energy for people: '512 mJ', '1.5 J', '3.2 kJ', '7.4 MJ'."""
    return _with_prefix(joules, (("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3), ("u", 1e-6)), "J")


def format_grams(grams: float) -> str:
    """A weight for people: '12 mg', '1.5 g', '3.2 kg'."""
    return _with_prefix(grams, (("k", 1e3), ("", 1.0), ("m", 1e-3), ("u", 1e-6)), "g")


def _with_prefix(value: float, prefixes: Sequence[tuple[str, float]], unit: str) -> str:
    """Three digits, and all before the dot, by the largest prefix (they descend) that leaves at least 1."""
    if value == 0:
        return f"0 {unit}"
    # What rounds to 1000 of a unit is 1 of the next.
    prefix, size = next((entry for entry in prefixes if value >= entry[1] * 0.9995), prefixes[-1])
    scaled = value / size
    return f"{scaled:.3g} {prefix}{unit}" if scaled < 999.5 else f"{scaled:,.0f} {prefix}{unit}"


def parse_bytes(text: str) -> int | None:
    """A size as people write it: '5GB', '500 MB', '1.5GiB', '4096'; None where it is none, or below 1."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]i?)?[bB]?\s*", text)
    if match is None:
        return None
    unit = (match[2] or "").upper()
    base = 1024 if unit.endswith("I") else 1000
    count = int(float(match[1]) * base ** " KMGT".index(unit[:1] or " "))
    return count if count >= 1 else None


def parse_counts(text: str) -> tuple[int, ...] | None:
    """Positive whole numbers below 10^9 with commas between: '8, 16'; None where any is none."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,8}", part) for part in parts):
        return None
    return tuple(map(int, parts))


def counted(count: int, noun: str) -> str:
    """A number of things: '1 device', '1,024 devices'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
