"""A command under the clock of a race: its output with times, its peak memory, its checkpoints.

Every system is started, watched and stopped by the same function, and one at a time.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

try:
    import psutil
except ImportError:  # then the peak is that of the largest single process
    psutil = None

POLL = 0.5  # seconds between two looks at memory and checkpoints
GRACE = (60.0, 20.0)  # seconds after SIGINT until SIGTERM, and after SIGTERM until SIGKILL
_THREADS = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB", "RAYON", "BLIS")
# Functions that list complete checkpoints: those of a tool's own folder, by name.
Checkpoints = Callable[[], "dict[str, list[Path]]"]


@dataclass
class Clock:
    """The clock of one system, which stands still while `run` is not running.

    Attributes:
        limit: seconds of the race.
        used: seconds of the commands that have run, preparation included.
        peak_bytes: largest resident memory of a command with its children.
        snapshots: seconds at which each checkpoint was complete, by the name of its snapshot.
    """

    limit: float
    threads: int
    log: Path
    used: float = 0.0
    peak_bytes: int = 0
    snapshots: dict[str, float] = field(default_factory=dict)

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        checkpoints: Checkpoints | None = None,
        into: Path | None = None,
        grace: Sequence[float] = GRACE,
    ) -> int | None:
        """Run a command until it ends or the time is over.

        Its lines are appended to the log, each behind the seconds of the race. A checkpoint that
        appears before the end of the time is linked into a folder in `into`.

        Returns:
            the exit status; None if it was stopped by the clock.
        """
        began, before = time.monotonic(), self.used
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{before:.1f}\t$ {' '.join(command)}\n")
            process = start(command, cwd, self.threads)
            reader = threading.Thread(target=_copy_lines, args=(process, log, began, before))
            reader.start()
            stopped = False
            try:
                while process.poll() is None:
                    self.used = before + time.monotonic() - began
                    if self.used >= self.limit:
                        stopped = True
                        break
                    self._look(process, checkpoints, into)
                    time.sleep(POLL)
            finally:
                stop(process, grace)
                reader.join()
            self.used = min(before + time.monotonic() - began, self.limit)
            if not stopped:
                self._look(process, checkpoints, into)
        return None if stopped else process.returncode

    def _look(
        self, process: "subprocess.Popen[str]", checkpoints: Checkpoints | None, into: Path | None
    ) -> None:
        self.peak_bytes = max(self.peak_bytes, resident_bytes(process.pid))
        if checkpoints is None or into is None:
            return
        for name, files in checkpoints().items():
            if name not in self.snapshots and keep(files, into / name):
                self.snapshots[name] = self.used


def start(
    command: Sequence[str], cwd: Path, threads: int, through: tuple[Path, Path] | None = None
) -> "subprocess.Popen[str]":
    """Start a command in a process group of its own, with the same number of threads for all.

    Its output is in the pipe `stdout`. With `through` (a source and an output file) it reads the
    one and writes the other, and what it says on standard error is in the pipe `stderr`.
    """
    settings = {f"{name}_NUM_THREADS": str(threads) for name in _THREADS}
    settings |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    settings |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    # An empty cache for every system: nothing is prepared by an earlier race.
    caches = ("XDG_CACHE_HOME", "HEEDFUL_CACHE", "TORCHINDUCTOR_CACHE_DIR")
    settings |= {name: str(cwd / "cache") for name in caches}
    with ExitStack() as files:
        source = files.enter_context(open(through[0] if through else os.devnull, "rb"))
        output = files.enter_context(open(through[1], "wb")) if through else subprocess.PIPE
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | settings,
            stdin=source,
            stdout=output,
            stderr=subprocess.PIPE if through else subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )


def stop(process: "subprocess.Popen[str]", grace: Sequence[float] = GRACE) -> None:
    """Stop a command and its children: interrupt, then terminate, then kill."""
    for number, seconds in zip((signal.SIGINT, signal.SIGTERM), grace, strict=True):
        if process.poll() is not None:
            break
        _signal(process, number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    _signal(process, signal.SIGKILL)  # children that have outlived it, too
    process.wait()


def _signal(process: "subprocess.Popen[str]", number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _copy_lines(process: "subprocess.Popen[str]", log: TextIO, began: float, before: float) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        seconds = before + time.monotonic() - began
        log.write(f"{seconds:.1f}\t{line.rstrip()}\n")
        log.flush()


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its children; of the largest ended child without psutil."""
    if psutil is None:
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024)
    total = 0
    try:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            try:
                total += one.memory_info().rss
            except psutil.Error:
                continue
    except psutil.Error:
        pass
    return total


def keep(files: Iterable[Path], folder: Path) -> bool:
    """Link the files of a checkpoint into a new folder; False if one is gone meanwhile.

    A link stays when the tool deletes or replaces its file.
    """
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for path in files:
            try:
                os.link(path, partial / path.name)
            except FileNotFoundError:
                raise
            except OSError:  # a file system without links
                shutil.copy2(path, partial / path.name)
    except FileNotFoundError:
        shutil.rmtree(partial)
        return False
    partial.rename(folder)
    return True


def timed_lines(log: Path) -> list[tuple[float, str]]:
    """The seconds and text of the lines of a log."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    pairs = (line.partition("\t") for line in lines)
    return [(float(seconds), text) for seconds, _, text in pairs if text]
