"""The page docs/reference/faults.md, from what the tests hold true: `make reliability`."""

from __future__ import annotations

from pathlib import Path

from fault_scenarios import ALL

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "faults.md"
BEGIN = "<!-- made by `make reliability` from tests/reliability/fault_scenarios.py -->\n"
END = "<!-- end -->\n"


def table() -> str:
    """In Markdown, between its marks."""
    lines = ["| tested by | fault | what happens | exit code | what is kept |", "|---|---|---|---|---|"]
    for scenario in ALL:
        for row in scenario.rows:
            lines.append(
                f"| `{scenario.name}` | {row.fault} | {row.happens} | {scenario.code} | {row.kept} |"
            )
    return BEGIN + "\n" + "\n".join(lines) + "\n\n" + END


def page_with(new_table: str) -> str:
    """The page with this table in place of its own."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return before + new_table + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with(table()), encoding="utf-8")
