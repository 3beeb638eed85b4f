"""The wheel: every file of the package, and the version of the code."""

import shlex
import shutil
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import heedful

ROOT = Path(__file__).resolve().parents[1]


def test_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    """Built offline, from a copy: a build leaves folders in the source tree."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    folder = source / "src"
    shutil.copytree(ROOT / "src", folder, ignore=ignored)
    expected = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = (line for line in readme.splitlines() if line.startswith("pip wheel"))
    build, install = line.split(" && ")
    offline = "--quiet --no-build-isolation --no-index"
    _pip(f"{build} {offline}", source)
    _pip(f"{install} {offline} --no-deps --target installed", source)
    (path,) = source.glob("dist/*.whl")
    assert (source / "installed" / "heedful" / "py.typed").is_file()
    with ZipFile(path) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        fields = message_from_bytes(wheel.read(metadata))
    assert files == expected
    assert fields["Version"] == heedful.__version__
    assert fields["Author"] == "The heedful authors"


def _pip(command: str, folder: Path) -> None:
    """Run a line of the README by this interpreter's pip."""
    line = command.replace("pip ", f"{shlex.quote(sys.executable)} -m pip ", 1)
    done = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
