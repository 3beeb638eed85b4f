"""heedful in the race: its command and its shipped recipes, as a user runs them."""

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from heedful.training.events import StepDone
from heedful.training.listeners import read_log
from race_clock import Clock, timed_lines
from race_language_models import logits
from race_peers import LOG, Job, Progress, System, last, run

HEEDFUL = [sys.executable, "-m", "heedful"]
# The recipes for texts of one's own. That of software masks numbers, placeholders and tags.
RECIPES = {
    "multi30k": "translation",
    "libreoffice": "localization",
    "shakespeare": "shakespeare-llama",
    "sst2": "classification",
}
# The benchmarks with the settings of a smoke test, if they are not `runs`.
QUICK = {"shakespeare": "shakespeare", "sst2": "sst2"}
MASKED = "masked-lm"  # the recipe of pre-training
# Of the time after the dry run, for steps. The rest is for evaluations, the average of checkpoints
# and the start of the program; a run that is slower than its dry run ends by --minutes.
STEPS_SHARE = 0.95
RESERVE = 60.0  # seconds for the last evaluation, which --minutes does not count
RUN = "run"


def race(clock: Clock, job: Job) -> None:
    """Measure the speed by a dry run, then train as many steps as the time allows.

    The schedule of the learning rate ends with the last step, so the number of steps is given.
    """
    train(clock, job, train_command(job), dry_run(clock, job, train_command(job)))


def race_pretrained(clock: Clock, job: Job) -> None:
    """Train a masked language model of the training text, then the classifier from there.

    The classifier has the steps of its recipe; the masked language model has the time before.
    """
    masked = train_command(job, MASKED)
    classifier = dry_run(clock, job, train_command(job))
    estimate = dry_run(clock, job, masked)
    if clock.used >= clock.limit:
        return
    needed = RESERVE / 2
    if not job.is_quick:
        found = json.loads(classifier)
        needed += found["seconds_per_step"] * found["total_steps"] / STEPS_SHARE
    train(clock, job, masked, estimate, keep_free=needed, out=MASKED)
    command = [*train_command(job), "--init-from", MASKED]
    train(clock, job, command, classifier)


def dry_run(clock: Clock, job: Job, command: list[str]) -> str:
    """The estimate of a dry run, as JSON; empty if the time is over."""
    run(clock, job, [*command, "--dry-run", "--json"])
    return dry_run_output(job.folder / LOG) if clock.used < clock.limit else ""


def train(
    clock: Clock,
    job: Job,
    command: list[str],
    estimate: str,
    *,
    keep_free: float = 0.0,
    out: str = RUN,
) -> None:
    """Train as many steps as the estimate and the time allow, but for `keep_free` seconds."""
    left = clock.limit - clock.used - keep_free
    if left <= 0 or not estimate:
        return
    reserve = min(RESERVE, 0.1 * left)
    # The recipe of the plays is for a minute or two; its schedule is stretched like nanoGPT's.
    is_capped = job.corpus.name != "shakespeare"
    steps = 4 if job.is_quick else planned_steps(estimate, left - reserve, is_capped=is_capped)
    minutes = f"{(left - reserve) / 60:.2f}"
    ends = ["--steps", str(steps), "--minutes", minutes, "--out", out]
    run(clock, job, [*command, *ends], lambda: checkpoints(job.folder))


def train_command(job: Job, recipe: str = "") -> list[str]:
    """`heedful train` with the data, and nothing else that a recipe can say."""
    settings = data_settings(job)
    if job.threads == 1:
        settings.append("training.parallel=none")
    name = RECIPES[job.corpus.name]
    if name == "shakespeare-llama":
        settings.append("expect=[]")  # its loss bands are for another split of the text
    if job.is_quick:
        quick = importlib.import_module(QUICK.get(job.corpus.name, "runs")).QUICK
        settings += [line for line in quick if not line.startswith("training.max_steps")]
    words = [word for setting in settings for word in ("--set", setting)]
    return [*HEEDFUL, "train", recipe or name, *words]


