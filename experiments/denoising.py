"""Denoising pre-training: translation from a tenth of Multi30k's pairs, with it and without.

DATA is the folder of Multi30k's train, val and test_2016_flickr (.en.gz, .de.gz). Pre-training
uses all training sentences of both languages as single texts, not as pairs.
"""

import gzip
import sys
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import heedful
from common import argument_parser, command_line, facts, table, write_results
from heedful.evaluation.metrics import corpus_scores
from heedful.pipelines import parameter_count
from runs import RUNS, Run, finished_run

PAIRS = 2_900
MODEL = ["model.size=tiny", "model.norm_placement=pre"]
PRETRAINING = [
    *MODEL,
    "tokenizer.vocab_size=6000",
    "objective.infilling=0.35",
    "training.max_steps=2500",
    "training.evaluate_every=1250",
    "evaluation.num_samples=2",
]
TRANSLATION = [
    *MODEL,
    "model.dropout=0.3",
    "tokenizer.vocab_size=6000",
    "training.max_steps=1500",
    "training.max_minutes=null",
    "training.batch_tokens=3072",
    "training.schedule.learning_rate=0.002",
    "training.schedule.warmup_steps=300",
    "training.evaluate_every=150",
    "training.average_checkpoints=3",
    "evaluation.metric=bleu",
    "evaluation.decode_sentences=300",
]
QUICK = [
    "tokenizer.vocab_size=300",
    "training.max_steps=4",
    "training.evaluate_every=2",
    "model.d_model=16",
    "model.num_heads=2",
    "model.d_ff=16",
    "model.num_encoder_layers=1",
    "model.num_decoder_layers=1",
]


def main() -> None:
    """Train the missing runs, translate the test set, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k")
    parser.add_argument("--runs", type=Path, default=RUNS / "denoising", help="folder of the runs")
    arguments = parser.parse_args()
    quick = [*QUICK, "evaluation.decode_sentences=2"] if arguments.quick else []
    folder, data = arguments.runs, arguments.data
    folder.mkdir(parents=True, exist_ok=True)
    texts = f"[{data / 'train.en.gz'},{data / 'train.de.gz'}]"
    pretraining = [f"data.train.text={texts}", "data.valid_size=0.01", *PRETRAINING]
    pretrained = finished_run("denoising", folder / "pretraining", pretraining + quick)
    pairs = {side: first_lines(data / f"train.{side}.gz", folder) for side in ("en", "de")}
    settings = [
        f"data.{split}.{key}={path}"
        for key, side in (("src", "en"), ("tgt", "de"))
        for split, path in (
            ("train", pairs[side]),
            ("valid", data / f"val.{side}.gz"),
            ("test", data / f"test_2016_flickr.{side}.gz"),
        )
    ] + ["data.src_language=en", "data.tgt_language=de"]
    settings += TRANSLATION + quick
    start = [f"init_from={pretrained.directory}"]
    runs = {
        "from scratch": finished_run("translation", folder / "scratch", settings),
        "after denoising": finished_run("translation", folder / "after", settings + start),
    }
    scores = {name: scored(run) for name, run in runs.items()}
    rows = [
        [name, *(f"{found[key]:.2f}" for key in ("bleu", "chrf")), f"{runs[name].minutes:.1f}"]
        for name, found in scores.items()
    ]
    model = pretrained.model()
    write_results(
        "denoising",
        "Denoising, then translating",
        [
            f"English to German from {PAIRS:,} pairs of Multi30k, scored on test_2016_flickr with "
            "beam 5 (sacreBLEU).",
            table(["model", "BLEU", "chrF", "minutes"], rows),
            facts(
                {
                    "Model": f"{parameter_count(model.net):,} parameters",
                    "Pre-training": f"{pretrained.end.step:,} steps, {pretrained.minutes:.1f} "
                    "minutes, on the training sentences of both languages as single texts",
                    "Pre-training's settings": ", ".join(PRETRAINING),
                    "Translation's settings": ", ".join(TRANSLATION),
                    "Signature": f"`{scores['from scratch']['signature']}`",
                    "heedful": heedful.__version__,
                }
            ),
        ],
        {"scores": scores},
        directory=arguments.results,
        command=command_line({arguments.data: "DATA", arguments.runs: "RUNS"}),
        packages=("sacrebleu", "tokenizers"),
        made_on="Scored",
    )


def first_lines(path: Path, folder: Path) -> Path:
    """Write the first lines of a file to a new file in `folder`; returns its path."""
    out = folder / f"first.{path.name.removesuffix('.gz')}"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        out.write_text("".join(islice(lines, PAIRS)), encoding="utf-8")
    return out


def scored(run: Run) -> dict[str, Any]:
    """BLEU and chrF of a run on the test set with beam size 5."""
    pairs = run.pairs("test")
    outputs = run.model().translate([src for src, _ in pairs], beam_size=5, too_long="truncate")
    references = [tgt for _, tgt in pairs]
    found = corpus_scores(outputs, references, tgt_language="de", metrics=["bleu", "chrf"])
    values = found.values()
    return {**values, "signature": found["bleu"].signature}


if __name__ == "__main__":
    main()
