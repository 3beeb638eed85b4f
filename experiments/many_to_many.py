"""Many-to-many: one model for all directions between several languages against single models.

DATA is the folder of Multi30k's train, val and test_2016_flickr in each language (.en.gz, .de.gz,
.fr.gz). Each model has the same steps, so that the single ones together have as many times the
steps as there are directions.
"""

import json
import sys
from itertools import permutations
from pathlib import Path
from statistics import mean

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import heedful
from common import argument_parser, command_line, facts, table, write_results
from heedful.pipelines import parameter_count
from runs import QUICK, RUNS, Run, finished_run

FILES = {"": "train", ".valid": "val", ".test": "test_2016_flickr"}
SETTINGS = [
    "model.size=tiny",
    "model.norm_placement=pre",
    "model.dropout=0.2",
    "tokenizer.vocab_size=8000",
    "training.max_steps=8000",
    "training.max_epochs=null",
    "training.max_minutes=null",
    "training.patience=null",
    "training.batch_tokens=3072",
    "training.schedule.learning_rate=0.002",
    "training.schedule.warmup_steps=300",
    "training.evaluate_every=800",
    "training.average_checkpoints=3",
    "evaluation.metric=loss",
    "evaluation.decode_sentences=300",
]


def main() -> None:
    """Train the missing runs, and write the page of their scores."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k")
    parser.add_argument("--runs", type=Path, default=RUNS / "many-to-many", help="the runs")
    parser.add_argument("--languages", nargs="+", default=["en", "de", "fr"], help="codes")
    arguments = parser.parse_args()
    folder, data, languages = arguments.runs, arguments.data, arguments.languages
    quick = QUICK if arguments.quick else []
    directions = [f"{src}-{tgt}" for src, tgt in permutations(languages, 2)]
    corpora = [setting for name in directions for setting in corpus(name, data)]
    joint = finished_run("translation", folder / "joint", [*corpora, *SETTINGS, *quick])
    single = {
        name: finished_run("translation", folder / name, [*corpus(name, data), *SETTINGS, *quick])
        for name in directions
    }
    scores = {
        name: {"one model": bleu(joint, name), "its own model": bleu(single[name], name)}
        for name in directions
    }
    minutes = sum(run.minutes for run in single.values())
    models = ["one model", "its own model"]
    rows = [[name, *(f"{scores[name][model]:.2f}" for model in models)] for name in directions]
    means = [mean(found[model] for found in scores.values()) for model in models]
    rows.append(["mean", *(f"{value:.2f}" for value in means)])
    write_results(
        "many_to_many",
        "One model for several languages",
        [
            f"BLEU (sacreBLEU) on test_2016_flickr with beam 5 between {', '.join(languages)}; "
            "each model has the same number of steps.",
            table(["direction", *models], rows),
            facts(
                {
                    "Parameters": f"{parameter_count(joint.model().net):,} for all directions, "
                    f"{sum(parameter_count(run.model().net) for run in single.values()):,} in the "
                    f"{len(single)} single models",
                    "Minutes": f"{joint.minutes:.1f}, and {minutes:.1f} of the single models",
                    "Settings": ", ".join(SETTINGS),
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


def corpus(name: str, data: Path) -> list[str]:
    """Settings of the corpus of one direction."""
    key, (src, tgt) = f"data.corpora.{name}", name.split("-")
    files = [
        f"{key}{split}.{side}={data / file}.{language}.gz"
        for split, file in FILES.items()
        for side, language in (("src", src), ("tgt", tgt))
    ]
    tags = [f"{key}.src_language={src}", f"{key}.tgt_language={tgt}", f"{key}.tgt_tag=<2{tgt}>"]
    return files + tags


def bleu(run: Run, name: str) -> float:
    """The BLEU of a direction."""
    content = json.loads((run.directory / "scores.json").read_text(encoding="utf-8"))
    return float(content["scores"][f"bleu/{name}"]["score"])


if __name__ == "__main__":
    main()
