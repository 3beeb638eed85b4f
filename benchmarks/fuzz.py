"""Wrong and hostile input over every verb and every kind of file, and what comes of each.

Each input is a command (or a call of the library) with a folder and streams of its own. Some run in
turn in each of many processes that are forked from one that has imported torch, with limits and,
for the superuser, the rights of nobody; those that are ended from outside have each a process of
their own. Judged are the exit code, what is printed, the time, and every file that was written. The
same seed gives the same inputs.
"""

import codecs
import gc
import json
import os
import random
import resource
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import hostile
from common import argument_parser, command_line, table, write_results

SECONDS = 20  # of work that a command may take; it is stopped after three times as long
LINES = 3  # that an error may have
MEMORY = 6 << 30  # address space of a command, on top of what torch's libraries take
NOBODY = 65534
BATCH = 25  # cases that a process runs in turn
SILENT = ("no stderr", "nothing open")
FAULTS = (
    "traceback",
    "hang",
    "killed",
    "other code",
    "long or no error",
    "outside",
    "half-written",
)


PAGE = f"""
Commands, and calls of the library, with wrong words and values, damaged, foreign and exchanged
files, closed and broken streams, and signals; each in a folder of its own. Allowed are the exit
codes 0 and 2 (of verify also 1, of a signal its own); with 2 goes an error of at most
{LINES} lines.

* traceback: one was printed. killed: the process ended without an exit code.
* hang: {SECONDS} seconds of work or more.
* outside: something was written, or gone, that was not asked for.
* half-written: something was left of what a refused or killed command had begun.

Inputs run in the process of one command after another, up to {BATCH}, forked from one that has
imported torch, under limits of memory and of file sizes and without the rights of the superuser.
Those that are ended by a signal, or whose reader leaves, have each a process of their own. While it
is tried, `optimize` measures few texts, once, and compiles nothing.
""".strip()


@dataclass(frozen=True)
class Verdict:
    """A case and what came of it: its exit code, and what was wrong with it."""

    number: int
    kind: str
    arguments: list[str]
    streams: str
    code: int
    faults: tuple[str, ...]
    seconds: float
    err: str


class Case(Protocol):
    """One command line in a folder of its own."""

    kind: str
    arguments: list[str]
    stdin: bytes
    streams: str
    asked: tuple[str, ...]
    ends: tuple[float, int] | None


