"""`python -m heedful`, where the command itself is not on the path."""

from heedful.cli import main

if __name__ == "__main__":
    main()
