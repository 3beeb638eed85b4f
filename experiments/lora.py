"""LoRA beside full fine-tuning: one base model of each family, adapted to other texts.

DATA holds the folders multi30k (train, val and test_2016_flickr, .en.gz and .de.gz), tatoeba (train
and val, .en.gz) and sst2 (train.tsv, dev.tsv). Each base is trained, exported to the Hugging Face
format and imported again. On the adaptation's data, all its weights, or low-rank updates of all
linear layers of its blocks, are trained for the same number of steps, with several learning rates
each, of which the validation split selects one.
"""

import gzip
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import heedful
from common import argument_parser, command_line, facts, table, write_results
from heedful.pipelines import parameter_count
from heedful.pipelines.scoring import TextScore
from heedful.zoo.saved import load_tensors
from runs import RUNS, Run, finished_run

ANIMALS = re.compile(
    r"\b(animal|bear|bird|bull|calf|camel|cat|cow|dog|donkey|duck|elephant|fish|goat|horse|kitten"
    r"|monkey|pig|pony|puppy|sheep)s?\b|\b(calves|ponies|puppies)\b",
    re.IGNORECASE,
)
WEIGHTS = "model.safetensors"
METHODS = {
    "full fine-tuning": [],
    "LoRA": ["adapter.rank=16", "adapter.alpha=32", 'adapter.targets=["*"]'],
}
COMMON = [
    "training.max_epochs=null",
    "training.max_minutes=null",
    "training.patience=null",
    "training.average_checkpoints=1",
    "evaluation.num_samples=1",
]
ADAPTATION = [
    *COMMON,
    "model={}",
    "training.optimizer.name=adamw",
    "training.schedule.name=linear",
    "training.schedule.min_lr_ratio=0",
    "training.schedule.warmup_steps=20",
]
QUICK = ["training.max_steps=4", "training.evaluate_every=2", "data.valid_size=0.1"]
QUICK_BASE = [*QUICK, "tokenizer.vocab_size=auto", "model.d_model=16", "model.num_heads=2"]


@dataclass(frozen=True)
class Family:
    """A base model, and an adaptation of it.

    Attributes:
        data: the texts of the base and those of the adaptation, as text.
        base: recipe of the base, and its settings.
        adapted: recipe of the adaptation, and its settings.
        rates: learning rates of each method.
        scores: scores of a run on test splits, by the header of their column.
        metric: value of an evaluation that selects the rate; higher is better for accuracy only.
        head_only: the model to compare with is the base with a trained head, else the base itself.
    """

    data: str
    base: tuple[str, list[str]]
    adapted: tuple[str, list[str]]
    rates: dict[str, list[float]]
    scores: Callable[[Run], dict[str, float]]
    metric: str = "perplexity"
    head_only: bool = False


def main() -> None:
    """Train the missing runs, score them, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder of the three folders")
    parser.add_argument("--runs", type=Path, default=RUNS / "lora", help="the runs")
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=[*FAMILIES], help="default: all"
    )
    arguments = parser.parse_args()
    sections: list[str] = []
    records: dict[str, Any] = {}
    for name in arguments.families:
        folder = arguments.runs / name
        (folder / "texts").mkdir(parents=True, exist_ok=True)
        family = FAMILIES[name](arguments.data, folder / "texts")
        records[name] = compare(family, folder, quick=arguments.quick)
        sections += [f"## {name.capitalize()}", family.data, *section(records[name], family)]
    write_results(
        "lora",
        "LoRA and full fine-tuning",
        [
            "Each base was exported to the Hugging Face format and imported before it was adapted. "
            "Both methods have the same steps and batches; the learning rate of each was selected "
            "on the validation split. One seed.",
            *sections,
            "## Settings",
            facts(
                {
                    "LoRA": ", ".join(METHODS["LoRA"]),
                    "Both methods": ", ".join(ADAPTATION),
                    "heedful": heedful.__version__,
                }
            ),
        ],
        {"families": records},
        directory=arguments.results,
        command=command_line({arguments.data: "DATA", arguments.runs: "RUNS"}),
        packages=("sacrebleu", "tokenizers"),
        made_on="Trained and scored",
    )


def compare(family: Family, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Train the base and all adaptations of it; the scores of the best rate of each method."""
    recipe, settings = family.base
    base = finished_run(recipe, folder / "base", [*settings, *QUICK_BASE * quick])
    imported = folder / "imported"
    if not imported.is_dir():
        heedful.export_hf(base.model(), folder / "hf", overwrite=True)
        heedful.import_hf(folder / "hf", imported)
    recipe, settings = family.adapted
    settings = [f"init_from={imported}", *ADAPTATION, *settings, *QUICK * quick]
    reference = base
    if family.head_only:
        frozen = [*settings, "training.freeze=[embedding,blocks]", *rate(0.01)]
        reference = finished_run(recipe, folder / "head", frozen)
    name = "head only" if family.head_only else "base"
    rows: dict[str, Any] = {name: {"minutes": reference.minutes, **family.scores(reference)}}
    for method, more in METHODS.items():
        runs = {
            value: finished_run(
                recipe, folder / f"{method.split()[0]}-{value}", [*settings, *more, *rate(value)]
            )
            for value in family.rates[method][: 1 if quick else None]
        }
        values = {value: run.end.best[family.metric] for value, run in runs.items()}
        select = max if family.metric == "accuracy" else min
        best = select(values, key=lambda value: values[value])
        rows[method] = {
            "rate": best,
            "validation": values,
            "parameters": parameter_count(runs[best].model().net),
            "trained": trained_parameters(runs[best]),
            "minutes": runs[best].minutes,
            **family.scores(runs[best]),
        }
    return {
        "parameters": parameter_count(base.model().net),
        "base_unchanged": is_unchanged(imported, [*runs.values()]),
        "rows": rows,
    }


