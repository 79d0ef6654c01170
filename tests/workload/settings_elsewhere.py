"""Settings that the models of other files read and move."""

from __future__ import annotations

SCALE = 1.0
BOX = {"scale": 1.0}


class Settings:
    scale = 1.0


def move() -> None:
    global SCALE
    SCALE += 1.0
