"""`python -m spindle_cli` and the `spindle` command."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line."""
    try:
        from spindle_cli.cli.app import run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    run()


if __name__ == "__main__":
    main()