class Runner:
    """Runs cases below the folder `root`, some in turn in each process that is forked."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.seed = seed
        self.world = root / "world"
        self.uid = NOBODY if os.geteuid() == 0 else None
        self.case: Case | None = None
        above = [*Path(__file__).resolve().parents, *Path(sys.prefix).resolve().parents]
        if self.uid and (closed := [p for p in above if not p.stat().st_mode & stat.S_IXOTH]):
            sys.exit(f"the superuser's inputs run as nobody, who may not enter {closed[-1]}")

    def prepare(self) -> None:
        """Import what the children need, and make the models and files that they are given."""
        from importlib import import_module
        from pkgutil import walk_packages

        import torch

        import heedful
        from heedful.inference import optimizing

        for name in ("torch._dynamo", "sacrebleu.metrics", "rich.progress", "rich.table"):
            import_module(name)
        for module in walk_packages(heedful.__path__, "heedful."):
            if not module.name.endswith("__main__"):
                import_module(module.name)
        wide = [f"utf-{bits}{order}" for bits in (16, 32) for order in ("", "-le", "-be")]
        for name in ("ascii", "latin-1", "utf-8-sig", "cp437", *wide):  # unreadable for nobody
            codecs.lookup(name)
        with suppress(ImportError):
            import_module("ctranslate2")
        # Here it is no matter what is fastest, and a compiler would take minutes.
        vars(optimizing).update(_SINGLES=1, _TOGETHER=4, _ROUNDS=1, _LONGEST=0.01)
        optimizing.ENGINES = ("eager", "ctranslate2")
        torch.set_num_threads(1)
        names = self.root / "modules"
        pid = os.fork()  # what has started threads must not be forked
        if pid == 0:
            with _exits():
                hostile.make_world(self.world)
                names.write_text("\n".join(sys.modules))
        if os.waitpid(pid, 0)[1]:
            sys.exit("the models could not be made")
        for name in names.read_text().split():  # which are unreadable for nobody
            with suppress(ImportError):
                import_module(name)
        for folder, folders, files in os.walk(self.root):
            for name in [folder, *(os.path.join(folder, each) for each in [*folders, *files])]:
                if self.uid is not None:
                    os.chown(name, self.uid, self.uid, follow_symlinks=False)
        gc.collect()
        gc.freeze()

    def run(self, numbers: Sequence[int]) -> Iterator[Verdict]:
        """The verdicts of some cases; one that ends its process is judged by how it ended."""
        left = list(numbers)
        while left:
            batch = self._batch(left)
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read)
                with _exits():
                    self._child(batch, write)
            os.close(write)
            with os.fdopen(read) as lines:
                for number in batch:
                    ready, _, _ = select.select([lines], [], [], 3 * SECONDS)
                    line = lines.readline() if ready else ""
                    left.pop(0)
                    if not line.endswith("\n"):
                        os.kill(pid, signal.SIGKILL)
                        yield self._ended(number, "hang" if not ready else "killed")
                        break
                    yield Verdict(**json.loads(line))
            os.waitpid(pid, 0)

    def _batch(self, left: list[int]) -> list[int]:
        """The first cases, as many as one process runs; what forks again has one to itself.

        What has run a model has threads, and no process with threads may be forked.
        """
        apart = [hostile.kind_of(self._draw(number)) == hostile.ENDED for number in left[:BATCH]]
        return left[:1] if apart[0] else left[: [*apart, True].index(True)]

    def _draw(self, number: int) -> random.Random:
        return random.Random(f"{self.seed} {number}")

    def _ended(self, number: int, fault: str) -> Verdict:
        """The verdict of a case whose process did not live to give it."""
        case = self._make(number)
        err = self._read("err", number)
        return Verdict(number, case.kind, case.arguments, case.streams, -9, (fault,), SECONDS, err)

    def _make(self, number: int) -> Case:
        box = self.root / f"box-{number}"
        shutil.rmtree(box, ignore_errors=True)
        (box / "here").mkdir(parents=True)
        (box / "tmp").mkdir()
        return hostile.make_case(self._draw(number), self.world, box / "here")

    def _read(self, name: str, number: int) -> str:
        path = self.root / f"{name}-{number}"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _child(self, numbers: Sequence[int], write: int) -> None:
        os.environ |= {"HEEDFUL_CACHE": str(self.root / "cache"), "COLUMNS": "80"}
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        if self.uid is not None:
            os.setgroups([])
            os.setgid(self.uid)
            os.setuid(self.uid)
        self.before = _stamps(self.world)
        for number in numbers:
            verdict = self._judged(number)
            os.write(write, (json.dumps(asdict(verdict)) + "\n").encode())
            shutil.rmtree(self.root / f"box-{number}", ignore_errors=True)
            for name in ("in", "out", "err"):
                (self.root / f"{name}-{number}").unlink()

    def _judged(self, number: int) -> Verdict:
        case = self._make(number)
        box = self.root / f"box-{number}"
        (self.root / f"in-{number}").write_bytes(case.stdin)
        before = _stamps(box)
        began = sum(os.times()[:4])
        code = self._called(case, number) if case.ends is None else self._ended_at(case, number)
        seconds = sum(os.times()[:4]) - began
        out, err = self._read("out", number), self._read("err", number)
        faults = [*self._of_output(case, code, seconds, out, err)]
        faults += self._of_files(case, code, box, before)
        found = tuple(dict.fromkeys(faults))
        return Verdict(
            number,
            case.kind,
            case.arguments,
            case.streams or str(case.ends or ""),
            code,
            found,
            round(seconds, 1),
            err[-1500:],
        )

    def _ended_at(self, case: Case, number: int) -> int:
        """The exit code, as a shell sees it, of a process that is ended from outside."""
        assert case.ends is not None
        seconds, ending = case.ends
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            code = 1
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            with _exits(lambda: code):
                code = self._called(case, number, None if ending else write)
        os.close(write)
        if ending:
            time.sleep(seconds)
            os.kill(pid, ending)
        else:
            os.read(read, 1)
        os.close(read)
        for _ in range(300 * SECONDS):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return -9

    def _called(self, case: Case, number: int, stdout: int | None = None) -> int:
        """The exit code of the command, run in this process with streams of its own."""
        kept = [os.dup(handle) for handle in range(3)]
        streams = sys.stdin, sys.stdout, sys.stderr
        environment = dict(os.environ)
        box = self.root / f"box-{number}"
        heeded = {each: signal.getsignal(each) for each in (2, 1, 15)}
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        for place, name, how in ((0, "in", os.O_RDONLY), (1, "out", flags), (2, "err", flags)):
            handle = os.open(self.root / f"{name}-{number}", how, 0o666)
            os.dup2(handle, place)
            os.close(handle)
        if stdout is not None:
            os.dup2(stdout, 1)
            os.close(stdout)
        os.chdir(box / "here")
        os.environ |= {"HOME": str(box / "tmp"), "XDG_CACHE_HOME": str(box / "tmp")}
        tempfile.tempdir = str(box / "tmp")
        code = 1
        try:
            hostile.arrange_streams(case.streams)
            sys.argv = ["heedful", *case.arguments]
            try:
                try:
                    _run(case)
                    code = 0
                finally:  # what is sent later must not end the streams' return halfway
                    for each, handler in heeded.items():
                        signal.signal(each, handler)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            for stream in (sys.stdout, sys.stderr):
                if stream is not None and not stream.closed:
                    stream.flush()
        except BaseException:
            import traceback

            (self.root / f"err-{number}").write_text(traceback.format_exc())
        finally:
            os.chdir(self.root)
            for place, handle in enumerate(kept):
                os.dup2(handle, place)
                os.close(handle)
            sys.stdin, sys.stdout, sys.stderr = streams
            os.environ.clear()
            os.environ.update(environment)
        return code

    def _of_output(
        self, case: Case, code: int, seconds: float, out: str, err: str
    ) -> Iterator[str]:
        if "Traceback (most recent" in out + err:
            yield "traceback"
        if seconds >= SECONDS:
            yield "hang"
        elif code not in self._codes(case):
            yield "other code"
        elif code == 2:
            lines = err.splitlines()
            told = [line for line in lines if "error: " in line]
            if len(lines) > LINES or (case.streams not in SILENT and len(told) != 1):
                yield "long or no error"

    def _codes(self, case: Case) -> set[int]:
        """Those that a case may end with."""
        codes = {0, 2, 1} if case.arguments[:1] == ["verify"] else {0, 2}
        if case.ends is not None and case.ends[1]:
            # A run saves when it is told to end, and ends as with Ctrl-C.
            codes |= {128 + case.ends[1], 130}
        return codes

    def _of_files(self, case: Case, code: int, box: Path, before: dict[str, Any]) -> Iterator[str]:
        now = _stamps(self.world)
        if now != self.before:
            yield "outside"
            both = now.keys() | self.before.keys()
            paths = sorted(path for path in both if now.get(path) != self.before.get(path))
            print("changed:", *paths, file=sys.stderr)
            self.before = now
        after = _stamps(box)
        changed = {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)}
        asked = [os.path.normpath(f"here/{name}") for name in case.asked]
        inside = {p for p in changed if any(a in (".", p) or p.startswith(f"{a}/") for a in asked)}
        parents = {str(parent) for each in asked for parent in Path(each).parents}
        if {p for p in changed - inside if p not in parents or not (box / p).is_dir()}:
            yield "outside"
        if any(".tmp" in p for p in after if p not in before):
            yield "half-written"
        # A run that goes on may fail later; and what was written whole may not be told of.
        goes_on = "--resume" in case.arguments or case.streams != "" or case.ends is not None
        if code not in (0, 1, 130) and inside and not goes_on:
            yield "half-written"


def _run(case: Case) -> None:
    """The command of a case, or its call of the library, whose errors are told alike."""
    if case.arguments[:1] != ["python"]:
        from heedful.cli import main

        if case.ends is not None:  # as in a process of the interpreter
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            main()
        finally:
            if case.ends is not None:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
        return
    import heedful
    from heedful.errors import UserError
    from heedful.recipe_files import load_recipe

    names = {"load": heedful.load, "ensemble": heedful.ensemble, "load_recipe": load_recipe}
    try:
        eval(case.arguments[1], names)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def _exits(code: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """The rest of a process that was forked; an error of ours is shown and ends all."""
    try:
        yield
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(code())


def _stamps(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every entry below a folder with what changes when it is written."""
    found: dict[str, tuple[int, ...]] = {}
    waiting = [str(folder)]
    skip = len(str(folder)) + 1
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                state = entry.stat(follow_symlinks=False)
                is_folder = entry.is_dir(follow_symlinks=False)
                stamp = (
                    (state.st_mode,)
                    if is_folder
                    else (state.st_mtime_ns, state.st_size, state.st_ino)
                )
                found[entry.path[skip:]] = stamp
                if is_folder:
                    waiting.append(entry.path)
    return found


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--only", type=int, help="run one case and show it")
    parser.add_argument("--failures", type=Path, help="a file for what was wrong, JSON lines")
    arguments = parser.parse_args()
    count = 300 if arguments.quick else arguments.count
    numbers = range(arguments.first, count) if arguments.only is None else [arguments.only]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        root = Path(folder)
        root.chmod(0o777)
        os.umask(0)
        runner = Runner(root, arguments.seed)
        runner.prepare()
        results: list[Verdict] = []
        log = arguments.failures.open("w") if arguments.failures else sys.stdout
        for verdict in _in_parts(runner, numbers, arguments.jobs):
            results.append(verdict)
            if verdict.faults or arguments.only is not None:
                log.write(json.dumps(asdict(verdict)) + "\n")
                log.flush()
    faults = Counter(fault for verdict in results for fault in verdict.faults)
    print(f"{len(results)} inputs: {dict(faults) or 'no fault'}")
    if arguments.only is None and (arguments.quick or count >= 10_000):
        _write(results, arguments.seed, arguments.results)
    sys.exit(bool(faults))


