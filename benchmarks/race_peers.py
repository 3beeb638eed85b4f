"""The peers of the race of translators: how each is installed, configured, run and read.

A peer runs in two configurations: as its documentation has it for small data, and `-tiny`, in the
size that heedful's recipe has too.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from heedful.training.optimizer import has_fast_bf16
from race_clock import Clock, timed_lines

# What JoeyNMT's script of vocabularies and eole's recipe run by spm_train: one model of
# both languages. The files that it writes are PREFIX.model and PREFIX.vocab.
SENTENCEPIECE = (
    "import sys, sentencepiece as s; s.SentencePieceTrainer.Train(' '.join(sys.argv[1:]))"
)
SPECIALS = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}
# Transformer-Tiny, which Wu, Kong, Bi, Li and Kao 2021, "Good for Misconceived Reasons", have
# tuned on Multi30k: 4 + 4 layers, rate 0.005, dropout 0.3, batches of 4,096 tokens, and a
# vocabulary of 10,000 in common. The dropout here is that of heedful's recipe: peers learn faster
# with less than 0.3 (docs/log.md).
TINY = {"layers": 4, "width": 128, "hidden": 256, "heads": 4}
TINY_RATE, TINY_DROPOUT = 0.005, 0.2
# Steps of warm-up, of all schedules with one. The sources have 2,000 to 4,000, which is more than
# some races have steps; the rate at the end of the warm-up is that of the source.
WARMUP = 200
LONGEST = 256  # pieces of a training example; about all have fewer
BEAM = 5  # of JoeyNMT's configurations, eole's recipes, and heedful's default


@dataclass(frozen=True)
class Corpus:
    """The plain text of a task: `train`, `valid` and `test`, each .SOURCE and .TARGET.

    `source` and `target` are languages or, where that is no translation, other suffixes
    (race_tasks.py).
    """

    name: str
    folder: Path
    source: str
    target: str
    vocabulary: int = 10_000

    def file(self, split: str, is_source: bool) -> Path:
        """The file of one side of a split."""
        return self.folder / f"{split}.{self.source if is_source else self.target}"


@dataclass(frozen=True)
class Progress:
    """A line of a training log: seconds of the race, step, loss in nats or None, tokens/s."""

    seconds: float
    step: int
    loss: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class Job:
    """The interpreter, folders and text of a system in a race.

    Attributes:
        python: the interpreter of the system's environment.
        folder: of the race of this system; the commands run in it.
        data: the folder that the text comes from.
    """

    python: Path
    folder: Path
    corpus: Corpus
    data: Path
    threads: int
    is_quick: bool = False


@dataclass(frozen=True)
class System:
    """A system of the race.

    Attributes:
        environment: name of its virtual environment; empty: that of this program.
        settings: where its settings come from, as Markdown.
        race: runs its commands under the clock; raises RuntimeError if one fails.
        best: the snapshot that the tool itself takes for its model, of these names.
        decode: a command that evaluates a snapshot on the test set: job, snapshot, source, output;
            it writes a line for each line of the references.
        is_filter: that command reads standard input and writes standard output.
        progress: the lines of its training log.
        configuration: the lines that a user has to write, and the number of commands.
    """

    name: str
    environment: str
    settings: str
    race: Callable[[Clock, Job], None]
    best: Callable[[Job, Sequence[str]], str]
    decode: Callable[[Job, Path, Path, Path], list[str]]
    is_filter: bool
    progress: Callable[[Job], list[Progress]]
    configuration: Callable[[Job], tuple[int, int]]


LOG = "race.log"
SNAPSHOTS = "snapshots"


def peer(
    name: str,
    environment: str,
    settings: str,
    plan: Callable[[Job], tuple[dict[str, Any], list[list[str]]]],
    checkpoints: Callable[[Path], dict[str, list[Path]]],
    decode: Callable[[Job, Path, Path, Path], list[str]],
    pattern: re.Pattern[str],
    *,
    best: Callable[[Job, Sequence[str]], str],
    is_filter: bool = False,
) -> System:
    """A system that is one configuration and some commands, the last of which trains.

    Args:
        plan: for a job the configuration, and the commands.
        checkpoints: for the folder of a race the newest complete checkpoint: files by name.
        pattern: of a line of its training log: step, loss, rate.
    """

    def race(clock: Clock, job: Job) -> None:
        config, commands = plan(job)
        (job.folder / "config.yaml").write_text(dump(config), encoding="utf-8")
        for command in commands:
            run(clock, job, command, lambda: checkpoints(job.folder))

    def configuration(job: Job) -> tuple[int, int]:
        config, commands = plan(job)
        return len(dump(config).splitlines()), len(commands)

    return System(
        name,
        environment,
        settings,
        race,
        best,
        decode,
        is_filter,
        lambda job: read_progress(job.folder / LOG, pattern),
        configuration,
    )


def run(
    clock: Clock,
    job: Job,
    command: Sequence[str],
    checkpoints: Callable[[], dict[str, list[Path]]] | None = None,
) -> None:
    """Run a command of a system, if there is time left; raises RuntimeError if it fails."""
    if clock.used >= clock.limit:
        return
    into = job.folder / SNAPSHOTS
    status = clock.run(command, cwd=job.folder, checkpoints=checkpoints, into=into)
    if status:
        lines = [text.strip() for _, text in timed_lines(job.folder / LOG) if text.strip()]
        # The error of a traceback; behind it, a bar of progress may go on.
        errors = [text for text in lines if re.match(r"[\w.]*(Error|Exception)\b", text)]
        raise RuntimeError(f"exit status {status}: {(errors or lines)[-1]}")


def read_progress(log: Path, pattern: re.Pattern[str]) -> list[Progress]:
    """The lines of a log that match the pattern; without a group `rate`, they have none."""
    found = ((seconds, pattern.search(text)) for seconds, text in timed_lines(log))
    has_rate = "rate" in pattern.groupindex
    return [
        Progress(
            seconds,
            int(match["step"]),
            float(match["loss"]),
            float(match["rate"]) if has_rate else None,
        )
        for seconds, match in found
        if match
    ]


def sentencepiece(job: Job, ids: dict[str, int]) -> list[str]:
    """The command that trains a common vocabulary, as joeynmt/scripts/build_vocab.py does."""
    corpus = job.corpus
    files = ",".join(str(corpus.file("train", side)) for side in (True, False))
    options = [
        f"--input={files}",
        "--model_prefix=subwords",
        "--model_type=unigram",
        f"--vocab_size={corpus.vocabulary}",
        "--character_coverage=1.0",
        *(f"--{name}_piece={SPECIALS[name]}" for name in ids),
        *(f"--{name}_id={number}" for name, number in ids.items()),
        "--vocabulary_output_piece_score=false",
    ]
    return [str(job.python), "-c", SENTENCEPIECE, *options]


def joeynmt(job: Job, *, is_tiny: bool) -> tuple[dict[str, Any], list[list[str]]]:
    """JoeyNMT's configuration and commands.

    Sources: configs/iwslt14_deen_bpe.yaml of JoeyNMT 2.3 (model, training, search), and
    configs/iwslt14_deen_sp.yaml (SentencePiece with a vocabulary in common; its optional
    pretokenizer is left out, since SentencePiece restores spaces and quotation marks exactly).
    Changed for the corpora: the vocabulary, which is 32,000 there for 160,000 pairs; text is not
    lowercased; validation at least once an epoch, as docs/source/faq.rst has it, on 200 pairs
    (`sample_dev_subset` of configs/transformer_small.yaml) as in heedful's recipes: decoding takes
    minutes on a CPU.
    """

    corpus = job.corpus

    def side(language: str) -> dict[str, Any]:
        return {
            "lang": language,
            "max_length": LONGEST,
            "lowercase": False,
            "normalize": False,
            "level": "bpe",
            "voc_limit": corpus.vocabulary,
            "voc_min_freq": 1,
            "voc_file": "subwords.vocab",
            "tokenizer_type": "sentencepiece",
            "tokenizer_cfg": {"model_file": "subwords.model", "model_type": "unigram"},
        }

    def stack() -> dict[str, Any]:
        width = TINY["width"] if is_tiny else 256
        return {
            "type": "transformer",
            "num_layers": TINY["layers"] if is_tiny else 6,
            "num_heads": 4,
            "embeddings": {"embedding_dim": width, "scale": True, "dropout": 0.0},
            "hidden_size": width,
            "ff_size": TINY["hidden"] if is_tiny else 1024,
            "dropout": TINY_DROPOUT if is_tiny else 0.3,
            "layer_norm": "pre",
            "activation": "relu",
        }

    # The source has a plateau schedule here, which lowers the rate after five validations that are
    # no better; JoeyNMT 2.3.0 gives it an argument (verbose) that torch no longer has. Without a
    # schedule it does not start, so that the constant rate is one that decays by a factor of 1.
    schedule: dict[str, Any] = {
        "scheduling": "exponential",
        "decrease_factor": 1.0,
        "learning_rate": 0.0003,
    }
    if is_tiny:
        schedule = {
            "scheduling": "warmupinversesquareroot",  # of configs/iwslt14_deen_sp.yaml
            "learning_rate_warmup": WARMUP,
            "learning_rate": TINY_RATE,
        }
    every = 100 if is_tiny else 60
    if corpus.name == "libreoffice":
        every *= 5  # its validation takes as long as 100 steps, and an epoch is longer
    config = {
        "name": corpus.name,
        "joeynmt_version": "2.3.0",
        "model_dir": "model",
        "use_cuda": False,
        "random_seed": 42,
        "data": {
            "train": str(corpus.folder / "train"),
            "dev": str(corpus.folder / "valid"),
            "dataset_type": "plain",
            "sample_dev_subset": 20 if job.is_quick else 200,
            "src": side(corpus.source),
            "trg": side(corpus.target),
            "special_symbols": {
                **{f"{name}_token": token for name, token in SPECIALS.items()},
                **{f"{name}_id": number for number, name in enumerate(SPECIALS)},
            },
        },
        "testing": {
            "n_best": 1,
            "beam_size": BEAM,
            "beam_alpha": 1.0,
            "batch_size": 1024,
            "batch_type": "token",
            # No `max_output_length`: the default is 1.5 times the longest source of a batch.
            "eval_metrics": ["bleu"],
            "sacrebleu_cfg": {"tokenize": "13a"},
        },
        "training": {
            "optimizer": "adamw",
            "normalization": "tokens",
            "adam_betas": [0.9, 0.98] if is_tiny else [0.9, 0.999],
            **schedule,
            "loss": "crossentropy",
            "learning_rate_min": 1e-8,
            "weight_decay": 0.0,
            "label_smoothing": 0.1,
            "batch_size": 4096,
            "batch_type": "token",
            "early_stopping_metric": "bleu",
            "epochs": 1000,
            # JoeyNMT refuses a first number that is no multiple of the second.
            "validation_freq": 5 if job.is_quick else every,
            "logging_freq": 5 if job.is_quick else 20,
            "shuffle": True,
            "print_valid_sents": [0],
            "keep_best_ckpts": 5,
        },
        "model": {
            "initializer": "xavier_uniform",
            "embed_initializer": "xavier_uniform",
            "embed_init_gain": 1.0,
            "init_gain": 1.0,
            "bias_initializer": "zeros",
            "tied_embeddings": True,
            "tied_softmax": True,
            "encoder": stack(),
            "decoder": stack(),
        },
    }
    ids = {name: number for number, name in enumerate(SPECIALS)}
    commands = [
        sentencepiece(job, ids),
        [str(job.python), "-m", "joeynmt", "train", "config.yaml", "--skip-test"],
    ]
    return config, commands


def joeynmt_checkpoints(folder: Path) -> dict[str, list[Path]]:
    """JoeyNMT links `latest.ckpt` once a checkpoint is complete."""
    latest = folder / "model" / "latest.ckpt"
    name = latest.resolve().name if latest.is_symlink() else ""
    step = name.removesuffix(".ckpt")
    return {f"step-{int(step):08}": [latest.resolve()]} if step.isdigit() else {}


def joeynmt_best(job: Job, names: Sequence[str]) -> str:
    """The checkpoint that JoeyNMT links as the best of its validations."""
    step = (job.folder / "model" / "best.ckpt").resolve().stem
    best = f"step-{int(step):08}" if step.isdigit() else ""
    return best if best in names else max(names)


def joeynmt_decode(job: Job, snapshot: Path, source: Path, out: Path) -> list[str]:
    """The command that translates with a checkpoint, by a copy of the configuration.

    It prints: `translate -o` of JoeyNMT 2.3.0 ends in an AttributeError (n_best).
    """
    config = yaml.safe_load((job.folder / "config.yaml").read_text(encoding="utf-8"))
    (checkpoint,) = snapshot.glob("*.ckpt")
    config["testing"]["load_model"] = str(checkpoint)
    path = job.folder / "translate.yaml"
    path.write_text(dump(config), encoding="utf-8")
    return [str(job.python), "-m", "joeynmt", "translate", path.name]


JOEYNMT_LINE = re.compile(
    r"Step:\s*(?P<step>\d+), Batch Loss:\s*(?P<loss>[\d.]+|nan), .*"
    r"Tokens per Sec:\s*(?P<rate>\d+)"
)


def eole(job: Job, *, is_tiny: bool) -> tuple[dict[str, Any], list[list[str]]]:
    """Eole's configuration and commands.

    Sources: recipes/wmt17/wmt17_ende_spm.yaml of eole 0.6 (vocabulary in common, SentencePiece,
    optimizer, schedule, label smoothing), docs/docusaurus_tsx/docs/quickstart.md (the default size
    of `architecture: transformer`, a bucket for small data). Changed for the corpora: the
    vocabulary; one batch a step and no minimum frequency, which are for millions of pairs and big
    GPUs; checkpoints more often; no BLEU of validation text, which costs time; the warm-up; mixed
    precision in place of weights in bf16, and 32-bit numbers where the processor has no bf16.
    """
    corpus = job.corpus
    size: dict[str, Any] = {
        "hidden_size": 512,  # the default, with 2 + 2 layers and 8 heads
        "embeddings": {"word_vec_size": 512, "position_encoding_type": "SinusoidalInterleaved"},
    }
    if is_tiny:
        size = {
            "layers": TINY["layers"],
            "hidden_size": TINY["width"],
            "heads": TINY["heads"],
            "transformer_ff": TINY["hidden"],
            "embeddings": {
                "word_vec_size": TINY["width"],
                "position_encoding_type": "SinusoidalInterleaved",
            },
        }
    # Noam: learning_rate · width^-0.5 · warmup^-0.5 at the end of the warm-up. The recipe has 2 and
    # 4,000 steps; with the default width that is:
    rate = TINY_RATE if is_tiny else 2 * (512 * 4000) ** -0.5
    every = 5 if job.is_quick else 100 if is_tiny else 50
    dropout = TINY_DROPOUT if is_tiny else 0.1
    config = {
        "save_data": "data",
        "overwrite": True,
        "seed": 1234,
        "report_every": 5 if job.is_quick else 20,
        "src_vocab": "vocab.shared",
        "tgt_vocab": "vocab.shared",
        "src_vocab_size": corpus.vocabulary,
        "tgt_vocab_size": corpus.vocabulary,
        "vocab_size_multiple": 8,
        "share_vocab": True,
        "n_sample": 0,
        "data": {
            "corpus_1": {
                "path_src": str(corpus.file("train", True)),
                "path_tgt": str(corpus.file("train", False)),
            },
            "valid": {
                "path_src": str(corpus.file("valid", True)),
                "path_tgt": str(corpus.file("valid", False)),
            },
        },
        "transforms": ["sentencepiece", "filtertoolong"],
        "transforms_configs": {
            "sentencepiece": {
                "src_subword_model": "subwords.model",
                "tgt_subword_model": "subwords.model",
            },
            "filtertoolong": {"src_seq_length": LONGEST, "tgt_seq_length": LONGEST},
        },
        "training": {
            "model_path": "model",
            "keep_checkpoint": 5,
            "save_checkpoint_steps": every,
            "valid_steps": every,
            "train_steps": 1_000_000,
            "world_size": 1,
            "gpu_ranks": [],
            "batch_type": "tokens",
            "batch_size": 4096,
            "valid_batch_size": 1024,
            "batch_size_multiple": 8,
            "compute_dtype": "bf16" if has_fast_bf16(torch.device("cpu")) else "fp32",
            "optim": "adamw",
            "learning_rate": round(rate * (size["hidden_size"] * WARMUP) ** 0.5, 3),
            "warmup_steps": WARMUP,
            "decay_method": "noam",
            "adam_beta2": 0.98 if is_tiny else 0.998,
            "bucket_size": 29_000,
            "num_workers": 0,
            "dropout_steps": [0],
            "dropout": [dropout],
            "attention_dropout": [0.1],
            "max_grad_norm": 0,
            "label_smoothing": 0.1,
            "param_init_method": "xavier_uniform",
            "normalization": "tokens",
        },
        "model": {
            "architecture": "transformer",
            "share_decoder_embeddings": True,
            "share_embeddings": True,
            **size,
        },
    }
    program = str(job.python.with_name("eole"))
    commands = [
        sentencepiece(job, {}),
        [program, "build_vocab", "--config", "config.yaml", "--n_sample", "-1"],
        [program, "train", "--config", "config.yaml"],
    ]
    return config, commands


def eole_checkpoints(folder: Path) -> dict[str, list[Path]]:
    """Eole writes a folder for each checkpoint, and links its `config.json` at the end."""
    config = folder / "model" / "config.json"
    step = config.resolve().parent.name.removeprefix("step_") if config.is_symlink() else ""
    if not step.isdigit():
        return {}
    files = (path for path in config.resolve().parent.iterdir() if path.name != "optimizer.pt")
    return {f"step-{int(step):08}": sorted(files)}


def last(job: Job, names: Sequence[str]) -> str:
    """The newest checkpoint, for tools without model selection."""
    return max(names)


def eole_decode(job: Job, snapshot: Path, source: Path, out: Path) -> list[str]:
    """The command that translates with a checkpoint."""
    program = str(job.python.with_name("eole"))
    options = {"model_path": snapshot, "src": source, "output": out, "beam_size": BEAM}
    options |= {"batch_size": 1024, "batch_type": "tokens"}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [program, "predict", *words]


EOLE_LINE = re.compile(
    r"Step\s+(?P<step>\d+)\s*/\s*\d+; .*xent:\s*(?P<loss>[\d.]+|nan);.*?"
    r"\d+/\s*(?P<rate>\d+) tok/s"
)


def dump(config: dict[str, Any]) -> str:
    """A configuration as a user writes it: a key a line."""
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def tokens_per_second(lines: Sequence[Progress]) -> float | None:
    """The median rate of a training log."""
    rates = [line.tokens_per_second for line in lines if line.tokens_per_second is not None]
    return median(rates) if rates else None


_TINY_NOTE = (
    "in the size and with the rate of Transformer-Tiny (Wu et al. 2021, for Multi30k) and the "
    "dropout of heedful's recipe"
)
PEERS = [
    peer(
        "joeynmt",
        "joeynmt",
        "configs/iwslt14_deen_bpe.yaml: 6 + 6 layers of 256; the rate is constant, "
        "since the plateau schedule of JoeyNMT 2.3 fails with this torch",
        partial(joeynmt, is_tiny=False),
        joeynmt_checkpoints,
        joeynmt_decode,
        JOEYNMT_LINE,
        best=joeynmt_best,
        is_filter=True,
    ),
    peer(
        "joeynmt-tiny",
        "joeynmt",
        f"configs/iwslt14_deen_sp.yaml {_TINY_NOTE}",
        partial(joeynmt, is_tiny=True),
        joeynmt_checkpoints,
        joeynmt_decode,
        JOEYNMT_LINE,
        best=joeynmt_best,
        is_filter=True,
    ),
    peer(
        "eole",
        "eole",
        "recipes/wmt17/wmt17_ende_spm.yaml with the default size of `architecture: transformer`, "
        "as in the quickstart: 2 + 2 layers of 512",
        partial(eole, is_tiny=False),
        eole_checkpoints,
        eole_decode,
        EOLE_LINE,
        best=last,
    ),
    peer(
        "eole-tiny",
        "eole",
        f"recipes/wmt17/wmt17_ende_spm.yaml {_TINY_NOTE}",
        partial(eole, is_tiny=True),
        eole_checkpoints,
        eole_decode,
        EOLE_LINE,
        best=last,
    ),
]
