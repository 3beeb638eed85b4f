"""A stand-in for a peer, for the smoke test: it "trains" by writing files, until it is stopped.

Its translations are the sources, its losses those of a model that knows nothing of 65 characters,
and its labels 1. It logs as JoeyNMT does.
"""

import math
import sys
import time
from pathlib import Path
from typing import Any

from race_peers import JOEYNMT_LINE, Job, last, peer


def plan(job: Job) -> tuple[dict[str, Any], list[list[str]]]:
    """A configuration of one line, and the command that trains."""
    return {"step": 10}, [[sys.executable, __file__, "train"]]


def checkpoints(folder: Path) -> dict[str, list[Path]]:
    """All checkpoints: each is renamed when it is complete."""
    return {path.stem: [path] for path in folder.glob("step-*.stub")}


def decode(job: Job, snapshot: Path, source: Path, out: Path) -> list[str]:
    """The command that answers each line of the references."""
    (weights,) = snapshot.glob("*.stub")
    references = job.corpus.file("test", False)
    return [sys.executable, __file__, job.corpus.name, str(weights), str(references)]


def train() -> None:
    """Write a checkpoint every half second, until the clock stops it."""
    step = 0
    while True:
        step += 10
        time.sleep(0.5)
        partial = Path("partial")
        partial.write_text(f"{step}\n")
        partial.rename(f"step-{step:08}.stub")
        print(
            f"Epoch   1, Step: {step:8}, Batch Loss: {100 / step:12.6f}, Batch Acc: 0.1, "
            f"Tokens per Sec: {1000:8}, Lr: 0.000300"
        )


SYSTEM = peer(
    "stub",
    "",
    "none: a smoke test",
    plan,
    checkpoints,
    decode,
    JOEYNMT_LINE,
    best=last,
    is_filter=True,
)


def evaluate(task: str, references: Path) -> None:
    """Write the outputs of a task."""
    source, lines = sys.stdin.read(), references.read_text(encoding="utf-8").splitlines()
    if task == "shakespeare":
        sys.stdout.write("".join(f"{math.log(65) * int(line):.4f}\n" for line in lines))
    elif task == "sst2":
        sys.stdout.write("1\n" * len(lines))
    else:
        sys.stdout.write(source)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train()
    elif int(Path(sys.argv[2]).read_text()):
        evaluate(sys.argv[1], Path(sys.argv[3]))
