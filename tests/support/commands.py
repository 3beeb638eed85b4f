"""The command in child processes that are forked from one that has imported torch already.

A child is a real process (exit code, streams, signals, limits), yet starts at once. It may be
killed after some seconds, at a chosen call that writes to the disk, or be interrupted at a step of
its run. Run as a script this file is the process that forks; imported it is its client.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
        "average_last": 3,
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
# What the children need and takes long to import. torch._dynamo is what the first optimizer needs.
IMPORTED = (
    *("torch._dynamo", "sacrebleu.metrics", "jinja2", "matplotlib.backends.backend_svg"),
    *("matplotlib.figure", "pygments.formatters.html", "pygments.lexers.data"),
    *("pygments.styles.default", "numpy.ctypeslib"),
    *(f"heedful.{name}" for name in ("run", "cli.app", "training.progress", "tasks.synthetic")),
    *(f"heedful.{name}" for name in ("zoo.vaswani2017", "engines.coverage", "engines.decoding")),
    *(f"heedful.{name}" for name in ("inference.optimizing", "training.report", "cli.lines")),
    *(f"heedful.{name}" for name in ("engines.eager", "generation.search", "cli.flags")),
    *("ctranslate2",) * (find_spec("ctranslate2") is not None),
)


@dataclass(frozen=True)
class Outcome:
    """How a command ended; `signal` is 0 where it exited by itself."""

    code: int
    signal: int
    seconds: float
    out: str
    err: str


class Commands:
    """Runs commands one after the other."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"},
            text=True,
        )

    def run(
        self,
        *arguments: object,
        stdin: bytes = b"",
        cwd: Path | None = None,
        stdout: str | None = None,
        kill: dict[str, Any] | None = None,
        file_limit: int | None = None,
        whole: bool = False,
    ) -> Outcome:
        """`heedful ARGUMENTS` in a new process.

        Args:
            stdout: a file to write to instead of the one that is read back; GONE: a pipe whose
                reader has gone away.
            kill: {"seconds": s}; or {"call": "replace" | "rmtree" | "unlink" | "save_file",
                "path": regular expression of its target, "when": "before" | "inside" | "after",
                "nth": 1}; or {"interrupt_at": step}, which is Ctrl-C after that step, or another
                "signal".
            file_limit: bytes that a file may have: a full disk.
            whole: with what most tests leave out (`run_whole`).
        """
        (self.scratch / "in").write_bytes(stdin)
        job = {
            "arguments": list(map(str, arguments)),
            "cwd": str(cwd or self.scratch),
            "scratch": str(self.scratch),
            "stdout": stdout,
            "kill": kill,
            "file_limit": file_limit,
            "whole": whole,
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        texts = {name: (self.scratch / name).read_text(encoding="utf-8") for name in ("out", "err")}
        return Outcome(**answer, **texts)

    def train(self, recipe: Path, out: Path, *more: object, **options: Any) -> Outcome:
        """`heedful train` without its progress."""
        return self.run("train", recipe, "--out", out, "--quiet", *more, **options)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def run_whole(wanted: bool) -> None:
    """Whether files are synced and reports have their curves in this process, as users have it.

    No test can cut the power, but a tiny run waits for the disk a hundred times; and the curves,
    where what writes them is imported, are half of its work.
    """
    os.fsync = FSYNC if wanted else lambda handle: None
    report = sys.modules.get("heedful.training.report")
    if report is not None:
        report.pages().filters["draw"] = report.draw if wanted else lambda chart: ""


def assert_refused(outcome: Outcome, *parts: object) -> None:
    """One clear line, exit code 2, no traceback; the line holds all the parts."""
    lines = outcome.err.splitlines()
    assert outcome.signal == 0, outcome
    assert outcome.code == 2, outcome
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in outcome.out + outcome.err
    for part in parts:
        assert str(part) in lines[0], (part, lines[0])


def tree(directory: Path) -> dict[str, bytes | None]:
    """Everything below a directory: files with their content."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def assert_same_checkpoints(run: Path, other: Path) -> None:
    """Byte for byte, but for the seconds that each took."""
    left, right = tree(run / "checkpoints"), tree(other / "checkpoints")
    assert left.keys() == right.keys()
    for name, content in left.items():
        if name.endswith("state.json"):
            states = [json.loads(part or b"") for part in (content, right[name])]
            assert [state.pop("seconds") > 0 for state in states] == [True, True]
            assert states[0] == states[1], name
        else:
            assert content == right[name], name


def _serve() -> None:
    """Import once what the children need, then fork one for each line of stdin."""
    from importlib import import_module

    import torch

    for name in IMPORTED:
        import_module(name)
    sys.modules["heedful.training.report"].pages().get_template("report.html.j2")
    sys.modules["heedful.inference.optimizing"]._SHORTEST = 0.0  # as the fixture `brief`
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(job)
        end = began + job["kill"]["seconds"] if "seconds" in (job["kill"] or {}) else None
        status = _wait(pid, end)
        answer = {
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "seconds": time.monotonic() - began,
        }
        print(json.dumps(answer), flush=True)


def _wait(pid: int, end: float | None) -> int:
    if end is not None:
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _child(job: dict[str, Any]) -> None:
    code = 1
    try:
        scratch = Path(job["scratch"])
        os.chdir(job["cwd"])
        run_whole(job["whole"])
        os.dup2(os.open(scratch / "in", os.O_RDONLY), 0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        if job["stdout"] == GONE:
            reader, out = os.pipe()
            os.close(reader)
        else:
            out = os.open(job["stdout"] or scratch / "out", flags)
        os.dup2(out, 1)
        os.dup2(os.open(scratch / "err", flags), 2)
        if job["stdout"]:
            (scratch / "out").write_text("")
        if job["file_limit"] is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"], job["file_limit"]))
        if job["kill"] is not None:
            _arm(job["kill"])
        sys.argv = ["heedful", *job["arguments"]]
        from heedful.cli import main

        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _arm(kill: dict[str, Any]) -> None:
    """Let the process kill itself at the nth call of a kind on a path."""
    if "interrupt_at" in kill:
        _interrupt_at(kill["interrupt_at"], kill.get("signal", signal.SIGINT))
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
    """Do half of what the call does."""
    if call == "rmtree":
        (path / "model.safetensors").unlink()
    else:
        assert call == "save_file"
        real(*arguments, **options)
        os.truncate(path, path.stat().st_size // 2)


def _interrupt_at(step: int, number: int) -> None:
    from heedful.training.trainer import Trainer

    real = Trainer._step

    def stepped(self: Any) -> None:
        real(self)
        if self.state.step == step:
            os.kill(os.getpid(), number)

    Trainer._step = stepped  # type: ignore[method-assign]


if __name__ == "__main__":
    _serve()
