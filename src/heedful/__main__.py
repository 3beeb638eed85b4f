"""`python -m heedful`, where the command itself is not on the path."""

import os
import sys
from pathlib import Path

# Python puts the current folder first; a file of the user in it could hide a package.
if sys.path[0] == os.getcwd() != str(Path(__file__).resolve().parents[1]):
    del sys.path[0]

from heedful.cli import main

if __name__ == "__main__":
    main()
