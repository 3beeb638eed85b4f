"""The command line: one file a verb. Nothing heavy is imported until a verb runs."""

import sys


def main() -> None:
    """Run a verb. Bad input is one line on stderr and exit code 2, never a traceback."""
    try:
        from heedful.cli.app import VERBS, make_app
        from heedful.cli.guard import guarded

        named = sys.argv[1:2]
        app = make_app(named if set(named) & set(VERBS) else VERBS)
    except KeyboardInterrupt:  # while it starts
        sys.exit(130)
    guarded(app)
