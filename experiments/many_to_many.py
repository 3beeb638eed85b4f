"""Many-to-many: one model for all directions between several languages against single models.

Each --corpus names two languages and a folder with train and val (.en.gz, .de.gz, ...) and perhaps
a test split (test*.en.gz, ...); it is used in both directions. Without a test split, val is the
test split, and the last pairs of train are the validation split. The joint model is trained once
for each of --joint-steps, and also translates between languages without common pairs.

Example:
  python experiments/many_to_many.py --corpus en-de=DATA/multi30k en-zh=DATA/tatoeba
"""

import argparse
import gzip
import json
import sys
from itertools import permutations
from pathlib import Path
from statistics import mean
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import heedful
from common import argument_parser, command_line, facts, folded, table, write_results
from heedful.pipelines import Translator, parameter_count
from runs import QUICK, RUNS, Run, finished_run

HELD_OUT = 500  # pairs of train, for the validation of a corpus without a test split
EXAMPLES = 5
SETTINGS = [
    "model.size=tiny",
    "model.norm_placement=pre",
    "model.positions=rotary",
    "model.dropout=0.2",
    "tokenizer.vocab_size=8000",
    "training.max_epochs=null",
    "training.max_minutes=null",
    "training.patience=null",
    "training.batch_tokens=3072",
    "training.schedule.learning_rate=0.008",
    "training.schedule.warmup_steps=200",
    "training.evaluate_every=200",
    "training.average_checkpoints=3",
    "evaluation.metric=loss",
    "evaluation.decode_sentences=0",
]


class Corpus(NamedTuple):
    """Pairs of two languages, and the folder of their files."""

    languages: tuple[str, str]
    folder: Path

    @classmethod
    def parse(cls, text: str) -> "Corpus":
        """The corpus of an argument such as en-de=FOLDER."""
        names, _, folder = text.partition("=")
        first, _, second = names.partition("-")
        if not (first and second and folder) or first == second:
            raise argparse.ArgumentTypeError(f"not of the form en-de=FOLDER: {text}")
        corpus = cls((first, second), Path(folder))
        if missing := [path for path in corpus.files("train", "val") if not path.is_file()]:
            raise argparse.ArgumentTypeError(f"{missing[0]} does not exist")
        return corpus

    def files(self, *names: str) -> list[Path]:
        """The files of splits, in both languages."""
        return [self.folder / f"{name}.{code}.gz" for name in names for code in self.languages]

    def splits(self, texts: Path) -> dict[str, dict[str, Path]]:
        """The files of train, valid and test by language; new files are written to `texts`."""
        splits: dict[str, dict[str, Path]] = {"train": {}, "valid": {}, "test": {}}
        for code, train, val in zip(
            self.languages, self.files("train"), self.files("val"), strict=True
        ):
            test = sorted(self.folder.glob(f"test*.{code}.gz"))
            if test:
                files = [train, val, test[0]]
            else:
                name = f"{'-'.join(self.languages)}.{{}}.{code}"
                with gzip.open(train, "rt", encoding="utf-8") as file:
                    lines = list(file)
                size = min(HELD_OUT, len(lines) // 10)
                files = [texts / name.format("train"), texts / name.format("valid"), val]
                files[0].write_text("".join(lines[:-size]), encoding="utf-8")
                files[1].write_text("".join(lines[-size:]), encoding="utf-8")
            for split, path in zip(splits, files, strict=True):
                splits[split][code] = path
        return splits


def main() -> None:
    """Train the missing runs, and write the page of their scores."""
    parser = argument_parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--corpus", type=Corpus.parse, nargs="+", required=True, help="such as en-de=FOLDER"
    )
    parser.add_argument("--steps", type=int, default=1500, help="of each single model")
    parser.add_argument("--joint-steps", type=int, nargs="+", help="default: those of --steps")
    parser.add_argument("--runs", type=Path, default=RUNS / "many-to-many", help="the runs")
    arguments = parser.parse_args()
    folder, corpora = arguments.runs, arguments.corpus
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    keys: dict[str, list[str]] = {}
    tests: dict[str, Path] = {}
    for corpus in corpora:
        splits = corpus.splits(folder / "texts")
        tests |= {code: path for code, path in splits["test"].items() if code not in tests}
        for src, tgt in permutations(corpus.languages):
            keys[f"{src}-{tgt}"] = direction(src, tgt, splits)
    everything = [setting for settings in keys.values() for setting in settings]
    joint = {
        steps: trained(folder / f"joint-{steps}", everything, steps, arguments.quick)
        for steps in arguments.joint_steps or [arguments.steps]
    }
    single = {
        name: trained(folder / name, settings, arguments.steps, arguments.quick)
        for name, settings in keys.items()
    }
    hidden: dict[Path | None, str] = {folder: "RUNS"}
    for corpus in corpora:
        name = "-".join(corpus.languages)
        hidden[Path(f"{name}={corpus.folder}")] = f"{name}=FOLDER"
    examples = unseen_examples([*joint.values()][-1].model(), set(keys), tests)
    write_page(joint, single, examples, arguments.results, command_line(hidden))


