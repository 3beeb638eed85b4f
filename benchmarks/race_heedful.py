"""heedful in the race of translators: its command and its shipped recipes, as a user runs them."""

import json
import sys
from pathlib import Path

from heedful.training.events import StepDone
from heedful.training.listeners import read_log
from race_clock import Clock, timed_lines
from race_peers import LOG, Job, Progress, System, last, run

HEEDFUL = [sys.executable, "-m", "heedful"]
# The recipes for texts of one's own. That of software masks numbers, placeholders and tags.
RECIPES = {"multi30k": "translation", "libreoffice": "localization"}
# Of the time after the dry run, for steps. The rest is for evaluations, the average of checkpoints
# and the start of the program; a run that is slower than its dry run ends by --minutes.
STEPS_SHARE = 0.95
RESERVE = 60.0  # seconds for the last evaluation, which --minutes does not count
RUN = "run"


def race(clock: Clock, job: Job) -> None:
    """Measure the speed by a dry run, then train as many steps as the time allows.

    The schedule of the learning rate ends with the last step, so the number of steps is given.
    """
    command = train_command(job)
    run(clock, job, [*command, "--dry-run", "--json"])
    left = clock.limit - clock.used
    if left <= 0:
        return
    reserve = min(RESERVE, 0.1 * left)
    steps = 4 if job.is_quick else planned_steps(dry_run_output(job.folder / LOG), left - reserve)
    minutes = f"{(left - reserve) / 60:.2f}"
    ends = ["--steps", str(steps), "--minutes", minutes, "--out", RUN]
    run(clock, job, [*command, *ends], lambda: checkpoints(job.folder))


def train_command(job: Job) -> list[str]:
    """`heedful train` with the data, and nothing else that a recipe can say."""
    corpus = job.corpus
    sides = {"src": True, "tgt": False}
    keys = {key: corpus.file("valid", side) for key, side in sides.items()}
    settings = [f"data.valid.{key}={path}" for key, path in keys.items()]
    if corpus.name == "libreoffice":
        settings += [f"data.train.file={job.data / 'train.tmx.gz'}"]
        settings += [f"data.src_language={corpus.source}", f"data.tgt_language={corpus.target}"]
    else:
        paths = {key: corpus.file("train", side) for key, side in sides.items()}
        settings += [f"data.train.{key}={path}" for key, path in paths.items()]
    if job.threads == 1:
        settings.append("training.parallel=none")
    if job.is_quick:
        from runs import QUICK  # it imports torch, which only the smoke test needs here

        settings += [line for line in QUICK if not line.startswith("training.max_steps")]
    words = [word for setting in settings for word in ("--set", setting)]
    return [*HEEDFUL, "train", RECIPES[corpus.name], *words]


def planned_steps(dry_run: str, seconds: float, share: float = STEPS_SHARE) -> int:
    """The steps for a time, by the output of `--dry-run --json`; at most those of the recipe."""
    estimate = json.loads(dry_run[dry_run.index("{") : dry_run.rindex("}") + 1])
    steps = int(share * seconds / estimate["seconds_per_step"])
    return max(1, min(steps, estimate["total_steps"] or steps))


def dry_run_output(log: Path) -> str:
    """The output of the last command in the log of a race."""
    lines = [text for _, text in timed_lines(log)]
    start = max(index for index, text in enumerate(lines) if text.startswith("$ "))
    return "\n".join(lines[start + 1 :])


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


def decode(job: Job, snapshot: Path, source: Path, out: Path) -> list[str]:
    """The command that translates a file."""
    return [*HEEDFUL, "translate", str(snapshot), "-i", str(source), "-o", str(out)]


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


def configuration(job: Job) -> tuple[int, int]:
    """No file, and two commands: the dry run and the training."""
    return 0, 2


SYSTEM = System(
    "heedful",
    "",
    "the recipes for one's own texts: `translation`, whose settings were chosen on Multi30k, and "
    "for software `localization`, as shipped; "
    "--steps by the speed that --dry-run measures",
    race,
    last,
    decode,
    False,
    progress,
    configuration,
)
