"""The command line: one file a verb. Nothing heavy is imported until a verb runs."""

from heedful.cli.app import main

__all__ = ["main"]
