"""Learning pairs: translation, and the tasks that make their own pairs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from heedful.config import Recipe
from heedful.data.batches import PairBatch, plan_epoch
from heedful.errors import UserError
from heedful.evaluation.metrics import Scores, corpus_scores, perplexity
from heedful.files import write_json, write_text
from heedful.inference import Limits, ModelCard, SavedModel, Translator
from heedful.jobs.job import FinalScores, Job, Say
from heedful.jobs.pairs import open_prepared, prepare
from heedful.jobs.sources import check_distillation, pair_sizes, ready_teacher
from heedful.jobs.taught import taught_pairs
from heedful.parts.losses import LossSum
from heedful.tasks.distillation import distilled_pairs
from heedful.tasks.translation import pair_loss
from heedful.training.events import Sample
from heedful.training.trainer import Evaluation


class Translation(Job):
    """Pairs of texts, judged by real decoding of held-out ones."""

    default_model: ClassVar[dict[str, Any]] = {"architecture": "vaswani2017", "size": "tiny"}

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        check_distillation(recipe, levels=("word", "sequence"))

    def prepare(self, say: Say) -> dict[str, Any]:
        return prepare(self.recipe, self.directory, say, self.given)

    def open(self) -> None:
        self.data = open_prepared(self.directory)
        self.tokenizers = (self.data.src_tokenizer, self.data.tgt_tokenizer)
        self.num_train, self.num_valid = len(self.data.train), len(self.data.valid)

    def sizes(self, recipe: Recipe, name: str) -> dict[str, object]:
        return pair_sizes(recipe, name, self.tokenizers, recipe.data.max_length)

    def learn_from(self, teacher: SavedModel, *, resume: bool) -> None:
        """From what it says after each token, or from its own translations of the sources.

        Kim and Rush 2016, sec. 3.1 and 3.2.
        """
        recipe = self.recipe
        say = (lambda line: None) if resume else self.say
        teacher = ready_teacher(
            teacher, self.model, recipe, longest=recipe.data.max_length, say=say
        )
        if recipe.distillation.level == "word":
            self.teacher = teacher
            return
        assert isinstance(teacher, Translator)
        train = taught_pairs(
            self.data.train,
            teacher,
            self.directory / "taught",
            beam_size=recipe.distillation.beam_size,
            max_length=recipe.data.max_length,
            say=self.say,
        )
        self.data = replace(self.data, train=train)
        self.num_train = len(train)

    def card(self, name: str) -> ModelCard:
        data = self.recipe.data
        limits = Limits.of(self.data.train.src_lengths, self.data.train.tgt_lengths)
        return ModelCard(name, self.recipe.task, data.src_language, data.tgt_language, limits)

    def plan(self, epoch: int) -> Sequence[Any]:
        settings = self.recipe.training
        return plan_epoch(
            self.data.train.src_lengths,
            self.data.train.tgt_lengths,
            max_tokens=settings.batch_tokens,
            max_sentences=settings.batch_sentences,
            seed=settings.seed,
            epoch=epoch,
        )

    def load(self, item: Any) -> PairBatch:
        batch: PairBatch = self.model.collate(self.data.train, item)
        return batch

    def loss(self, batch: PairBatch) -> LossSum:
        net, smoothing = self.model.net, self.recipe.training.label_smoothing
        if self.teacher is None:
            return pair_loss(net, batch, label_smoothing=smoothing)
        settings = self.recipe.distillation
        return distilled_pairs(net, self.teacher.net, batch, settings, label_smoothing=smoothing)

    def evaluate(self) -> Evaluation:
        """Teacher-forced loss on all held-out pairs, and real decoding of the first of them."""
        recipe = self.recipe
        found = self.model.teacher_forced_sums(self.data.valid, recipe.training.label_smoothing)
        nll, accuracy = float(found.nll) / found.tokens, float(found.correct) / found.tokens
        settings = recipe.evaluation
        pairs = self.data.valid_pairs[: settings.decode_sentences]
        scores: dict[str, float] = {}
        samples: list[Sample] = []
        if pairs:
            outputs = self._decode(pairs, settings.beam_size)
            metrics = {*self._metrics()[:1], settings.metric} & {"bleu", "chrf", "exact_match"}
            scores = self._score(outputs, pairs, sorted(metrics)).values()
            shown = list(zip(pairs, outputs, strict=True))[: settings.num_samples]
            samples = [Sample(src, tgt, output) for (src, tgt), output in shown]
        values = scores | {"loss": -nll, "token_accuracy": accuracy, "accuracy": accuracy}
        if settings.metric not in values:
            raise UserError(
                f"evaluation.metric {settings.metric} needs decoded text: raise decode_sentences"
            )
        return Evaluation(
            loss=float(found.loss) / found.tokens,
            perplexity=perplexity(float(found.nll), found.tokens),
            token_accuracy=accuracy,
            scores=scores,
            samples=samples,
            value=values[settings.metric],
        )

    def finish(self, out: Path) -> FinalScores:
        """Decode the test text (the validation text where there is none) and score it."""
        data, settings = self.data, self.recipe.evaluation
        name, pairs = ("test", data.test_pairs) if data.test_pairs else ("valid", data.valid_pairs)
        outputs = self._decode(pairs, settings.final_beam_size)
        scores = self._score(outputs, pairs, self._metrics())
        beam = {"beam_size": settings.final_beam_size, "length_penalty": settings.length_penalty}
        write_json(out / "scores.json", {"set": name, **beam, **scores.to_dict()})
        write_text(out / f"{name}.output.txt", "".join(f"{output}\n" for output in outputs))
        return FinalScores(scores.to_dict()["scores"])

    def _decode(self, pairs: list[tuple[str, str]], beam_size: int) -> list[str]:
        outputs: list[str] = self.model.translate(
            [src for src, _ in pairs],
            beam_size=beam_size,
            length_penalty=self.recipe.evaluation.length_penalty,
            too_long="truncate",
        )
        return outputs

    def _score(
        self, outputs: list[str], pairs: list[tuple[str, str]], metrics: list[str]
    ) -> Scores:
        references = [tgt for _, tgt in pairs]
        language = self.recipe.data.tgt_language
        return corpus_scores(outputs, references, trg_lang=language, metrics=metrics)

    def _metrics(self) -> list[str]:
        """What outputs of the task are scored by, the main one first."""
        return ["bleu", "chrf", "ter"] if self.recipe.task == "translation" else ["exact_match"]
