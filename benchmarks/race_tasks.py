"""The tasks of the race: text, systems, how a model is measured, and what the page calls it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import race_heedful
import race_stub
from heedful.evaluation.metrics import corpus_scores
from race_classifiers import CLASSIFIERS
from race_data import Files, Parts, captions, plays, reviews, software
from race_language_models import LANGUAGE_MODELS
from race_logits import CONTEXT
from race_peers import PEERS, Corpus, System

Scores = dict[str, float]


@dataclass(frozen=True)
class Task:
    """A task of the race.

    Attributes:
        title: of its section.
        intro: what the section says on the evaluation, as Markdown.
        folder: in DATA.
        read: for that folder the files of the corpus by name, and parts of the test set.
        sides: suffixes of the inputs and the references in the files of the corpus.
        systems: by name.
        score: metrics of outputs with references.
        metrics: labels of the metrics by name; the first one is drawn over time.
        digits: decimals of the metrics.
        rate: label of the rate of training.
        speed: label of the rate of evaluation, lines of the test set a second; empty: not shown.
        is_loss: the lowest score is the best.
        minutes: of each race, unless they are given.
        vocabulary: entries, of the tools that need a number.
    """

    title: str
    intro: str
    folder: str
    read: Callable[[Path], tuple[Files, Parts]]
    sides: tuple[str, str]
    systems: dict[str, System]
    score: Callable[[list[str], list[str], Corpus], Scores]
    metrics: dict[str, str]
    digits: int
    rate: str
    speed: str = ""
    is_loss: bool = False
    minutes: tuple[float, ...] = (5.0,)
    vocabulary: int = 8_000

    @property
    def metric(self) -> str:
        """The name of the metric that is drawn over time."""
        return next(iter(self.metrics))

    def is_reached(self, value: float, goal: float) -> bool:
        """True if a value of the first metric is as good as another one, or better."""
        return value <= goal if self.is_loss else value >= goal

    def best(self, values: Sequence[float]) -> float | None:
        """The best value of the first metric."""
        return (min if self.is_loss else max)(values, default=None)


def translation_scores(outputs: list[str], references: list[str], corpus: Corpus) -> Scores:
    """BLEU and chrF by sacreBLEU of text as it is; the same call for all systems."""
    metrics = ["bleu", "chrf"]
    scores = corpus_scores(outputs, references, tgt_language=corpus.target, metrics=metrics)
    return dict(scores.values())


def mean_loss(outputs: list[str], references: list[str], corpus: Corpus) -> Scores:
    """Nats per character; an output is the sum of a window, a reference its characters."""
    return {"loss": sum(map(float, outputs)) / sum(map(int, references))}


def accuracy(outputs: list[str], references: list[str], corpus: Corpus) -> Scores:
    """Percent of the labels that are right."""
    right = sum(out == label for out, label in zip(outputs, references, strict=True))
    return {"accuracy": 100 * right / len(references)}


def by_name(*systems: System) -> dict[str, System]:
    """Systems by name, with the stub of the smoke test."""
    return {system.name: system for system in (*systems, race_stub.SYSTEM)}


TRANSLATORS = by_name(race_heedful.TRANSLATOR, *PEERS)
TRANSLATION = (
    "The checkpoints translate the test set by the tool's own command with beams of 5; BLEU and "
    "chrF are those of sacreBLEU by the same call. For each peer there are two configurations: the "
    "documented one for small data, and `-tiny`, in the size of heedful's recipe; a table has "
    "those that were raced. Tokens are those of each tool's own vocabulary. Sentences a second "
    "include the start of the command."
)
TRANSLATION_METRICS = {"bleu": "BLEU", "chrf": "chrF"}
TASKS = {
    "multi30k": Task(
        "Multi30k, English to German",
        TRANSLATION,
        "multi30k",
        captions,
        ("en", "de"),
        TRANSLATORS,
        translation_scores,
        TRANSLATION_METRICS,
        1,
        "target tokens/s",
        "sentences/s",
        minutes=(30.0, 120.0),
        # The vocabulary of Wu et al. 2021 for Multi30k, and that of heedful's recipe for the other.
        vocabulary=10_000,
    ),
    "libreoffice": Task(
        "LibreOffice, English to German",
        TRANSLATION,
        "libreoffice/de",
        software,
        ("en", "de"),
        TRANSLATORS,
        translation_scores,
        TRANSLATION_METRICS,
        1,
        "target tokens/s",
        "sentences/s",
        minutes=(30.0, 120.0),
    ),
    "shakespeare": Task(
        "Tiny Shakespeare, characters",
        "The loss is the mean negative log-probability of a character in nats, over the first "
        "tenth of the text, by which nothing was selected; the last tenth is the validation text, "
        f"the rest for training. All models have a context of {CONTEXT} characters and are "
        f"evaluated in the same windows of {CONTEXT} that do not overlap: their own programs give "
        "the logits, and one function the loss. The vocabulary is the characters of the text; the "
        "files of nanoGPT's prepare.py and litgpt's tokenizer are written before the clock starts. "
        "nanoGPT runs with its README's settings for a CPU, which end after 2,000 iterations; in "
        "`-long` they last as long as the race. heedful's recipe has the size of nanoGPT's; "
        "litgpt runs with the blocks and layers of Pythia-14m, and `-tiny` in that size too, with "
        "nanoGPT's schedule.",
        "tinyshakespeare",
        plays,
        ("txt", "windows"),
        by_name(race_heedful.LANGUAGE_MODEL, *LANGUAGE_MODELS),
        mean_loss,
        {"loss": "loss"},
        3,
        "characters/s",
        is_loss=True,
    ),
    "sst2": Task(
        "SST-2, sentiment",
        "The accuracy is that on dev, which is the test set here: each tool trains on the same "
        "text without every fourteenth line, by which it selects its checkpoint. All encoders have "
        "4 layers of width 128 and 4 heads, WordPiece of the same text, and random weights at the "
        "start. `trainer` is transformers' Trainer with the settings of its guide to text "
        "classification, `-tuned` with those of heedful's recipe, and `-pretrained` trains a "
        "masked language model of the training text first, as heedful-pretrained does: both with "
        "the settings of heedful's recipe and as many steps as the time allows. All train "
        "in mixed precision where the processor has bf16. Lines of "
        "configuration are those of the program that a user of Trainer writes. Test texts a second "
        "include the start of the command. Each system ran once, and dev is small: differences of "
        "two points are within chance.",
        "sst2",
        reviews,
        ("text", "label"),
        by_name(race_heedful.CLASSIFIER, race_heedful.PRETRAINED, *CLASSIFIERS),
        accuracy,
        {"accuracy": "accuracy, %"},
        1,
        "texts/s",
        "test texts/s",
    ),
}
