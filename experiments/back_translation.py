"""Back-translation: what half of Multi30k's pairs gain from the German side of the other half.

DATA is the folder of Multi30k's train, val and test_2016_flickr (.en.gz, .de.gz). Pairs with an odd
number are parallel text; of the others only the German side is used, as monolingual text. All
forward runs have the same steps.
"""

import gzip
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import heedful
from common import argument_parser, command_line, facts, table, write_results
from heedful.back_translation import BACKWARD, PAIRS, BackTranslation, back_translate
from heedful.config import Recipe
from heedful.evaluation.metrics import corpus_scores
from heedful.pipelines import load_translator
from heedful.recipe_files import load_recipe, read_settings
from heedful.run import TrainingRun, train
from runs import QUICK, RUNS, finished_run

SETTINGS = [
    "model.size=tiny",
    "model.norm_placement=pre",
    "model.positions=rotary",
    "model.dropout=0.3",
    "tokenizer.vocab_size=6000",
    "training.max_steps=1500",
    "training.max_epochs=null",
    "training.max_minutes=null",
    "training.patience=null",
    "training.batch_tokens=3072",
    "training.schedule.learning_rate=0.008",
    "training.schedule.warmup_steps=200",
    "training.evaluate_every=250",
    "training.average_checkpoints=3",
    "evaluation.metric=bleu",
    "evaluation.decode_sentences=300",
]
DECODING: dict[str, dict[str, Any]] = {
    "sampling": {"temperature": 1.0},
    "beam": {"beam_size": 4},
}


def main() -> None:
    """Train the missing runs, translate the test set, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k")
    parser.add_argument("--runs", type=Path, default=RUNS / "back-translation", help="the runs")
    # A net that has hardly learned ends samples alone.
    parser.add_argument(
        "--decodings", nargs="+", choices=DECODING, help="default: all, with --quick sampling"
    )
    arguments = parser.parse_args()
    folder, data = arguments.runs, arguments.data
    folder.mkdir(parents=True, exist_ok=True)
    quick = QUICK if arguments.quick else []
    parallel = {side: every_second(data / f"train.{side}.gz", folder, 0) for side in ("en", "de")}
    mono = every_second(data / "train.de.gz", folder, 1)
    settings = [*held_out(data), *SETTINGS, *quick]
    half = settings + sides({side: str(path) for side, path in parallel.items()})
    whole = settings + sides({side: str(data / f"train.{side}.gz") for side in ("en", "de")})
    models = {"half of the pairs": finished_run("translation", folder / "half", half).directory}
    counts: dict[str, int] = {}
    backward: Path | None = None  # one model translates back for all decodings
    for name in arguments.decodings or (["sampling"] if arguments.quick else [*DECODING]):
        decoding = DECODING[name]
        out = folder / f"back-{name}"
        if not (out / "forward" / "scores.json").is_file():
            settings_of = BackTranslation([mono], decoding=decoding, backward_model=backward)
            result = back_translate(
                load_recipe("translation", read_settings(half)), settings_of, out, stage, print
            )
            if result.reason == "interrupted":
                raise SystemExit("stopped and saved; run the same command again to continue")
        backward = backward or out / BACKWARD
        models[f"and the other half, back-translated ({name})"] = out / "forward"
        counts[name] = sum(1 for _ in (out / PAIRS).open(encoding="utf-8"))
    run = finished_run("translation", folder / "whole", whole)
    models["all pairs"] = run.directory
    pairs = run.pairs("test")
    scores = {name: scored(path, pairs) for name, path in models.items()}
    base = scores["half of the pairs"]["bleu"]
    rows = [
        [name, f"{found['bleu']:.2f}", f"{found['bleu'] - base:+.2f}", f"{found['chrf']:.2f}"]
        for name, found in scores.items()
    ]
    write_results(
        "back_translation",
        "Back-translation",
        [
            "English to German on Multi30k, scored on test_2016_flickr with beam 5 (sacreBLEU); "
            "the same steps for all.",
            table(["trained on", "BLEU", "gain", "chrF"], rows),
            facts(
                {
                    "Back-translated pairs": ", ".join(f"{n:,} ({k})" for k, n in counts.items()),
                    "Settings": ", ".join(SETTINGS),
                    "Signature": f"`{next(iter(scores.values()))['signature']}`",
                    "heedful": heedful.__version__,
                }
            ),
        ],
        {"scores": scores, "pairs": counts},
        directory=arguments.results,
        command=command_line({arguments.data: "DATA", arguments.runs: "RUNS"}),
        packages=("sacrebleu", "tokenizers"),
        made_on="Scored",
    )


def stage(recipe: Recipe, directory: Path, resume: bool) -> TrainingRun:
    """A run of `back_translate`."""
    return train(recipe, directory, resume=resume)


def held_out(data: Path) -> list[str]:
    """Settings of the validation and test files, and of the languages."""
    files = {"valid": "val", "test": "test_2016_flickr"}
    settings = [
        f"data.{split}.{key}={data / name}.{side}.gz"
        for split, name in files.items()
        for key, side in (("src", "en"), ("tgt", "de"))
    ]
    return [*settings, "data.src_language=en", "data.tgt_language=de"]


def sides(files: dict[str, str]) -> list[str]:
    """Settings of the training pairs."""
    return [f"data.train.src={files['en']}", f"data.train.tgt={files['de']}"]


def every_second(path: Path, folder: Path, first: int) -> Path:
    """Write every second line of a file, from line `first` (0 or 1), to a new file in `folder`."""
    out = folder / f"half{first}.{path.name.removesuffix('.gz')}"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        texts = [line for number, line in enumerate(lines) if number % 2 == first]
    out.write_text("".join(texts), encoding="utf-8")
    return out


def scored(directory: Path, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """BLEU and chrF of a model on the test pairs with beam size 5."""
    sources, references = [src for src, _ in pairs], [tgt for _, tgt in pairs]
    outputs = load_translator(directory).translate(sources, beam_size=5, too_long="truncate")
    found = corpus_scores(outputs, references, tgt_language="de", metrics=["bleu", "chrf"])
    return {**found.values(), "signature": found["bleu"].signature}


if __name__ == "__main__":
    main()
