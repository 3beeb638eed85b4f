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
HARMLESS = {
    "config-file",
    "disable-pip-version-check",
    "no-color",
    "progress-bar",
    "quiet",
    "retries",
    "verbose",
}


def variables(listing: str) -> dict[str, str] | None:
    """Of uv, for the lines of `pip config list`; None: there is a setting that uv does not know."""
    found: dict[str, str] = {}
    names = [line.partition("=")[0] for line in listing.splitlines()]
    if len(set(names)) < len(names):  # in several files, of which the listing tells no order
        return None
    for place in ("global", "install", ":env:"):  # the later ones apply
        for line in listing.splitlines():
            name, _, value = line.partition("=")
            section, _, setting = name.rpartition(".")
            if section not in ("global", "install", ":env:"):
                continue  # of another command
            if setting not in KNOWN and setting not in HARMLESS:
                return None
            if section == place and setting in KNOWN and ast.literal_eval(value):
                between = "," if setting == "find-links" else " "
                found[KNOWN[setting]] = between.join(str(ast.literal_eval(value)).split())
    return found


def uv_settings() -> Mapping[str, str] | None:
    """The environment of uv; None: pip is needed."""
    # Quiet, pip would list nothing.
    command = [sys.executable, "-m", "pip", "config", "list"]
    loud = {**os.environ, "PIP_QUIET": "0"}
    listed = subprocess.run(command, env=loud, capture_output=True, text=True, check=False)
    found = None if listed.returncode else variables(listed.stdout)
    if found is None:
        return None
    if importlib.util.find_spec("uv") is None:
        wanted = [*PIP, "install", "--no-compile", "-c", "constraints.txt", "uv"]
        if subprocess.run(wanted, capture_output=True, check=False).returncode:
            return None
    others = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    # As pip takes them: the best version of all indexes.
    own = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_CONFIG": "1"}
    return {**others, **own, **found}


def main() -> None:
    settings = uv_settings()
    if settings is not None:
        # In the environment's file system, where files are linked instead of copied.
        with tempfile.TemporaryDirectory(dir=sys.prefix) as cache:
            uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--cache-dir", cache]
            # An option replaces the variable of its name.
            files = [f"--constraint={path}" for path in settings.get("UV_CONSTRAINT", "").split()]
            command = [*uv, "--python", sys.executable, *files, *sys.argv[1:]]
            done = subprocess.run(command, env=settings, capture_output=True, check=False)
            if not done.returncode:
                return
    command = [*PIP, "install", "--no-compile", *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
