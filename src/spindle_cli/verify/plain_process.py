"""The process that trains plainly (`verify/plain.py`), which lives to train a few steps:
`python -m spindle_cli.verify.plain_process REQUEST.json [--rounding | --operator-noise DRAW]`.

It looks for garbage rarely, from before torch is imported: of the small model of an example that took a sixth
of its time.
"""

from __future__ import annotations

from spindle_cli.process.lifetime import lasting_imports, look_for_garbage_rarely


def main() -> None:
    """Import what the training needs, and train."""
    look_for_garbage_rarely()
    with lasting_imports():
        from spindle_cli.verify import plain
    plain.main()


if __name__ == "__main__":
    main()