def is_unchanged(base: Path, adapters: Sequence[Run]) -> bool:
    """True if the base's weights have the SHA-256 that each adapter's run recorded at its start."""
    digest = hashlib.sha256((base / WEIGHTS).read_bytes()).hexdigest()
    contents = [json.loads((run.directory / "config.json").read_text()) for run in adapters]
    return all(content["base"]["sha256"] == digest for content in contents)


def rate(value: float) -> list[str]:
    """The setting of a learning rate."""
    return [f"training.schedule.learning_rate={value}"]


def trained_parameters(run: Run) -> int:
    """The number of parameters that a run trained: those in its weight file."""
    return sum(tensor.numel() for tensor in load_tensors(run.directory / WEIGHTS).values())


def section(record: dict[str, Any], family: Family) -> list[str]:
    """The table of a family and the facts below it."""
    rows = record["rows"]
    headers = [key for key in next(iter(rows.values())) if key != "minutes"]
    lines = []
    for name, row in rows.items():
        share = "–"
        if "trained" in row:
            share = f"{row['trained']:,} ({row['trained'] / row['parameters']:.1%})"
        scores = [f"{row[key]:.2f}" for key in headers]
        lines.append([name, share, row.get("rate", "–"), *scores, f"{row['minutes']:.1f}"])
    rates = "; ".join(
        f"{name}: " + ", ".join(f"{value:g} ({found:.4g})" for value, found in tried.items())
        for name, row in rows.items()
        if (tried := row.get("validation"))
    )
    same = "bit-equal" if record["base_unchanged"] else "changed"
    return [
        table(["", "trained parameters", "learning rate", *headers, "minutes"], lines),
        facts(
            {
                f"Learning rates ({family.metric} on validation)": rates,
                "Base": f"{record['parameters']:,} parameters; {described(family.base)}",
                "Adaptation": described(family.adapted),
                "Weights of the base after LoRA": same,
            }
        ),
    ]


def described(run: tuple[str, list[str]]) -> str:
    """A recipe and its settings, without files and what all runs share, as text."""
    recipe, settings = run
    own = [text for text in settings if text not in COMMON and not re.match(r"data\.t\w+\.", text)]
    return f"`{recipe}` with {', '.join(own)}"


def encoder_decoder(data: Path, texts: Path) -> Family:
    """English to German: captions without animals, then those with them."""
    multi30k = data / "multi30k"
    files = {
        (split, side): [multi30k / f"{name}.{side}.gz" for name in names]
        for split, names in {"train": ["train"], "test": ["val", "test_2016_flickr"]}.items()
        for side in ("en", "de")
    }
    parts = {split: pairs_by_animals(files[split, "en"], files[split, "de"]) for split, _ in files}
    settings: dict[bool, list[str]] = {}
    for animals in (False, True):
        settings[animals] = ["data.valid_size=300", "data.src_language=en", "data.tgt_language=de"]
        for split, part in (("train", animals), ("test", True)):
            for key, side in enumerate(("src", "tgt")):
                path = texts / f"{split}-{'animals' if part else 'others'}.{side}"
                write_lines(path, [pair[key] for pair in parts[split][part]])
                settings[animals].append(f"data.{split}.{side}={path}")

    def scores(run: Run) -> dict[str, float]:
        """BLEU with animals, and perplexity with and without."""
        model = run.model()
        columns = {"BLEU": run.end.scores["bleu"]}
        for header, animals in (("perplexity", True), ("perplexity without animals", False)):
            sides = zip(*parts["test"][animals], strict=True)
            columns[header] = model.teacher_forced(*map(list, sides))["perplexity"]
        return columns

    base = ["tokenizer.vocab_size=4000", "model.dropout=0.1", "training.max_steps=800"]
    base += ["training.batch_tokens=2048", "training.schedule.warmup_steps=100"]
    base += ["training.schedule.learning_rate=0.008", "training.evaluate_every=400"]
    adapted = ["training.max_steps=150", "training.batch_tokens=2048", "model.dropout=0.1"]
    both = ["evaluation.metric=loss", "evaluation.decode_sentences=0"]
    return Family(
        "Base: English to German, the captions of Multi30k that name no animal in English; "
        f"adapted to the {len(parts['train'][True]):,} that do. Scores: pairs of val and "
        f"test_2016_flickr, {len(parts['test'][True]):,} with animals (BLEU, beam 5, and "
        f"perplexity) and {len(parts['test'][False]):,} without.",
        ("translation", [*COMMON, *settings[False], *base, *both]),
        ("translation", [*settings[True], *adapted, "training.evaluate_every=50", *both]),
        {"full fine-tuning": [0.001, 0.002, 0.004], "LoRA": [0.005, 0.01, 0.02]},
        scores,
    )


