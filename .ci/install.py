"""Installs into the environment that runs it, with pip's arguments: by uv, else by pip.

uv takes a quarter of the time. It reads none of pip's settings, so that those of `KNOWN` are handed
to it; beside others, where pip finds no uv, and where uv fails, pip does the same again.
"""

import ast
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping

PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
# Settings of pip with an environment variable of uv, and those without an effect on what is taken.
KNOWN = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
HARMLESS = {"disable-pip-version-check", "no-color", "progress-bar", "quiet", "retries", "verbose"}


def variables(listing: str) -> dict[str, str] | None:
    """Of uv, for the lines of `pip config list`; None: there is a setting that uv does not know."""
    found: dict[str, str] = {}
    for place in ("global", "install", ":env:"):  # the later ones apply
        for line in listing.splitlines():
            name, _, value = line.partition("=")
            section, _, setting = name.rpartition(".")
            if section not in ("global", "install", ":env:"):
                continue  # of another command
            if setting not in KNOWN and setting not in HARMLESS:
                return None
            if section == place and setting in KNOWN:
                between = "," if setting == "find-links" else " "
                found[KNOWN[setting]] = between.join(str(ast.literal_eval(value)).split())
    return found


def uv_settings() -> Mapping[str, str] | None:
    """The environment of uv; None: pip is needed."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    found = None if listed.returncode else variables(listed.stdout)
    if found is None:
        return None
    if importlib.util.find_spec("uv") is None:
        wanted = [*PIP, "install", "--no-compile", "-c", "constraints.txt", "uv"]
        if subprocess.run(wanted, capture_output=True, check=False).returncode:
            return None
    # As pip takes them: the best version of all indexes.
    return {**os.environ, "UV_INDEX_STRATEGY": "unsafe-best-match", **found}


def main() -> None:
    settings = uv_settings()
    if settings is not None:
        # In the environment's file system, where files are linked instead of copied.
        with tempfile.TemporaryDirectory(dir=sys.prefix) as cache:
            uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--cache-dir", cache]
            command = [*uv, "--python", sys.executable, *sys.argv[1:]]
            done = subprocess.run(command, env=settings, capture_output=True, check=False)
            if not done.returncode:
                return
    command = [*PIP, "install", "--no-compile", *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