def write_page(
    joint: dict[int, Run],
    single: dict[str, Run],
    examples: list[str],
    directory: Path,
    command: str,
) -> None:
    """Write the page.

    Args:
        joint: the joint models by steps.
        single: the single models by direction.
        examples: sections with translations.
    """
    own = next(iter(single.values())).end.step
    models = [f"one model, {steps:,} steps" for steps in joint]
    models.append(f"own models, {own:,} steps each")
    scores = {
        name: {
            model: bleu(run, name)
            for model, run in zip(models, (*joint.values(), single_run), strict=True)
        }
        for name, single_run in single.items()
    }
    rows = [[name, *(f"{value:.2f}" for value in found.values())] for name, found in scores.items()]
    means = [mean(found[model] for found in scores.values()) for model in models]
    rows.append(["mean", *(f"{value:.2f}" for value in means)])
    runs = [next(iter(joint.values())), *single.values()]
    sizes = [parameter_count(run.model().net) for run in runs]
    minutes = [*(run.minutes for run in joint.values()), sum(run.minutes for run in runs[1:])]
    write_results(
        "many_to_many",
        "One model for several languages",
        [
            "BLEU (sacreBLEU, its tokenizer zh for Chinese) with beam 5 on the test split of each "
            "corpus. The joint models have a tag of the target language before each source.",
            table(["direction", *models], rows),
            *examples,
            "## Training",
            facts(
                {
                    "Parameters": f"{sizes[0]:,} of a joint model, {sum(sizes[1:]):,} of the "
                    f"{len(single)} single models",
                    "Minutes": ", ".join(
                        f"{value:.1f} ({model})"
                        for model, value in zip(models, minutes, strict=True)
                    ),
                    "Settings": ", ".join(SETTINGS),
                    "heedful": heedful.__version__,
                }
            ),
        ],
        {"scores": scores},
        directory=directory,
        command=command,
        packages=("sacrebleu", "tokenizers"),
        made_on="Scored",
    )


def direction(src: str, tgt: str, splits: dict[str, dict[str, Path]]) -> list[str]:
    """Settings of the corpus of one direction."""
    key = f"data.corpora.{src}-{tgt}"
    files = [
        f"{key}{'' if split == 'train' else f'.{split}'}.{side}={paths[code]}"
        for split, paths in splits.items()
        for side, code in (("src", src), ("tgt", tgt))
    ]
    tags = [f"{key}.src_language={src}", f"{key}.tgt_language={tgt}", f"{key}.tgt_tag=<2{tgt}>"]
    return files + tags


def trained(directory: Path, corpora: list[str], steps: int, quick: bool) -> Run:
    """The finished run on the corpora."""
    settings = [*corpora, *SETTINGS, *QUICK * quick, f"training.max_steps={steps}"]
    return finished_run("translation", directory, settings)


def bleu(run: Run, name: str) -> float:
    """The BLEU of a direction."""
    content = json.loads((run.directory / "scores.json").read_text(encoding="utf-8"))
    return float(content["scores"][f"bleu/{name}"]["score"])


def unseen_examples(model: Translator, seen: set[str], tests: dict[str, Path]) -> list[str]:
    """Translations of the first test sentences in the directions without training pairs.

    Args:
        seen: the directions that the model was trained on.
        tests: a test file of each language.
    """
    sections = []
    for src, tgt in permutations(tests, 2):
        if f"{src}-{tgt}" in seen:
            continue
        with gzip.open(tests[src], "rt", encoding="utf-8") as file:
            lines = [next(file).strip() for _ in range(EXAMPLES)]
        outputs = model.translate(lines, tgt_language=tgt, beam_size=5, too_long="truncate")
        rows = zip(lines, outputs, strict=True)
        sections.append(folded(f"{src}-{tgt}, without pairs", table([src, tgt], rows)))
    if sections:
        sections.insert(0, "## Directions without training pairs (zero-shot)")
    return sections


if __name__ == "__main__":
    main()
