"""The peers of the race of language models: nanoGPT and litgpt."""

import json
import pickle
import re
import shutil
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from heedful.training.optimizer import has_fast_bf16
from race_clock import Clock, timed_lines
from race_environments import SOURCE
from race_logits import CONTEXT
from race_peers import LOG, Job, Progress, System, dump, last, read_progress, run

SCRIPT = Path(__file__).with_name("race_logits.py")
# nanoGPT's settings for a CPU, of its README and config/train_shakespeare_char.py.
WINDOWS, LAYERS, WIDTH, HEADS, ITERATIONS = 12, 4, 128, 4, 2_000
PEAK, END, WARMUP, BETA2 = 1e-3, 1e-4, 100, 0.99
EVALUATE_EVERY = 250
PROBE = 60  # iterations by which the speed is measured
SHARE = 0.9  # of the time that is left, for iterations; the rest is for evaluations
WARM_START = 0.5  # of the probe's start, which compiles what the training finds compiled


def logits(system: str, job: Job, snapshot: Path, source: Path, out: Path) -> list[str]:
    """The command that writes the losses of the windows of a text."""
    python = job.python if job.python.is_file() else Path(sys.executable)
    return [str(python), str(SCRIPT), system, str(snapshot), str(source), str(out)]


def characters(job: Job) -> list[str]:
    """The vocabulary: the characters of the whole text, as nanoGPT's prepare.py has it."""
    files = [job.corpus.file(split, True) for split in ("train", "valid", "test")]
    return sorted(set("".join(file.read_text(encoding="utf-8") for file in files)))


