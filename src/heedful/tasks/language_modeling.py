"""Language modeling: training on packed windows, evaluated on overlapping windows."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64
from pydantic import Field

from heedful import task_keys
from heedful.data.buckets import BatchShape
from heedful.data.collate import Batch, collate_windows
from heedful.data.columns import Sequences
from heedful.data.encoding import TextColumn
from heedful.data.plans import Windows, plan_windows
from heedful.data.rows import Rows
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.evaluation.likelihood import token_metrics
from heedful.evaluation.sharing import current_shares, from_main
from heedful.files import write_text
from heedful.parts.losses import LossSum
from heedful.pipelines import LanguageModel, ModelMetadata
from heedful.pipelines.assembly import continuation_ids
from heedful.pipelines.scoring import unpredicted, window_sums
from heedful.tasks.inputs import joint_tokenizer, raw_text_data, rows_per_batch
from heedful.tasks.run_data import Inherited, RawData, RunData
from heedful.tasks.scoring import (
    FinalScores,
    corpus_losses,
    make_evaluation,
    sums_by_corpus,
    write_scores,
)
from heedful.tasks.task import ObjectiveSettings, Task
from heedful.training.events import EvaluationResult, Sample


class WindowSettings(ObjectiveSettings):
    """The windows of language modeling, and the samples of an evaluation."""

    context: int = Field(
        256, ge=1, description="Length of a window, the model's maximum context, in tokens."
    )
    isolate: bool = Field(True, description="Mask attention between different texts of one window.")
    add_bos_eos: bool = Field(
        True, description="Put a BOS token before and an EOS token after every text."
    )
    stride: int | None = Field(
        None,
        ge=1,
        description="Tokens between the starts of evaluation windows; null: the context length.",
    )
    prompt: str | None = Field(
        None,
        description="Text that evaluation samples continue; null: the start of a text, or a line "
        "break without add_bos_eos.",
    )
    sample_tokens: int = Field(120, ge=1, description="Length of evaluation samples in tokens.")
    temperature: float = Field(
        0.8, ge=0, description="Sampling temperature of evaluation samples; 0: greedy search."
    )


class LanguageModeling(Task):
    """Language modeling on texts that are concatenated and cut into windows."""

    objective_class = WindowSettings
    recipe_keys = task_keys.LANGUAGE_MODELING
    row_columns: ClassVar[tuple[str, ...]] = ("text",)
    default_model: ClassVar[dict[str, Any]] = {"architecture": "gpt2"}
    length_key = "objective.context"
    unit = "tokens"

    def check(self) -> None:
        """See `Task.check`: refuse subword sampling."""
        super().check()
        if self.recipe.training.subword_sampling is not None:
            raise UserError(
                "training.subword_sampling: windows are cut from stored tokens, so the task "
                f"{self.recipe.task} does not support it; leave it out"
            )

    def raw_data(self) -> RawData:
        return raw_text_data(self.recipe)

    def train_tokenizers(self, sample: Rows) -> tuple[Tokenizer, Tokenizer]:
        template = "bos" if self.objective.add_bos_eos else "none"
        return joint_tokenizer(self.recipe, sample, template=template)

    def text_columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        adds = self.objective.add_bos_eos
        return {"text": TextColumn(tokenizers[0], ("text",), "document" if adds else "none")}

    def encode_options(
        self, split: str, labels: Sequence[str], inherited: Inherited
    ) -> dict[str, Any]:
        return {}

    def split_size(self, data: RunData, split: str) -> int:
        """The number of tokens."""
        return data.splits[split].report.counts["text"].tokens

    def model_keys(self, data: RunData | None, name: str) -> dict[str, object]:
        vocab_size = 8 if data is None else data.tokenizer.vocab_size
        return {"vocab_size": vocab_size, "max_length": self.objective.context}

    def describe_model(self, data: RunData, name: str) -> ModelMetadata:
        ids = continuation_ids(data.tokenizer)
        return ModelMetadata(name, self.recipe.task, self.recipe.data.src_language, generation=ids)

    def plan_rows(self, data: RunData, buffer: int, rows: Int64[np.ndarray, " n"]) -> list[Windows]:
        """See `Task.plan_rows`: windows of the texts."""
        context = self.objective.context
        return plan_windows(
            data.ids("train").lengths_of(rows),
            context=context,
            batch_size=rows_per_batch(self.recipe, context),
            seed=self.recipe.training.seed,
            epoch=data.epoch,
            buffer=buffer,
            rows=rows,
        )

    def batch_shapes(self, data: RunData) -> list[BatchShape]:
        """All windows are of one width."""
        context = self.objective.context
        return [BatchShape(rows_per_batch(self.recipe, context), context)]

    def collate(self, data: RunData, item: Windows) -> Batch:
        pad_id = data.tokenizer.pad_id
        return collate_windows(
            data.ids("train"), item, isolate=self.objective.isolate, pad_id=pad_id
        )

    def evaluate(self, model: LanguageModel, data: RunData) -> EvaluationResult:
        sums, by_corpus, scores = self._sums_and_bits(model, data, "valid")
        samples = self._samples(model, data)
        made = make_evaluation(self.recipe, sums, samples, scores, corpora=by_corpus)
        return replace(made, smoothed_loss=None)  # windows are summed without smoothing

    def compute_final_scores(self, model: LanguageModel, data: RunData, out: Path) -> FinalScores:
        sums, by_corpus, bits = self._sums_and_bits(model, data, data.final)
        mean = token_metrics(sums)
        scores = {"loss": mean["loss"], "perplexity": mean["perplexity"], **bits}
        scores |= corpus_losses(by_corpus)
        characters = data.splits[data.final].report.counts["text"].characters
        samples = "\n\n".join(sample.output for sample in self._samples(model, data))
        write_text(out / "samples.txt", samples + "\n")
        return write_scores(data, out, {"num_characters": characters}, scores)

    def _sums_and_bits(
        self, model: LanguageModel, data: RunData, name: str
    ) -> tuple[LossSum, dict[str, float], dict[str, float]]:
        """Loss sums over a split, the loss of each corpus, and bits per character and per byte."""
        keys, counts = self.objective, data.splits[name].report.counts["text"]
        stride = keys.stride or keys.context
        texts, columns, own = data.ids(name), data.splits[name], current_shares().part

        def sums_of(start: int, end: int) -> LossSum:
            rows = Sequences(texts.ids, texts.offsets[start : end + 1])
            return window_sums(model, rows, context=keys.context, stride=stride, part=own)

        sums, by_corpus = sums_by_corpus(columns.corpora, len(columns), sums_of)
        bits = float(sums.nll) / math.log(2)
        characters, num_bytes = self._unpredicted(model, data, name)
        per_unit = {
            "bits_per_character": bits / max(1, counts.characters - characters),
            "bits_per_byte": bits / max(1, counts.bytes - num_bytes),
        }
        return sums, by_corpus, per_unit

    def _unpredicted(self, model: LanguageModel, data: RunData, name: str) -> tuple[int, int]:
        """Characters and bytes of a split in tokens that nothing precedes: the first ones of texts
        without BOS."""
        texts, ids = data.texts(name), data.ids(name)
        first = [
            text["text"][: unpredicted(model, text["text"], ids[index][:1].tolist())]
            for index, text in zip(range(len(ids)), texts, strict=True)
        ]
        return sum(map(len, first)), len("".join(first).encode())

    @from_main
    def _samples(self, model: LanguageModel, data: RunData) -> list[Sample]:
        """Sampled continuations of the recipe's prompt."""
        keys, tokenizer = self.objective, data.tokenizer
        count = self.recipe.evaluation.num_samples
        if not count:
            return []
        prompt = ("" if keys.add_bos_eos else "\n") if keys.prompt is None else keys.prompt
        if not keys.add_bos_eos and not tokenizer.encode(prompt):
            prompt = tokenizer.decode(data.ids("valid").ids[:1].tolist())
        texts = model.generate(
            [prompt],
            max_new_tokens=keys.sample_tokens,
            temperature=keys.temperature or 1e-6,
            num_return=count,
            seed=self.recipe.training.seed,
            too_long="truncate",
            return_details=True,
        )[0]
        return [Sample(prompt, "", text.text) for text in texts]