def decoder(data: Path, texts: Path) -> Family:
    """Everyday sentences, then captions."""
    captions = [lines_of(data / "multi30k" / f"{name}.en.gz") for name in ("train", "val")]
    paths = [texts / f"captions.{name}.en" for name in ("train", "test")]
    sentences = lines_of(data / "tatoeba" / "val.en.gz")
    for path, lines in zip(paths, captions, strict=True):
        write_lines(path, lines)

    def scores(run: Run) -> dict[str, float]:
        """Perplexity of both kinds of text."""
        model = run.model()
        return {
            "perplexity": perplexity(model.score(captions[1])),
            "perplexity of sentences": perplexity(model.score(sentences)),
        }

    base = [f"data.train.text={data / 'tatoeba' / 'train.en.gz'}", "tokenizer.vocab_size=3000"]
    base += ["model.d_model=128", "model.num_heads=4", "model.num_layers=4", "model.d_ff=352"]
    base += ["training.max_steps=800", "training.evaluate_every=200"]
    base += ["training.schedule.learning_rate=0.003", "training.schedule.warmup_steps=100"]
    adapted = [f"data.train.text={paths[0]}", "data.valid_size=0.02", "training.max_steps=200"]
    both = ["objective.context=128", "training.batch_tokens=2048", "objective.sample_tokens=20"]
    return Family(
        "Base: a language model of the English sentences of Tatoeba; adapted to the English "
        "captions of Multi30k. Scores: val of both.",
        ("language-model", [*COMMON, *base, *both]),
        ("language-model", [*adapted, "training.evaluate_every=50", *both]),
        {"full fine-tuning": [0.002, 0.004, 0.008], "LoRA": [0.005, 0.01, 0.02]},
        scores,
    )


def encoder(data: Path, texts: Path) -> Family:
    """Masked words, then the sentiment of film reviews."""
    sst2, reviews = data / "sst2", texts / "reviews.en"
    rows = (sst2 / "train.tsv").read_text(encoding="utf-8").splitlines()
    reviews.write_text("".join(f"{row.split(chr(9))[0]}\n" for row in rows), encoding="utf-8")
    files = [reviews, data / "tatoeba" / "train.en.gz"]
    base = [f"data.train.text=[{','.join(map(str, files))}]", "tokenizer.vocab_size=6000"]
    base += ["training.max_steps=2000", "training.evaluate_every=500"]
    adapted = [f"data.train.file={sst2 / 'train.tsv'}", f"data.test.file={sst2 / 'dev.tsv'}"]
    adapted += ["data.valid_size=800", "training.max_steps=300", "training.evaluate_every=50"]
    return Family(
        "Base: a masked language model of the reviews of SST-2 and the English sentences of "
        "Tatoeba, without labels; adapted to the sentiment of SST-2. Score: accuracy on dev in "
        "percent.",
        ("masked-lm", [*COMMON, *base]),
        ("classification", adapted),
        {"full fine-tuning": [0.0005, 0.001, 0.002], "LoRA": [0.0005, 0.001, 0.002, 0.005]},
        lambda run: {"accuracy": 100 * run.end.scores["accuracy"]},
        metric="accuracy",
        head_only=True,
    )


def perplexity(scores: Sequence[TextScore]) -> float:
    """The perplexity per token of several texts."""
    log_prob = sum(score.log_prob for score in scores)
    return math.exp(-log_prob / sum(score.num_tokens for score in scores))


def pairs_by_animals(src: Sequence[Path], tgt: Sequence[Path]) -> dict[bool, list[tuple[str, str]]]:
    """The pairs of files whose English side names an animal (True), and the others (False)."""
    sides = [chain.from_iterable(map(lines_of, paths)) for paths in (src, tgt)]
    parts: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for english, german in zip(*sides, strict=True):
        parts[ANIMALS.search(english) is not None].append((english, german))
    return parts


def lines_of(path: Path) -> list[str]:
    """The lines of a gzip file."""
    return gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    """Write lines to a file; returns its path."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


FAMILIES = {"encoder-decoder": encoder_decoder, "decoder": decoder, "encoder": encoder}


if __name__ == "__main__":
    main()