def planned(job: Job, seconds: float, pattern: re.Pattern[str], script: str) -> int:
    """Iterations for a time, by the milliseconds in the last command's log; few if it is quick."""
    if job.is_quick:
        return 4
    lines = timed_lines(job.folder / LOG)
    start = max(index for index, (_, text) in enumerate(lines) if text.startswith("$ "))
    found = [(at, pattern.search(text)) for at, text in lines[start:]]
    times = [(at, float(match["ms"])) for at, match in found if match]
    if not times:
        raise RuntimeError(f"{script} has printed no time of an iteration")
    left = seconds - WARM_START * (times[0][0] - lines[start][0])
    # The first half holds the compilation.
    return max(1, int(1000 * SHARE * left / median(ms for _, ms in times[len(times) // 2 :])))


def progress(job: Job, pattern: re.Pattern[str], characters_per_step: int) -> list[Progress]:
    """The lines of the log of the training that is the last command, about two seconds apart."""
    starts = [at for at, text in timed_lines(job.folder / LOG) if text.startswith("$ ")]
    found: list[Progress] = []
    for line in read_progress(job.folder / LOG, pattern):
        if line.seconds < starts[-1] or (found and line.seconds < found[-1].seconds + 2):
            continue
        rate = None
        if found:
            steps = line.step - found[-1].step
            rate = steps * characters_per_step / (line.seconds - found[-1].seconds)
        found.append(replace(line, tokens_per_second=rate))
    return found


NANOGPT_LINE = re.compile(r"^iter (?P<step>\d+): loss (?P<loss>[\d.]+), time (?P<ms>[\d.]+)ms")
_FILES = ("train.py", "model.py", "configurator.py", "config")


def nanogpt_command(job: Job, iterations: int, *more: str) -> list[str]:
    """The README's command for a computer without a GPU."""
    options = {
        "device": "cpu",
        "compile": False,
        "eval_iters": 20,
        "log_interval": 1,
        "block_size": CONTEXT,
        "batch_size": WINDOWS,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_embd": WIDTH,
        "max_iters": iterations,
        "lr_decay_iters": iterations,
        "dropout": 0.0,
    }
    words = [f"--{key}={value}" for key, value in options.items()]
    return [str(job.python), "train.py", "config/train_shakespeare_char.py", *words, *more]


def nanogpt_race(clock: Clock, job: Job, *, is_long: bool) -> None:
    """Train as the README has it, or with as many iterations as the time allows."""
    source = job.python.parents[1] / SOURCE
    for name in _FILES:
        copy = shutil.copytree if (source / name).is_dir() else shutil.copy2
        copy(source / name, job.folder / name)
    nanogpt_data(job)
    iterations, more = ITERATIONS, []
    if is_long:
        run(clock, job, nanogpt_command(job, PROBE, "--out_dir=probe", "--eval_iters=1"))
        if clock.used >= clock.limit:
            return
        iterations = planned(job, clock.limit - clock.used, NANOGPT_LINE, "train.py")
        # It saves only after an evaluation: the last iteration has one.
        iterations = max(EVALUATE_EVERY, iterations // EVALUATE_EVERY * EVALUATE_EVERY)
    if job.is_quick:
        iterations, more = 4, ["--eval_interval=2", "--eval_iters=1"]
    command = nanogpt_command(job, iterations, *more)
    run(clock, job, command, lambda: nanogpt_checkpoints(job.folder))


def nanogpt_data(job: Job) -> None:
    """The files that data/shakespeare_char/prepare.py writes, for the parts of the race's text."""
    folder = job.folder / "data" / "shakespeare_char"
    folder.mkdir(parents=True, exist_ok=True)
    known = characters(job)
    index = {character: number for number, character in enumerate(known)}
    for split, name in (("train", "train.bin"), ("valid", "val.bin")):
        text = job.corpus.file(split, True).read_text(encoding="utf-8")
        (folder / name).write_bytes(array("H", (index[c] for c in text)).tobytes())
    meta = {"vocab_size": len(known), "stoi": index, "itos": dict(enumerate(known))}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def nanogpt_checkpoints(folder: Path) -> dict[str, list[Path]]:
    """A copy of ckpt.pt, which is overwritten in place; complete when the log goes on behind it."""
    weights, step, name = folder / "out-shakespeare-char" / "ckpt.pt", "", ""
    for _, text in timed_lines(folder / LOG):
        if found := re.match(r"step (\d+): train loss", text):
            step = found[1]
        elif text.startswith("saving checkpoint to out-shakespeare-char"):
            name = f"step-{int(step):08}"
            is_complete = False
        elif name and text.startswith("iter "):
            is_complete = True
    if not name or not is_complete:
        return {}
    copy = folder / "copies" / f"{name}.pt"
    if not copy.is_file():
        copy.parent.mkdir(exist_ok=True)
        shutil.copy2(weights, copy)
    return {name: [copy]}


def nanogpt(name: str, settings: str, *, is_long: bool) -> System:
    """nanoGPT as a system: no file is written by hand, and train.py is run once or twice."""
    return System(
        name,
        "nanogpt",
        settings,
        partial(nanogpt_race, is_long=is_long),
        last,  # it saves a checkpoint only if that is the best so far
        partial(logits, "nanogpt"),
        False,
        lambda job: progress(job, NANOGPT_LINE, WINDOWS * CONTEXT),
        lambda job: (0, 2 if is_long else 1),
    )


BEGIN = "<s>"
LITGPT_LINE = re.compile(
    r"\| iter (?P<iteration>\d+) step (?P<step>\d+) \| loss train: (?P<loss>[\d.]+),.*"
    r"iter time: (?P<ms>[\d.]+) ms"
)


def litgpt_config(job: Job, iterations: int, *, is_tiny: bool) -> dict[str, Any]:
    """The configuration of `litgpt pretrain`.

    Sources: "Pretrain on custom data" of tutorials/pretrain.md (the model, the data module
    TextFiles, AdamW with its rate), config_hub/pretrain/debug.yaml (warm-up, weight decay). Changed
    for the text: characters; batches of nanoGPT's CPU settings, since the default of 512 windows is
    a twenty-seventh of the text; mixed precision where the processor has bf16.
    """
    name = "race"
    size = {"n_layer": LAYERS if is_tiny else 6, "n_embd": WIDTH, "n_head": HEADS}
    count = len(characters(job)) + 1  # and the begin of a text
    every = 2 if job.is_quick else EVALUATE_EVERY
    return {
        "model_name": name,
        "model_config": {
            "name": name,
            "block_size": CONTEXT,
            **size,
            "vocab_size": count,
            "padded_vocab_size": count,
        },
        "out_dir": "out",
        "precision": "bf16-mixed" if has_fast_bf16(torch.device("cpu")) else "32-true",
        "tokenizer_dir": "tokenizer",
        "logger_name": "csv",
        "data": {
            "class_path": "litgpt.data.TextFiles",
            "init_args": {
                "train_data_path": "text/train",
                "val_data_path": "text/valid",
                "num_workers": 0,  # a process of its own would start for every validation
            },
        },
        "train": {
            "save_interval": every,
            "global_batch_size": WINDOWS,
            "micro_batch_size": WINDOWS,
            "lr_warmup_steps": WARMUP,
            "max_tokens": iterations * WINDOWS * CONTEXT,
            "max_norm": 1.0,
            "min_lr": END if is_tiny else 6e-5,
        },
        "eval": {"interval": every, "max_iters": 20, "final_validation": False},
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {
                "lr": PEAK if is_tiny else 5e-3,
                "weight_decay": 0.1,
                "betas": [0.9, BETA2 if is_tiny else 0.95],
            },
        },
    }


def litgpt_race(clock: Clock, job: Job, *, is_tiny: bool) -> None:
    """Measure the speed, then train as many iterations as the time allows."""
    for split in ("train", "valid"):
        folder = job.folder / "text" / split
        folder.mkdir(parents=True)
        shutil.copy2(job.corpus.file(split, True), folder / "text.txt")
    litgpt_tokenizer(job)
    config = partial(litgpt_config, job, is_tiny=is_tiny)
    pretrain = [str(job.python.with_name("litgpt")), "pretrain", "race", "--config"]
    write = (job.folder / "probe.yaml").write_text
    probe = config(4 if job.is_quick else PROBE)
    write(dump({**probe, "out_dir": "probe"}), encoding="utf-8")
    run(clock, job, [*pretrain, "probe.yaml"])
    shutil.rmtree(job.folder / "probe", ignore_errors=True)
    if clock.used >= clock.limit:
        return
    iterations = planned(job, clock.limit - clock.used, LITGPT_LINE, "litgpt pretrain")
    (job.folder / "config.yaml").write_text(dump(config(iterations)), encoding="utf-8")
    run(clock, job, [*pretrain, "config.yaml"], lambda: litgpt_checkpoints(job.folder))


def litgpt_tokenizer(job: Job) -> None:
    """A tokenizer of characters in the format of `tokenizers`, which litgpt reads."""
    folder = job.folder / "tokenizer"
    folder.mkdir()
    vocabulary = {token: number for number, token in enumerate([*characters(job), BEGIN])}
    begin = {"id": vocabulary[BEGIN], "content": BEGIN, "special": True, "normalized": False}
    begin |= {"single_word": False, "lstrip": False, "rstrip": False}
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [begin],
        "normalizer": None,
        "pre_tokenizer": {**split, "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": " "},
    }
    # TextFiles puts the token of the begin before each file.
    settings = {
        "bos_token": BEGIN,
        "add_bos_token": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, written in (("tokenizer", content), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(written), encoding="utf-8")


def litgpt_checkpoints(folder: Path) -> dict[str, list[Path]]:
    """The folders of checkpoints; model_config.yaml is written last."""
    names = ("lit_model.pth", "model_config.yaml")
    ends = sorted((folder / "out").glob("*/model_config.yaml"))
    found = {}
    for path in ends:
        # `final` has the highest step of all, and no number in its name.
        name = "step-final" if path.parent.name == "final" else path.parent.name
        found[name] = [path.parent / file for file in names]
    return found


def litgpt(name: str, settings: str, *, is_tiny: bool) -> System:
    """litgpt as a system: one file of configuration, and its command twice."""

    def configuration(job: Job) -> tuple[int, int]:
        return len(dump(litgpt_config(job, 1, is_tiny=is_tiny)).splitlines()), 2

    return System(
        name,
        "litgpt",
        settings,
        partial(litgpt_race, is_tiny=is_tiny),
        last,
        partial(logits, "litgpt"),
        False,
        lambda job: progress(job, LITGPT_LINE, WINDOWS * CONTEXT),
        configuration,
    )


_README = 'README.md, "I only have a macbook": 4 layers of 128, windows of 64 characters'
_TUTORIAL = 'tutorials/pretrain.md, "Pretrain on custom data"'
LANGUAGE_MODELS: Sequence[System] = [
    nanogpt("nanogpt", f"{_README}, 2,000 iterations", is_long=False),
    nanogpt(
        "nanogpt-long",
        f"{_README}; iterations by the speed of {PROBE} before",
        is_long=True,
    ),
    litgpt(
        "litgpt",
        f"{_TUTORIAL}: Pythia-14m with 6 layers of 128, rate 0.005; batches of 12 windows of 64 "
        f"characters; iterations by the speed of {PROBE} before",
        is_tiny=False,
    ),
    litgpt(
        "litgpt-tiny",
        f"{_TUTORIAL}: Pythia's block with 4 layers of 128, nanoGPT's rate and batches; iterations "
        f"by the speed of {PROBE} before",
        is_tiny=True,
    ),
]
