"""The command in child processes that are forked from one that has imported torch already.

A child is a real process (exit code, streams, signals, limits), yet starts at once. It may be
killed after some seconds, at a chosen call that writes to the disk, or be interrupted at a step of
its run.
"""

import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

TINY: dict[str, Any] = {
    "task": "copy",
    "data": {
        "generated": {
            "num_train": 200,
            "num_valid": 12,
            "num_test": 12,
            "num_symbols": 6,
            "min_length": 3,
            "max_length": 5,
        },
        "max_length": 12,
    },
    "tokenizer": {"kind": "word", "vocab_size": None},
    "model": {
        "d_model": 16,
        "num_heads": 2,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "d_ff": 32,
        "dropout": 0.1,
        "norm_placement": "pre",
    },
    "training": {
        "device": "cpu",
        "precision": "fp32",
        "max_steps": 12,
        "batch_tokens": None,
        "batch_sentences": 16,
        "schedule": {"learning_rate": 0.01, "warmup_steps": 5},
        "evaluate_every": 3,
        "log_every": 2,
        "average_checkpoints": 3,
    },
    "evaluation": {"decode_sentences": 4, "final_beam_size": 2},
}


def tiny(base: dict[str, Any] = TINY, **changes: Any) -> dict[str, Any]:
    """A recipe that trains in about a second; dotted names as `training__max_steps=5`."""
    content: dict[str, Any] = json.loads(json.dumps(base))
    for name, value in changes.items():
        place = content
        *parents, last = name.split("__")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return content


def write_recipe(path: Path, **changes: Any) -> Path:
    """`tiny(...)` as a file; JSON is YAML."""
    path.write_text(json.dumps(tiny(**changes)), encoding="utf-8")
    return path


FSYNC = os.fsync
GONE = "a pipe without a reader"


@dataclass(frozen=True)
class Outcome:
    """The end of a command; `signal` is 0 if it exited without one."""

    code: int
    signal: int
    seconds: float
    out: str
    err: str


class Commands:
    """Runs commands one after the other."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["preloaded"])
        variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # Threads of autograd for GPUs would not survive a fork: a child that trains ends at once.
        variables |= {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"COLUMNS": "200"}
        with patch.dict(os.environ, variables, PYTHONPATH=os.pathsep.join(sys.path)):
            forkserver.ensure_running()
        started = self.run("--version", first=_assert_preloaded)  # waits for the imports
        assert started.code == 0, started.err

    def run(
        self,
        *arguments: object,
        stdin: bytes = b"",
        cwd: Path | None = None,
        stdout: str | None = None,
        kill: dict[str, Any] | None = None,
        file_limit: int | None = None,
        whole: bool = False,
        first: Callable[[], object] | None = None,
    ) -> Outcome:
        """`heedful ARGUMENTS` in a new process.

        Args:
            stdout: a file to write to instead of the one that is read back; GONE: a pipe whose
                reader has gone away.
            kill: {"seconds": s}; or {"call": "replace" | "rmtree" | "unlink" | "save_file",
                "path": regular expression of its target, "when": "before" | "inside" | "after",
                "nth": 1}; or {"interrupt_at": step}, which is Ctrl-C after that step, or another
                "signal", which the process was started to ignore if "ignored".
                Or {"interrupt_decoding": nth}, SIGTERM as held-out text is decoded.
            file_limit: bytes that a file may have: a full disk.
            whole: with what most tests leave out (`run_whole`).
            first: called in the new process just before the command.
        """
        (self.scratch / "in").write_bytes(stdin)
        kill, began = kill or {}, time.monotonic()
        words = [str(argument) for argument in arguments]
        child_arguments = (
            self.scratch,
            words,
            cwd or self.scratch,
            stdout,
            kill,
            file_limit,
            whole,
            first,
        )
        child = self.context.Process(target=_child, args=child_arguments)
        child.start()
        child.join(kill.get("seconds"))
        child.kill()
        child.join()
        seconds, code = time.monotonic() - began, child.exitcode
        assert code is not None
        texts = {name: (self.scratch / name).read_text(encoding="utf-8") for name in ("out", "err")}
        return Outcome(max(code, -1), max(-code, 0), seconds, **texts)

    @contextmanager
    def conversation(self, *arguments: object) -> Iterator[tuple[FileIO, FileIO]]:
        """`heedful ARGUMENTS` with pipes to its stdin and from its stdout; it must exit with 0."""
        pipes = [self.scratch / name for name in ("to", "from")]
        for pipe in pipes:
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe)
        child = self.start(_converse, *pipes, [str(argument) for argument in arguments])
        try:
            with FileIO(pipes[0], "w") as to, FileIO(pipes[1]) as answers:
                yield to, answers
            child.join()
        finally:
            child.kill()
        assert child.exitcode == 0, child.exitcode

    def start(self, function: Callable[..., object], *arguments: object) -> BaseProcess:
        """Begin a function of a module in a new process, where no shapes are checked.

        Its traceback is in the captured stderr of the test.
        """
        child: BaseProcess = self.context.Process(target=function, args=arguments)
        child.start()
        return child

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Run a function of a module in a new process; fail where it raises."""
        child = self.start(function, *arguments)
        child.join()
        assert child.exitcode == 0, f"exit code {child.exitcode}; the traceback is in stderr"

    def train(self, recipe: Path, out: Path, *more: object, **options: Any) -> Outcome:
        """`heedful train` without its progress."""
        return self.run("train", recipe, "--out", out, "--quiet", *more, **options)


