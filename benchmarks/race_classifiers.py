"""The peers of the race of classifiers: transformers' Trainer in three settings."""

import ast
import itertools
import json
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from heedful.training.optimizer import has_fast_bf16
from race_clock import Clock, timed_lines
from race_peers import LOG, Job, Progress, System, run

PROGRAM = "race_trainer.py"
# What each stage of it needs; the rest is for the race: the choice of a stage, and the test set.
FUNCTIONS = {"tokenizer_of", "rows", "config_of", "settings"}
LOG_EVERY = 20
PROBE = 60  # steps by which the speed of the masked language model is measured
SHARE = 0.85  # of the time that is left, for steps; the rest is for evaluations and the start
# The recipes `classification` and `masked-lm` of heedful, as arguments of the program: the rate,
# batches, warm-up, dropout and label smoothing, and for the classifier three epochs.
TUNED = {"rate": 5e-4, "batch": 32, "epochs": 3, "warmup": 65, "beta2": 0.98}
TUNED |= {"dropout": 0.3, "smoothing": 0.1}
MASKED = {"rate": 1.5e-3, "batch": 64, "beta2": 0.98, "dropout": 0.2}
WARMUP = 400 / 6540  # of the steps
LOSS = re.compile(r"'loss': '?(?P<loss>[\d.]+)")


def command(job: Job, stage: str, out: Path | str, options: dict[str, object]) -> list[str]:
    """A command of the program; it trains in mixed precision where bf16 is the faster one."""
    words = [f"--{key}={value}" for key, value in options.items()]
    if stage != "predict" and has_fast_bf16(torch.device("cpu")):
        words.append("--bf16")
    return [str(job.python), PROGRAM, stage, *words, str(job.corpus.folder), str(out)]


def race(clock: Clock, job: Job, *, is_tuned: bool, is_pretrained: bool) -> None:
    """Train a classifier; before, a masked language model for the time that is left."""
    shutil.copy2(Path(__file__).with_name(PROGRAM), job.folder)
    options: dict[str, object] = {**TUNED} if is_tuned else {}
    if job.is_quick:
        options |= {"steps": 4}
    if is_pretrained:
        options |= {"init": "masked"}
        pretrain(clock, job)
    run(clock, job, command(job, "classify", "out", options), lambda: checkpoints(job.folder))


def pretrain(clock: Clock, job: Job) -> None:
    """The masked language model, for as long as the classifier leaves time.

    A step of the classifier, of half the batch, takes at most half the time of one of it.
    """
    probe = {**MASKED, "steps": 4 if job.is_quick else PROBE, "log-every": LOG_EVERY}
    run(clock, job, command(job, "masked", "probe", probe))
    left = clock.limit - clock.used
    if left <= 0:
        return
    steps = 4
    if not job.is_quick:
        lines = loss_lines(job)
        pairs = itertools.pairwise(lines)
        seconds = median(after[0] - before[0] for before, after in pairs) / LOG_EVERY
        epochs = int(TUNED["epochs"])
        rows = len(job.corpus.file("train", True).read_text(encoding="utf-8").splitlines())
        classifier = epochs * rows / TUNED["batch"] * seconds / 2
        steps = max(1, int(SHARE * (left - classifier) / seconds))
    options = {**MASKED, "steps": steps, "warmup": round(WARMUP * steps)}
    run(clock, job, command(job, "masked", "masked", options))


def loss_lines(job: Job) -> list[tuple[float, float]]:
    """The seconds and losses in the log of the last command."""
    lines = timed_lines(job.folder / LOG)
    start = max(index for index, (_, text) in enumerate(lines) if text.startswith("$ "))
    found = [(at, LOSS.search(text)) for at, text in lines[start:]]
    return [(at, float(match["loss"])) for at, match in found if match]


def checkpoints(folder: Path) -> dict[str, list[Path]]:
    """The folders of checkpoints; trainer_state.json is written last."""
    found = {}
    for path in (folder / "out").glob("checkpoint-*/trainer_state.json"):
        step = int(path.parent.name.partition("-")[2])
        files = [path.parent / name for name in ("config.json", "model.safetensors")]
        found[f"step-{step:08}"] = files
    return found


def best(job: Job, names: Sequence[str]) -> str:
    """The checkpoint that Trainer takes as the best on the validation text."""
    states = (job.folder / "out").glob("checkpoint-*/trainer_state.json")
    last = max(states, key=lambda path: int(path.parent.name.partition("-")[2]))
    state = json.loads(last.read_text(encoding="utf-8"))
    step = Path(state["best_model_checkpoint"] or "").name.partition("-")[2]
    name = f"step-{int(step):08}" if step else ""
    return name if name in names else max(names)


def predict(job: Job, snapshot: Path, source: Path, out: Path) -> list[str]:
    """The command that writes the labels of the test texts."""
    return command(job, "predict", out, {"init": snapshot})


def progress(job: Job, batch: int) -> list[Progress]:
    """The losses, which are logged every `LOG_EVERY` steps; texts a second."""
    found: list[Progress] = []
    for number, (at, loss) in enumerate(loss_lines(job), 1):
        before = found[-1].seconds if found else None
        is_apart = before is not None and at > before
        rate = LOG_EVERY * batch / (at - before) if is_apart else None  # type: ignore[operator]
        found.append(Progress(at, number * LOG_EVERY, loss, rate))
    return found


def written_lines(program: str, functions: set[str]) -> int:
    """The lines of a program that are not blank: imports, constants and these functions.

    Docstrings and comments are not counted.
    """
    tree = ast.parse(program)
    tree.body = [
        node
        for node in tree.body[1:]
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign)
        or (isinstance(node, ast.FunctionDef) and node.name in functions)
    ]
    numbers: set[int] = set()
    for node in tree.body:
        numbers |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            numbers -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = [line.strip() for line in program.splitlines()]
    return sum(bool(lines[number - 1]) for number in numbers)


def trainer(
    name: str, settings: str, *, is_tuned: bool = True, is_pretrained: bool = False
) -> System:
    """A setting of the program as a system."""
    program = Path(__file__).with_name(PROGRAM).read_text(encoding="utf-8")
    stages = {"masked", "classify"} if is_pretrained else {"classify"}
    lines = written_lines(program, FUNCTIONS | stages)
    return System(
        name,
        "trainer",
        settings,
        partial(race, is_tuned=is_tuned, is_pretrained=is_pretrained),
        best,
        predict,
        False,
        partial(progress, batch=int(TUNED["batch"]) if is_tuned else 16),
        lambda job: (lines, 3 if is_pretrained else 1),
    )


_GUIDE = "docs/source/en/tasks/sequence_classification.md"
_SIZE = "BertConfig in the size of heedful's recipe"
CLASSIFIERS: Sequence[System] = [
    trainer("trainer", f"{_GUIDE}: rate 2e-5, batches of 16, 2 epochs; {_SIZE}", is_tuned=False),
    trainer("trainer-tuned", f"{_GUIDE} with the settings of `classification`; {_SIZE}"),
    trainer(
        "trainer-pretrained",
        f"the same after a masked language model with the settings of `masked-lm`; {_SIZE}; steps "
        f"by the speed of {PROBE} before",
        is_pretrained=True,
    ),
]
