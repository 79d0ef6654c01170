"""How MetaOps and tasks are told apart in a picture: a letter each without colour, a colour for each task."""

from __future__ import annotations

import string
from dataclasses import dataclass

from spindle_cli.plan.types import Plan

LETTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits

# Background colours of the 256-colour palette that black text is readable on, neighbours far apart.
COLOURS = (
    "sky_blue1",
    "light_salmon1",
    "pale_green1",
    "plum1",
    "khaki1",
    "turquoise2",
    "light_coral",
    "dark_olive_green2",
    "medium_purple1",
    "orange1",
    "grey70",
    "aquamarine1",
)


@dataclass(frozen=True)
class Symbols:
    """Letter of each MetaOp, short name of each MetaOp, colour of each task.

    Where there are more MetaOps than letters, or tasks than colours, they are used again in the same order.
    """

    letter: dict[str, str]
    short_name: dict[str, str]
    colour: dict[str, str]

    @classmethod
    def of(cls, plan: Plan) -> Symbols:
        """Symbols in the order of the plan's MetaOps."""
        tasks = dict.fromkeys(metaop.task for metaop in plan.metaops)
        return cls(
            letter={metaop.name: LETTERS[i % len(LETTERS)] for i, metaop in enumerate(plan.metaops)},
            short_name={metaop.name: metaop.name.removeprefix(f"{metaop.task}/") for metaop in plan.metaops},
            colour={task: COLOURS[i % len(COLOURS)] for i, task in enumerate(tasks)},
        )
