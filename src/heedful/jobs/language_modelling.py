"""Learning to go on with texts: packed windows, judged by windows that overlap."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from heedful.config import Recipe
from heedful.data.documents import (
    TokenCounts,
    encode_documents,
    open_documents,
)
from heedful.data.packing import PackedBatch, load_windows, packed_plan
from heedful.data.store import IdStore
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.evaluation.metrics import perplexity
from heedful.files import write_json, write_text
from heedful.inference import GenerationIds, ModelCard, SavedModel
from heedful.jobs.job import FinalScores, Job, Say, make_tokenizer, objective
from heedful.jobs.sources import check_distillation, kept_sizes, ready_teacher
from heedful.jobs.texts import SPLITS, check_sources, read_splits
from heedful.parts.losses import LossSum
from heedful.tasks.distillation import distilled_windows
from heedful.tasks.language_modelling import window_loss
from heedful.training.events import Sample
from heedful.training.trainer import Evaluation


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Objective:
    """How texts become windows.

    Args:
        context: tokens that a window holds, and that the model sees at most.
        isolate: keep the texts of a window apart by a mask; else they run on into each other.
        marks: put BOS before and EOS behind every text.
        stride: how far the windows of an evaluation are apart; None: the context, so that no token
            is read twice. A smaller one gives each token more to go by, and costs more.
        prompt: what the samples of an evaluation go on from; None: the mark that begins a text, or
            a line break.
        sample_tokens: how long the samples are.
        temperature: of the samples.
    """

    context: Annotated[int, Field(ge=1)] = 256
    isolate: bool = True
    marks: bool = True
    stride: Annotated[int, Field(ge=1)] | None = None
    prompt: str | None = None
    sample_tokens: Annotated[int, Field(ge=1)] = 120
    temperature: Annotated[float, Field(ge=0)] = 0.8


class LanguageModelling(Job):
    """Texts laid end to end and cut into windows."""

    default_model: ClassVar[dict[str, Any]] = {"architecture": "gpt2"}

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        objective(recipe, Objective)
        check_sources(recipe, ("text",))
        check_distillation(recipe)
        if recipe.training.batch_sentences is None and recipe.training.batch_tokens is None:
            raise UserError("give training.batch_sentences: how many windows a batch has")

    @property
    def settings(self) -> Objective:
        """The recipe's objective."""
        return objective(self.recipe, Objective)

    @property
    def batch_size(self) -> int:
        """Windows in a batch."""
        training = self.recipe.training
        if training.batch_sentences is not None:
            return training.batch_sentences
        assert training.batch_tokens is not None
        return max(1, training.batch_tokens // self.settings.context)

    def prepare(self, say: Say) -> dict[str, Any]:
        splits = {name: split.texts for name, split in read_splits(self.recipe, say).items()}
        marks = self.settings.marks
        if self.given is not None:
            tokenizer = self.given[0]
        else:
            template = "bos" if marks else "none"
            tokenizer = make_tokenizer(self.recipe.tokenizer, splits["train"], template=template)
        say(f"tokenizer  {tokenizer.kind}, {tokenizer.vocab_size:,} entries")
        for name, documents in splits.items():
            counts = encode_documents(documents, tokenizer, self.directory / name, marks=marks)
            say(
                f"{name:<10} {counts.num_documents:,} texts, {counts.num_characters:,} characters, "
                f"{counts.num_tokens:,} tokens"
                + (f", {counts.num_unknown:,} unknown" if counts.num_unknown else "")
            )
        tokenizer.save(self.directory / "tokenizer.json")
        return {name: len(documents) for name, documents in splits.items()}

    def open(self) -> None:
        tokenizer = Tokenizer.load(self.directory / "tokenizer.json")
        self.tokenizers = (tokenizer, tokenizer)
        self.stores: dict[str, tuple[IdStore, TokenCounts]] = {
            name: open_documents(self.directory / name)
            for name in SPLITS
            if (self.directory / f"{name}.ids.npy").is_file()
        }
        self.num_train, self.num_valid = (self.stores[name][1].num_tokens for name in SPLITS[:2])

    def sizes(self, recipe: Recipe, name: str) -> dict[str, object]:
        sizes: dict[str, object] = {"vocab_size": self.tokenizers[0].vocab_size}
        return kept_sizes(recipe, sizes, self.settings.context, "objective.context")

    def learn_from(self, teacher: SavedModel, *, resume: bool) -> None:
        """From what it says after each token (Kim and Rush 2016, sec. 3.1)."""
        longest = self.settings.context
        say = (lambda line: None) if resume else self.say
        self.teacher = ready_teacher(teacher, self.model, self.recipe, longest=longest, say=say)

    def card(self, name: str) -> ModelCard:
        tokenizer = self.tokenizers[0]
        never = {tokenizer.specials.pad_id, tokenizer.specials.bos_id} - {tokenizer.eos_id, None}
        ids = GenerationIds(
            start=tokenizer.prefix_ids,
            end=(tokenizer.eos_id,),
            never=tuple(sorted(token for token in never if token is not None)),
        )
        return ModelCard(name, self.recipe.task, self.recipe.data.src_language, generation=ids)

    def plan(self, epoch: int) -> Sequence[Any]:
        return packed_plan(
            self.stores["train"][0].lengths,
            context=self.settings.context,
            batch_size=self.batch_size,
            seed=self.recipe.training.seed,
            epoch=epoch,
        )

    def load(self, item: Any) -> PackedBatch:
        return load_windows(
            self.stores["train"][0],
            item,
            isolate=self.settings.isolate,
            device=self.model.device,
        )

    def loss(self, batch: PackedBatch) -> LossSum:
        net, smoothing = self.model.net, self.recipe.training.label_smoothing
        if self.teacher is None:
            return window_loss(net, batch, label_smoothing=smoothing)
        settings = self.recipe.distillation
        return distilled_windows(net, self.teacher.net, batch, settings, label_smoothing=smoothing)

    def evaluate(self) -> Evaluation:
        found, scores = self._scored("valid")
        nll = float(found.nll) / found.tokens
        accuracy = float(found.correct) / found.tokens
        values = scores | {"loss": -nll, "token_accuracy": accuracy, "accuracy": accuracy}
        metric = self.recipe.evaluation.metric
        if metric not in values:
            raise UserError(f"evaluation.metric {metric} is none of a language model; use loss")
        return Evaluation(
            loss=nll,
            perplexity=perplexity(float(found.nll), found.tokens),
            token_accuracy=accuracy,
            scores=scores,
            samples=self._samples(),
            value=values[metric],
        )

    def finish(self, out: Path) -> FinalScores:
        name = "test" if "test" in self.stores else "valid"
        found, scores = self._scored(name)
        nll = float(found.nll) / found.tokens
        scores = {"loss": nll, "perplexity": math.exp(nll), **scores}
        counts = self.stores[name][1]
        write_json(
            out / "scores.json",
            {"set": name, "num_characters": counts.num_characters, "scores": scores},
        )
        samples = "\n\n".join(sample.output for sample in self._samples())
        write_text(out / "samples.txt", samples + "\n")
        return FinalScores(dict(scores))

    def _scored(self, name: str) -> tuple[LossSum, dict[str, float]]:
        """Sums over a split, and what they are a character and a byte."""
        store, counts = self.stores[name]
        settings = self.settings
        found = self.model.window_sums(
            store, context=settings.context, stride=settings.stride or settings.context
        )
        bits = float(found.nll) / math.log(2)
        return found, {
            "bits_per_character": bits / counts.num_characters,
            "bits_per_byte": bits / counts.num_bytes,
        }

    def _samples(self) -> list[Sample]:
        settings, tokenizer = self.settings, self.tokenizers[0]
        count = self.recipe.evaluation.num_samples
        if not count:
            return []
        prompt: Any = settings.prompt
        if prompt is None:
            prompt = "" if settings.marks else "\n"
        if not settings.marks and not tokenizer.encode(prompt):
            prompt = tokenizer.decode(self.stores["valid"][0].ids[:1].tolist())
        texts = self.model.generations(
            [prompt],
            max_new_tokens=settings.sample_tokens,
            temperature=settings.temperature or 1e-6,
            num_return=count,
            seed=self.recipe.training.seed,
        )[0]
        return [Sample(prompt, "", text.text) for text in texts]