def data_settings(job: Job) -> list[str]:
    """The settings of the data."""
    corpus = job.corpus
    if corpus.name == "shakespeare":
        return [f"data.{split}.text={corpus.file(split, True)}" for split in ("train", "valid")]
    if corpus.name == "sst2":
        return [f"data.{split}.file={corpus.folder / split}.tsv" for split in ("train", "valid")]
    sides = {"src": True, "tgt": False}
    keys = {key: corpus.file("valid", side) for key, side in sides.items()}
    settings = [f"data.valid.{key}={path}" for key, path in keys.items()]
    if corpus.name == "libreoffice":
        settings += [f"data.train.file={job.data / 'train.tmx.gz'}"]
        settings += [f"data.src_language={corpus.source}", f"data.tgt_language={corpus.target}"]
    else:
        paths = {key: corpus.file("train", side) for key, side in sides.items()}
        settings += [f"data.train.{key}={path}" for key, path in paths.items()]
    return settings


def planned_steps(
    dry_run: str, seconds: float, share: float = STEPS_SHARE, *, is_capped: bool = True
) -> int:
    """The steps for a time, by the output of a dry run; if it is capped, those of the recipe."""
    estimate = json.loads(dry_run)
    steps = int(share * seconds / estimate["seconds_per_step"])
    return max(1, min(steps, estimate["total_steps"] or steps) if is_capped else steps)


def dry_run_output(log: Path) -> str:
    """The JSON that the last command in the log of a race, a dry run, has printed."""
    lines = [text for _, text in timed_lines(log)]
    start = max(index for index, text in enumerate(lines) if text.startswith("$ "))
    output = "\n".join(lines[start + 1 :])
    return output[output.index("{") : output.rindex("}") + 1]


def checkpoints(folder: Path) -> dict[str, list[Path]]:
    """The model in the folder of the run: the best so far, replaced whole after an evaluation."""
    run_folder = folder / RUN
    weights = run_folder / "model.safetensors"
    try:
        number = weights.stat().st_mtime_ns
    except FileNotFoundError:
        return {}
    names = ("config.json", "tokenizer.json", "tokenizer.src.json", "tokenizer.tgt.json")
    present = [run_folder / name for name in names if (run_folder / name).is_file()]
    return {f"model-{number}": [weights, *present]}


def decode(
    job: Job, snapshot: Path, source: Path, out: Path, *, command: str = "translate"
) -> list[str]:
    """The command that translates or classifies a file."""
    return [*HEEDFUL, command, str(snapshot), "-i", str(source), "-o", str(out)]


def progress(job: Job) -> list[Progress]:
    """The steps in the run's own log, whose seconds begin with the first step."""
    starts = [seconds for seconds, text in timed_lines(job.folder / LOG) if text.startswith("$ ")]
    path = job.folder / RUN / "log.jsonl"
    events = read_log(path) if path.is_file() else []
    found, before = [], 0.0
    for event in events:
        if isinstance(event, StepDone):
            rate = event.num_tokens / (event.seconds - before)  # of target tokens
            found.append(Progress(starts[-1] + event.seconds, event.step, event.nll, rate))
            before = event.seconds
    return found


def heedful(
    settings: str,
    decode: Callable[[Job, Path, Path, Path], list[str]] = decode,
    *,
    name: str = "heedful",
    race: Callable[[Clock, Job], None] = race,
    commands: int = 2,
) -> System:
    """heedful in one of the races: no file of configuration, a dry run and the training."""
    return System(
        name, "", settings, race, last, decode, False, progress, lambda job: (0, commands)
    )


_BY_SPEED = "--steps by the speed that --dry-run measures"
classify = partial(decode, command="classify")
TRANSLATOR = heedful(
    "the recipes for one's own texts: `translation`, whose settings were chosen on Multi30k, and "
    f"for software `localization`, as shipped; {_BY_SPEED}"
)
LANGUAGE_MODEL = heedful(
    "`shakespeare-llama`, whose settings were chosen on this text (by other parts of it), with as "
    f"many steps as the time allows; {_BY_SPEED}",
    partial(logits, "heedful"),
)
CLASSIFIER = heedful(
    f"`classification`, whose settings were chosen on SST-2, as shipped; {_BY_SPEED}, at most "
    "those of the recipe",
    classify,
)
PRETRAINED = heedful(
    "`masked-lm` on the training text for the time that `classification` leaves, then that from "
    f"there, both as shipped; {_BY_SPEED}, at most those of the recipes",
    classify,
    name="heedful-pretrained",
    race=race_pretrained,
    commands=4,
)
