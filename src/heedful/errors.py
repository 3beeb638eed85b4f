"""What users see when something of theirs is wrong: one line, then exit code 2."""


class UserError(ValueError):
    """Bad input. The message is one line: what is wrong, where, and what to do.

    The command line prints it without a traceback and exits with code 2. It is a `ValueError`,
    so that a program which calls the library may catch it as one.
    """
