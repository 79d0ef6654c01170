"""`python -m spindle_cli` and the `spindle` command."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from spindle_cli.cli.app import run

    run()


if __name__ == "__main__":
    main()
