"""Runs of shipped recipes for benchmarks: train or resume them, score them, and tabulate them."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sacrebleu

import heedful
from common import argument_parser, command_line, facts, table, write_results
from heedful.config import Recipe
from heedful.data.prepared import cache_folder
from heedful.evaluation.metrics import corpus_scores
from heedful.pipelines import Translator, load, parameter_count
from heedful.recipe_changes import changed_keys
from heedful.recipe_files import load_recipe, read_settings
from heedful.run import train
from heedful.training.events import Evaluated, Event, RunFinished, format_score, score_label
from heedful.training.folder import facts_of_run
from heedful.training.listeners import read_log
from significance import NOTE, interval_text, p_text, significance

RUNS = Path("runs")
MAX_ROWS = 20
# Settings for a smoke test of seconds.
QUICK = [
    "tokenizer.kind=char",
    "tokenizer.vocab_size=null",
    "model.d_model=16",
    "model.num_heads=2",
    "model.num_encoder_layers=1",
    "model.num_decoder_layers=1",
    "model.d_ff=16",
    "training.max_steps=4",
    "training.max_epochs=null",
    "training.batch_tokens=512",
    "training.evaluate_every=2",
    "training.log_every=1",
    "evaluation.decode_sentences=2",
]


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, its recipe, and events of its log."""

    directory: Path
    recipe: Recipe
    evaluations: list[Evaluated]
    end: RunFinished

    @property
    def minutes(self) -> float:
        """Training time with evaluations, without data preparation and final scores."""
        return self.end.seconds / 60

    def model(self) -> Translator:
        """The best model of the run."""
        return load(self.directory)

    @property
    def data(self) -> Path:
        """The folder of the prepared data of the run."""
        name = facts_of_run(self.directory).data
        assert name is not None
        return cache_folder() / name

    def pairs(self, name: str) -> list[tuple[str, str]]:
        """The source and target texts of "valid" or "test"."""
        lines = (self.data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [(row["src"], row["tgt"]) for row in map(json.loads, lines)]

    def changes(self, name: str) -> list[str]:
        """Changes of its recipe from the shipped one, except paths and resolved `auto` values."""
        ignored = (
            "data.train.",
            "data.valid.",
            "data.test.",
            "data.folder ",
            "distillation.teacher ",
        )
        ignored += ('training.precision ("auto"',)
        changed = changed_keys(load_recipe(name), self.recipe)
        return [line for line in changed if not line.startswith(ignored)]


def finished_run(
    name: str,
    directory: Path,
    settings: list[str],
    on_event: Callable[[Event], None] | None = None,
) -> Run:
    """The finished run in `directory`; trains or resumes it if it is not finished."""
    if not (directory / "scores.json").is_file():
        has_started = (directory / "recipe.yaml").is_file()
        recipe = (
            load_recipe(directory) if has_started else load_recipe(name, read_settings(settings))
        )
        result = train(recipe, directory, resume=has_started, on_event=on_event)
        if result.reason == "interrupted":
            raise SystemExit("stopped and saved; run the same command again to continue")
    events = read_log(directory / "log.jsonl")
    ends = [event for event in events if isinstance(event, RunFinished)]
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    return Run(directory, load_recipe(directory), evaluations, ends[-1])


def run_facts(run: Run, name: str, data_names: dict[str, str], note: str = "") -> dict[str, object]:
    """Facts on the training of a run, for a page; `note` describes the machine."""
    settings = "".join(f" --set {key}={value}" for key, value in data_names.items())
    return {
        "Trained by": f"`heedful train {name}{settings}`",
        "Recipe": recipe_note(run, name),
        "Training": f"{run.minutes:.1f} minutes, evaluations included; {run.end.step:,} steps, "
        f"precision {facts_of_run(run.directory).precision}{note and f'; {note}'}",
        "Parameters": f"{parameter_count(run.model().net):,}",
        "heedful": heedful.__version__,
    }


def recipe_note(run: Run, name: str) -> str:
    """The changes of a run's recipe from the shipped one, as text."""
    changed = run.changes(name)
    return f"as shipped except {', '.join(changed)}" if changed else "as shipped"


def progress_table(run: Run) -> str:
    """A table of validation over time, of up to `MAX_ROWS` evaluations with the last one."""
    events = run.evaluations
    stride = -(-len(events) // MAX_ROWS)
    names = list(events[-1].scores)
    rows = [
        [
            f"{event.seconds / 60:.1f}",
            f"{event.step:,}",
            f"{event.perplexity:.2f}",
            format_score("token_accuracy", event.token_accuracy),
            *(format_score(name, event.scores[name]) for name in names),
        ]
        for event in events[::-1][::stride][::-1]
    ]
    labels = [f"{score_label(name)}, first {_decoded(run)}, greedy" for name in names]
    return table(["minutes", "steps", "perplexity", "token accuracy", *labels], rows)


def translation_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with the arguments of the translation benchmarks."""
    parser = argument_parser(description)
    parser.add_argument("--data", type=Path, help="folder of the text; not for a finished run")
    parser.add_argument("--run", type=Path, default=RUNS / name, help="folder of the run")
    parser.add_argument(
        "--note", default="", help="the machine of the training, printed after its minutes"
    )
    return parser


def translation_run(
    name: str, arguments: argparse.Namespace, files: dict[str, str]
) -> tuple[Run, dict[str, object]]:
    """The run of a translation recipe on `files` (file name by recipe key), and its facts."""
    is_finished = (arguments.run / "scores.json").is_file()
    if arguments.data is None and not is_finished:
        raise SystemExit(
            f"{arguments.run} is not finished: give the folder of the text with --data"
        )
    settings = (
        [f"{key}={arguments.data / file}" for key, file in files.items()] if not is_finished else []
    )
    run = finished_run(name, arguments.run, [*settings, *(QUICK if arguments.quick else [])])
    names = {key: f"DATA/{file}" for key, file in files.items()}
    return run, run_facts(run, name, names, arguments.note)


def beam_scores(run: Run, pairs: list[tuple[str, str]], metrics: list[str]) -> dict[str, Any]:
    """Scores of beam 5 and greedy search by metric, with signatures and confidence intervals.

    Includes a paired bootstrap test of beam search against greedy search.
    """
    model = run.model()
    sources, references = [src for src, _ in pairs], [tgt for _, tgt in pairs]
    language = run.recipe.data.tgt_language
    scores: dict[str, Any] = {}
    outputs: dict[str, list[str]] = {}
    for search, beam in (("greedy", 1), ("beam 5", 5)):
        results = model.generate(
            sources,
            beam_size=beam,
            length_penalty=run.recipe.evaluation.length_penalty,
            too_long="truncate",
            return_details=True,
        )
        outputs[search] = [translations[0].text for translations in results]
        scored = corpus_scores(outputs[search], references, tgt_language=language, metrics=metrics)
        scores[search] = {
            **scored.to_dict()["scores"],
            "cut_off": sum(not translations[0].finished for translations in results),
        }
        if language != "zh":
            scores[search]["bleu_lowercase"] = _lowercase_bleu(outputs[search], references)
    scores["significance"] = significance(outputs, references, language or "")
    scores["teacher_forced"] = model.teacher_forced(sources, references, too_long="truncate")
    return scores


def scores_table(scores: dict[str, Any]) -> str:
    """A table of metrics: both searches with intervals, p-value of the paired test, signature."""
    tested = scores["significance"]
    rows = []
    for name, score in scores["beam 5"].items():
        if name == "cut_off":
            continue
        columns = [f"{scores[search][name]['score']:.2f}" for search in ("beam 5", "greedy")]
        p_value = None
        if name in tested:
            columns = [interval_text(tested[name][search]) for search in ("beam 5", "greedy")]
            p_value = tested[name]["beam 5"]["p_value"]
        label = "sacreBLEU BLEU, lowercased" if name == "bleu_lowercase" else score_label(name)
        signature = f"`{score['signature']}`".replace("|", "\\|")
        rows.append([label, f"**{columns[0]}**", columns[1], p_text(p_value), signature])
    return f"{table(['metric', 'beam 5', 'greedy', 'p', 'signature'], rows)}\n\n{NOTE}"


def precisions(score: dict[str, Any]) -> str:
    """BLEU's n-gram precisions and brevity penalty, as multi-bleu.perl prints them."""
    shown = "/".join(f"{precision:.1f}" for precision in score["precisions"])
    return (
        f"{shown} (BP {score['brevity_penalty']:.3f}, output of {score['hypothesis_length']:,} "
        f"tokens, reference {score['reference_length']:,})"
    )


def forced_note(scores: dict[str, Any]) -> str:
    """Sentences on perplexity, token accuracy, and outputs that reached the length limit."""
    forced = scores["teacher_forced"]
    accuracy = format_score("token_accuracy", forced["token_accuracy"])
    return (
        f"Perplexity of the references: {forced['perplexity']:.3f} per token; token accuracy "
        f"{accuracy}. Outputs truncated by the length limit: "
        f"{scores['beam 5']['cut_off']} with beam 5, {scores['greedy']['cut_off']} greedy."
    )


def write_translation_results(
    name: str,
    title: str,
    run: Run,
    run_information: dict[str, object],
    sections: list[str],
    scores: dict[str, Any],
    arguments: argparse.Namespace,
) -> None:
    """Write the page of a translation run: facts, scores, validation over time."""
    write_results(
        name,
        title,
        [
            facts(run_information),
            *sections,
            "## Validation over time",
            progress_table(run),
        ],
        {
            "minutes": run.minutes,
            "steps": run.end.step,
            "changed_from_shipped": run.changes(name),
            "scores": scores,
            "validation": [
                {
                    "minutes": event.seconds / 60,
                    "step": event.step,
                    "perplexity": event.perplexity,
                    "token_accuracy": event.token_accuracy,
                    **event.scores,
                }
                for event in run.evaluations
            ],
        },
        directory=arguments.results,
        command=command_line({arguments.data: "DATA", arguments.run: "RUN"}),
        packages=("sacrebleu", "sacremoses", "tokenizers"),
        made_on="Scored",
    )


def _decoded(run: Run) -> int:
    return min(run.recipe.evaluation.decode_sentences, len(run.pairs("valid")))


def _lowercase_bleu(outputs: list[str], references: list[str]) -> dict[str, Any]:
    metric = sacrebleu.BLEU(lowercase=True)
    score = metric.corpus_score(outputs, [references]).score
    return {"name": "BLEU", "score": score, "signature": str(metric.get_signature())}
