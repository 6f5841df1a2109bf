"""The command ``stolon``: ``python -m stolon serve``, for example."""

import signal
import sys

from ._native import run_command


def main() -> int:
    """Runs the command with the arguments of this process. Returns its exit status."""
    # Python would only take note of Ctrl-C, and run its handler after the command.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return run_command(["stolon", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
