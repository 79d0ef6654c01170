"""The page docs/reference/pairs.md, from what `test_pairs.py` holds true: `make test-pairs`."""

from __future__ import annotations

from pathlib import Path

from pair_cases import FEATURES, NOT_TOGETHER, PAIRS

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "pairs.md"
_HEAD = """# What a plan can say, each with each

Made by `make test-pairs`, which trains a plan for every pair in float64, on CPUs over gloo, and compares it
with plain PyTorch: each with a number trains the same model. A letter says why `spindle check`, or whoever
reads the workload file, refuses both. Without either, they say otherwise of one thing: no slice has both.
"""


def page() -> str:
    """The page in Markdown."""
    names = list(FEATURES)
    letters = {pair: chr(ord("a") + number) for number, pair in enumerate(NOT_TOGETHER)}
    rows = [f"| | | {' | '.join(str(number) for number in range(1, len(names)))} |"]
    rows.append("|---|---|" + "---|" * (len(names) - 1))
    for number, name in enumerate(names):
        cells = [_cell(name, other, letters) for other in names[:number]]
        cells += [""] * (len(names) - 1 - len(cells))
        rows.append(f"| {number + 1} | {FEATURES[name].is_there} | {' | '.join(cells)} |")
    why = [f"* {letters[pair]}: {refusal.why}." for pair, refusal in NOT_TOGETHER.items()]
    return "\n".join([_HEAD, *rows, "", *why, ""])


def _cell(name: str, other: str, letters: dict[frozenset[str], str]) -> str:
    pair = (other, name)
    if pair not in PAIRS:
        return ""
    return letters.get(frozenset(pair), str(list(FEATURES).index(other) + 1))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
