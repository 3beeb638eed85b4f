"""The command line: one file a verb. Nothing heavy is imported until a verb runs."""

import sys


def main() -> None:
    """Run a verb. Bad input is one line on stderr and exit code 2, never a traceback."""
    try:
        from heedful.cli.app import app
        from heedful.cli.guard import guarded
    except KeyboardInterrupt:  # while it starts
        sys.exit(130)
    guarded(app)