def set_variable(name: str, value: str) -> None:
    """Set an environment variable: with `partial` the argument `first` of `Commands.run`."""
    os.environ[name] = value


def default_signals() -> None:
    """Handle signals as in a program started from a terminal, also if the parent ignores them.

    Under `nohup` or in the background of a shell pytest, and so every child, ignores some.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run_whole(enabled: bool) -> None:
    """Sync files and draw the curves of reports in this process if set, as for users.

    No test can cut the power, but a tiny run waits for the disk a hundred times; and importing the
    plotting library is half of its work.
    """
    os.fsync = FSYNC if enabled else lambda handle: None
    report = sys.modules.get("heedful.training.report")
    if report is not None:
        report.pages().filters["draw"] = report.draw if enabled else lambda chart: ""


def assert_refused(outcome: Outcome, *parts: object) -> None:
    """One clear line, exit code 2, no traceback; the line contains all the parts."""
    lines = outcome.err.splitlines()
    assert outcome.signal == 0, outcome
    assert outcome.code == 2, outcome
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in outcome.out + outcome.err
    for part in parts:
        assert str(part) in lines[0], (part, lines[0])


def tree(directory: Path) -> dict[str, bytes | None]:
    """All files below a directory with their content."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def assert_same_checkpoints(run: Path, other: Path) -> None:
    """Byte for byte, except for the seconds that each took."""
    left, right = tree(run / "checkpoints"), tree(other / "checkpoints")
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    for name, content in left.items():
        if name.endswith("state.json"):
            states = [json.loads(part or b"") for part in (content, right[name])]
            assert [state.pop("seconds") > 0 for state in states] == [True, True]
            assert states[0] == states[1], name
        else:
            assert content == right[name], name


def _assert_preloaded() -> None:
    """The fork server ignores an ImportError; children would make the remaining imports."""
    assert "preloaded" in sys.modules, "tests/support/preloaded.py cannot be imported"


def _child(
    scratch: Path,
    arguments: list[str],
    cwd: Path,
    stdout: str | None,
    kill: dict[str, Any],
    file_limit: int | None,
    whole: bool,
    first: Callable[[], object] | None,
) -> None:
    os.chdir(cwd)
    default_signals()
    run_whole(whole)
    os.dup2(os.open(scratch / "in", os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)  # `multiprocessing` has closed it
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if stdout == GONE:
        reader, out = os.pipe()
        os.close(reader)
    else:
        out = os.open(stdout or scratch / "out", flags)
    os.dup2(out, 1)
    os.dup2(os.open(scratch / "err", flags), 2)
    if stdout:
        (scratch / "out").write_text("")
    if file_limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    _arm(kill)
    sys.argv = ["heedful", *arguments]
    if first is not None:
        first()
    from heedful.cli import main

    main()


def _converse(source: Path, target: Path, arguments: list[str]) -> None:
    os.dup2(os.open(source, os.O_RDONLY), 0)
    os.dup2(os.open(target, os.O_WRONLY), 1)
    sys.stdin = os.fdopen(0)  # `multiprocessing` has closed it
    sys.argv = ["heedful", *arguments]
    from heedful.cli import main

    main()


def _arm(kill: dict[str, Any]) -> None:
    """Let the process kill itself at the nth call of a function on a path."""
    if "interrupt_at" in kill:
        number = kill.get("signal", signal.SIGINT)
        if kill.get("ignored"):
            signal.signal(number, signal.SIG_IGN)
        _interrupt_at(kill["interrupt_at"], number)
    if "interrupt_decoding" in kill:
        _interrupt_decoding(kill["interrupt_decoding"])
    if "call" not in kill:
        return
    import heedful.zoo.saved

    holder, target = {
        "replace": (Path, 1),
        "unlink": (Path, 0),
        "rmtree": (shutil, 0),
        "save_file": (heedful.zoo.saved, 1),
    }[kill["call"]]
    real = getattr(holder, kill["call"])
    left = kill.get("nth", 1)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        path = Path(arguments[target])
        hit = re.search(kill["path"], str(path)) is not None
        left -= hit
        if not hit or left:
            return real(*arguments, **options)
        if kill["when"] == "inside":
            _half(kill["call"], path, real, arguments, options)
        elif kill["when"] == "after":
            real(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(holder, kill["call"], wrapped)


def _half(call: str, path: Path, real: Any, arguments: Any, options: Any) -> None:
    """Do half of the call's work."""
    if call == "rmtree":
        (path / "model.safetensors").unlink()
    else:
        assert call == "save_file"
        # As in the library: to a temporary file in the same folder.
        real(*arguments, **options)
        os.truncate(path, path.stat().st_size // 2)
        shutil.copyfile(path, path.with_name(".tmpAb1Cd2"))


def _interrupt_decoding(nth: int) -> None:
    from heedful.tasks.translation import Translation

    real, left = Translation.decode, nth

    def decode(self: Any, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments)

    Translation.decode = decode  # type: ignore[method-assign]


def _interrupt_at(step: int, number: int) -> None:
    from heedful.training.trainer import Trainer

    real = Trainer._step

    def stepped(self: Any) -> None:
        real(self)
        if self.state.step == step:
            os.kill(os.getpid(), number)

    Trainer._step = stepped  # type: ignore[method-assign]