def _in_parts(runner: Runner, numbers: Sequence[int], jobs: int) -> Iterator[Verdict]:
    """All verdicts, by as many processes."""
    if jobs == 1:
        yield from runner.run(numbers)
        return
    parts = [runner.root / f"part-{job}" for job in range(jobs)]
    for job, part in enumerate(parts):
        if os.fork() == 0:
            with part.open("w") as lines:
                for verdict in runner.run(numbers[job::jobs]):
                    lines.write(json.dumps(asdict(verdict)) + "\n")
                    lines.flush()
            os._exit(0)
    for _ in parts:
        os.wait()
    for part in parts:
        yield from (Verdict(**json.loads(line)) for line in part.open())


def _write(results: list[Verdict], seed: int, directory: Path) -> None:
    sections = [PAGE]
    data: dict[str, Any] = {"seed": seed}
    verbs = {name: name for name in hostile.VERBS} | {"python": "(the library)"}
    keys = {
        "by what was wrong": lambda each: each.kind,
        "by verb": lambda each: verbs.get((each.arguments or [""])[0], "(no verb)"),
    }
    for name, key in keys.items():
        groups: dict[str, list[Verdict]] = {}
        for verdict in results:
            groups.setdefault(key(verdict), []).append(verdict)
        rows = [_row(group, found) for group, found in sorted(groups.items())]
        rows.append(_row("all", results))
        header = [name.removeprefix("by "), "inputs", "refused (2)", "accepted, or ended", *FAULTS]
        sections.append(f"## {name.capitalize()}\n\n{table(header, rows)}")
        data[name] = [dict(zip(header, row, strict=True)) for row in rows]
    write_results(
        "fuzz",
        "Wrong and hostile input",
        sections,
        data,
        directory=directory,
        command=command_line(),
        packages=("safetensors", "tokenizers", "pydantic"),
    )


def _row(name: str, found: list[Verdict]) -> list[object]:
    counts = Counter(fault for verdict in found for fault in verdict.faults)
    refused = sum(verdict.code == 2 for verdict in found)
    accepted = sum(verdict.code != 2 and not verdict.faults for verdict in found)
    return [name, len(found), refused, accepted, *(counts[fault] for fault in FAULTS)]


if __name__ == "__main__":
    main()
