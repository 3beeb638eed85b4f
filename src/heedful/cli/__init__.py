"""The command line: one file per command. Nothing heavy is imported until a command runs."""

import sys
from typing import Any


def main() -> None:
    """Run a command. Bad input is one line on stderr and exit code 2, never a traceback."""
    try:
        from heedful.cli.app import COMMANDS, make_app
        from heedful.cli.guard import run_checked

        app = make_app([name for name in sys.argv[1:2] if name in COMMANDS])
    except KeyboardInterrupt:  # while it starts
        sys.exit(130)
    run_checked(app, _explain_usage)


def _explain_usage(error: Any) -> str:
    from heedful.cli.suggestions import explain_usage

    return explain_usage(error)
