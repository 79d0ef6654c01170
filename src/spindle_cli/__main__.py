"""`python -m spindle_cli` and the `spindle` command."""

from __future__ import annotations

import signal

from spindle_cli.process.lifetime import ending_at_once, open_standard_files


def main() -> None:
    """Run the command line."""
    open_standard_files()
    with ending_at_once(signal.SIGINT):
        from spindle_cli.cli.app import run

        run()


if __name__ == "__main__":
    main()
