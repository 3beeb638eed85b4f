"""The virtual environments of the race's peers: one for each, with pinned versions.

python benchmarks/race_environments.py --environments runs/race/environments joeynmt eole

What pip finds is up to its own settings (index, find-links). On Linux the CPU builds of torch are
taken, which have an index of their own: name it in PIP_EXTRA_INDEX_URL, or take the default builds,
which bring gigabytes of CUDA along, by --torch-build ''. A peer without a package is cloned; where
git shall find a copy of it is up to git's own settings (`url.COPY.insteadOf`).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ENVIRONMENTS = Path("runs/race/environments")
TORCH = "2.13.0"
BUILD = "+cpu" if sys.platform == "linux" else ""


class Environment(NamedTuple):
    """The packages of a peer.

    Args:
        package: the peer itself, with its version; of a repository its name and commit.
        torch: the version of torch that it supports.
        more: packages that it imports and does not require.
        less: packages that are required for other uses only, and are removed.
        check: a statement that imports what the race runs.
        repository: the address of a peer that has no package, which is cloned into `SOURCE`.
    """

    package: str
    check: str
    torch: str = TORCH
    more: tuple[str, ...] = ()
    less: tuple[str, ...] = ()
    repository: str = ""


SOURCE = "source"  # folder of a cloned peer in its environment
KNOWN = {
    "joeynmt": Environment(
        "joeynmt==2.3.0",
        "import joeynmt.training",
        # It calls SentencePieceProcessor.SetVocabulary, which later releases do not have.
        more=("importlib_metadata==10.2.0", "sentencepiece==0.2.0"),
    ),
    "eole": Environment("eole==0.6.4", "import eole.bin.main", more=("aiohttp==3.14.5",)),
    # The last releases of these three; each has an upper limit of torch or of Python.
    "opennmt-py": Environment("OpenNMT-py==3.5.1", "import onmt.bin.train", torch="2.2.2"),
    "sockeye": Environment("sockeye==3.1.34", "import sockeye.train", torch="1.13.1"),
    "fairseq": Environment("fairseq==0.12.2", "import fairseq_cli.train"),
    "nanogpt": Environment(
        "nanoGPT==3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        "import numpy, torch",
        more=("numpy",),
        repository="https://github.com/karpathy/nanoGPT",
    ),
    # Its data module for files of text needs litdata; torch.compile, which it calls, a compiler.
    "litgpt": Environment(
        "litgpt==0.5.13",
        "import litgpt.pretrain, litdata",
        more=("litdata==0.2.76",),
        # Of litdata, for images; a build that does not fit that of torch fails when it is imported.
        less=("torchvision",),
    ),
    "trainer": Environment(
        "transformers==5.23.0", "from transformers import Trainer", more=("accelerate==1.15.0",)
    ),
}


def python_of(folder: Path, name: str) -> Path:
    """The interpreter of an environment; not resolved, since it is a link to another one."""
    return Path(*folder.absolute().parts, name, "bin", "python")


def install(folder: Path, name: str, build: str = BUILD) -> dict[str, str]:
    """Install a peer, unless that was done before; returns `package`, and `versions` or `error`.

    Args:
        build: what follows torch's version.
    """
    record = folder / f"{name}.json"
    if record.is_file():
        found: dict[str, str] = json.loads(record.read_text(encoding="utf-8"))
        if "error" not in found:
            return found
    environment, python = KNOWN[name], python_of(folder, name)
    print(f"installing {environment.package} into {python.parents[1]}", flush=True)
    result = {"package": environment.package}
    error = _install(environment, python, build)
    if error:
        result["error"] = error
    else:
        result["versions"] = _versions(python, environment)
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{name}: {error or result['versions']}", flush=True)
    return result


def installed(folder: Path) -> dict[str, dict[str, str]]:
    """The records of all peers that were tried, by name."""
    paths = sorted(folder.glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def _install(environment: Environment, python: Path, build: str) -> str:
    """The last line of the error; empty if it is installed and can be imported."""
    if not python.is_file():
        made = _call([sys.executable, "-m", "venv", str(python.parents[1])])
        if made.returncode:
            return last_line(made.stdout)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    torch = f"torch=={environment.torch}{build}"
    package = [] if environment.repository else [environment.package]
    done = _call([*pip, torch, *package, *environment.more])
    if done.returncode:
        return f"with {torch}, which it supports: {last_line(done.stdout)}"
    if environment.less:
        _call([str(python), "-m", "pip", "uninstall", "--yes", *environment.less])
    error = _clone(environment, python.parents[1] / SOURCE) if environment.repository else ""
    if error:
        return error
    checked = _call([str(python), "-c", environment.check])
    return last_line(checked.stdout) if checked.returncode else ""


def _clone(environment: Environment, folder: Path) -> str:
    """The last line of the error; empty if the commit is in the folder."""
    if not (folder / ".git").is_dir():
        cloned = _call(["git", "clone", "--quiet", environment.repository, str(folder)])
        if cloned.returncode:
            return last_line(cloned.stdout)
    commit = environment.package.partition("==")[2]
    taken = _call(["git", "-C", str(folder), "checkout", "--quiet", commit])
    return last_line(taken.stdout) if taken.returncode else ""


def _versions(python: Path, environment: Environment) -> str:
    name, _, version = environment.package.partition("==")
    names = ["torch"] if environment.repository else [name, "torch"]
    code = (
        "import sys, platform; from importlib.metadata import version; "
        "print('python', platform.python_version(), *[f', {n} {version(n)}' for n in sys.argv[1:]],"
        " sep=' ')"
    )
    found = _call([str(python), "-c", code, *names]).stdout.strip().replace(" ,", ",")
    return f"{found}, {name} {version[:12]}" if environment.repository else found


def _call(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def last_line(output: str) -> str:
    """The line of an output that says why it failed: pip's cause, or the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    causes = [
        line.removeprefix("ERROR: ")
        for line in lines
        if line.startswith(("ERROR: Cannot install", "ERROR: Could not find", "ERROR: No matching"))
    ]
    return (causes or lines or ["no output"])[-1]


def main() -> None:
    """Install the named peers; without names, all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="their folder")
    parser.add_argument("--torch-build", default=BUILD, help="after torch's version; +cpu, or ''")
    parser.add_argument("names", nargs="*", choices=[*KNOWN, []], help="default: all")
    arguments = parser.parse_args()
    for name in arguments.names or KNOWN:
        install(arguments.environments.absolute(), name, arguments.torch_build)


if __name__ == "__main__":
    main()
