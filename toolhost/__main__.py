"""`toolhost`, and `python -m toolhost`. Ctrl-C is understood from here on: what commands need loads within this."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script."""
    try:
        from toolhost import interrupts

        interrupts.take()
        from toolhost.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("toolhost: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
