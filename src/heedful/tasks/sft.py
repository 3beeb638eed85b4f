"""Supervised fine-tuning of language models on prompts and responses, or on chats.

The loss is that of the answers alone, by the chat template of the model (Ouyang et al. 2022,
"Training language models to follow instructions with human feedback", sec. 3.1).
"""

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from jaxtyping import Int64
from pydantic import Field

from heedful import task_keys
from heedful.config import Files
from heedful.data.buckets import BatchShape
from heedful.data.chat_template import BUILT_IN, ChatTemplate, read_chat_template
from heedful.data.chats import (
    Answers,
    ChatColumn,
    ChatEncoder,
    ChatFields,
    chat_of_record,
    load_messages,
)
from heedful.data.collate import Batch, collate_chats
from heedful.data.encoding import TextColumn
from heedful.data.plans import plan_packed_rows
from heedful.data.row_files import FileRows, open_records
from heedful.data.rows import MESSAGES, Rows
from heedful.data.tokenizer import Tokenizer
from heedful.data.tokenizer_training import SPECIALS
from heedful.errors import UserError
from heedful.evaluation.likelihood import token_metrics
from heedful.evaluation.sharing import from_main
from heedful.files import write_text
from heedful.parts.losses import LossSum
from heedful.pipelines import LanguageModel, ModelMetadata
from heedful.pipelines.assembly import continuation_ids
from heedful.tasks.corpora import resolve_paths
from heedful.tasks.inputs import (
    SomeRows,
    decoder_keys,
    make_tokenizer,
    raw_data,
    rows_per_batch,
)
from heedful.tasks.run_data import RawData, RunData
from heedful.tasks.scoring import (
    FinalScores,
    corpus_losses,
    held_out_loss,
    make_evaluation,
    write_scores,
)
from heedful.tasks.task import ObjectiveSettings, Task
from heedful.training.events import EvaluationResult, Sample

Plan: TypeAlias = Sequence[Int64[np.ndarray, " n"]]  # the chats of each row of a batch


class SftSettings(ObjectiveSettings):
    """Settings of chat templates, of the answers with a loss, and of evaluation samples."""

    chat_template: str | None = Field(
        None,
        description=f"File with a Jinja chat template, or the name of one ({', '.join(BUILT_IN)}); "
        "null: the template of the model in init_from, or chatml for a new tokenizer.",
    )
    special_tokens: list[str] | None = Field(
        None,
        description="Names in a given chat template that become special tokens, which a tokenizer "
        "without them is extended by; null: names such as <|im_end|> in it.",
    )
    answers: Answers = Field(
        "all", description="Answers of a chat with a loss: all of them, or the last one."
    )
    packing: bool = Field(
        True,
        description="Put several chats into a row of data.max_length tokens, with attention masked "
        "between them; false: batches of chats of similar length.",
    )
    sample_tokens: int = Field(
        64, ge=1, description="Maximum length of evaluation samples in tokens."
    )


class SupervisedFineTuning(Task):
    """Supervised fine-tuning on the answers of chats, from `data.train.file`."""

    objective_class = SftSettings
    recipe_keys = task_keys.SFT
    row_columns: ClassVar[tuple[str, ...]] = (MESSAGES,)
    default_model: ClassVar[dict[str, Any]] = {"architecture": "gpt2"}
    unit = "chats"

    def check(self) -> None:
        """See `Task.check`: refuse subword sampling, and special tokens without a template."""
        super().check()
        if self.recipe.training.subword_sampling is not None:
            raise UserError(
                "training.subword_sampling: answers are marked token by token, so the task sft "
                "does not support it; leave it out"
            )
        if (name := self.objective.chat_template) is not None:
            ChatTemplate(read_chat_template(name), {})
        elif self.objective.special_tokens is not None:
            raise UserError(
                "objective.special_tokens has no effect without objective.chat_template; give it"
            )

    def objective_files(self) -> list[Path]:
        name = self.objective.chat_template
        return [] if name is None or name in BUILT_IN else [Path(name)]

    def raw_data(self) -> RawData:
        return raw_data(self.recipe, lambda entry: open_chats(entry.files))

    def train_tokenizers(self, sample: Rows) -> tuple[Tokenizer, Tokenizer]:
        template, names = self._template(BUILT_IN["chatml"])
        tokens = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2]}
        texts = _rendered_texts(sample, ChatTemplate(template, tokens), [*names, *SPECIALS])
        tokenizer = make_tokenizer(self.recipe, texts, extra_specials=names)
        tokenizer = tokenizer.extended((), template)
        return tokenizer, tokenizer

    def adapt_tokenizers(
        self, tokenizers: tuple[Tokenizer, Tokenizer]
    ) -> tuple[Tokenizer, Tokenizer]:
        """See `Task.adapt_tokenizers`: with the chat template of the objective."""
        tokenizer = tokenizers[0]
        if self.objective.chat_template is None:
            if tokenizer.chat_template is None:
                raise UserError(
                    "the tokenizer to start from has no chat template: set "
                    f"objective.chat_template to {' or '.join(BUILT_IN)}, or to a file"
                )
            return tokenizers
        template, names = self._template("")
        tokenizer = tokenizer.extended(names, template)
        return tokenizer, tokenizer

    def _template(self, default: str) -> tuple[str, list[str]]:
        """The source of the recipe's chat template or the default one, and its special tokens."""
        name, names = self.objective.chat_template, self.objective.special_tokens
        source = default if name is None else read_chat_template(name)
        return source, ChatTemplate(source, {}).special_names if names is None else names

    def text_columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        return {"text": ChatColumn(tokenizers[0], answers=self.objective.answers)}

    def model_keys(self, data: RunData | None, name: str) -> dict[str, object]:
        return decoder_keys(self.recipe, data, name, self.recipe.data.max_length)

    def describe_model(self, data: RunData, name: str) -> ModelMetadata:
        ids = continuation_ids(data.tokenizer, [ChatEncoder(data.tokenizer).end_id])
        return ModelMetadata(name, self.recipe.task, self.recipe.data.src_language, generation=ids)

    def plan_rows(
        self, data: RunData, buffer: int, rows: Int64[np.ndarray, " n"]
    ) -> Sequence[Plan]:
        """See `Task.plan_rows`: single or packed chats."""
        if not self.objective.packing:
            batches = super().plan_rows(data, buffer, rows)
            return [[*indices[:, None]] for indices in batches]
        max_length = self.recipe.data.max_length
        return plan_packed_rows(
            self.row_lengths(data, rows)[0],
            max_length=max_length,
            batch_size=rows_per_batch(self.recipe, max_length),
            seed=self.recipe.training.seed,
            epoch=data.epoch,
            buffer=buffer,
            rows=rows,
        )

    def row_lengths(self, data: RunData, rows: SomeRows) -> tuple[Int64[np.ndarray, " n"], ...]:
        """Inputs of each chat: all of its tokens but the last."""
        return (data.ids("train").lengths_of(rows) - 1,)

    def batch_shapes(self, data: RunData) -> list[BatchShape]:
        """Packed rows are of one width."""
        if not self.objective.packing:
            return super().batch_shapes(data)
        max_length = self.recipe.data.max_length
        return [BatchShape(rows_per_batch(self.recipe, max_length), max_length)]

    def collate(self, data: RunData, item: Plan, split: str = "train") -> Batch:
        return collate_chats(data.ids(split), item, pad_id=data.tokenizer.pad_id)

    def evaluate(self, model: LanguageModel, data: RunData) -> EvaluationResult:
        """Loss, perplexity and accuracy on the tokens of answers."""
        samples = [
            Sample(prompt[-1]["content"] if prompt else "", answer, output)
            for prompt, answer, output in self._samples(model, data, "valid")
        ]
        sums, by_corpus = self._split_sums(model, data, "valid")
        return make_evaluation(self.recipe, sums, samples, corpora=by_corpus)

    def compute_final_scores(self, model: LanguageModel, data: RunData, out: Path) -> FinalScores:
        """Loss, perplexity and accuracy on the tokens of answers; some outputs as JSON lines."""
        sums, by_corpus = self._split_sums(model, data, data.final)
        lines = [
            json.dumps({"messages": prompt, "answer": answer, "output": output}, ensure_ascii=False)
            for prompt, answer, output in self._samples(model, data, data.final)
        ]
        write_text(out / f"{data.final}.output.jsonl", "".join(f"{line}\n" for line in lines))
        counts = {"num_chats": len(data.splits[data.final]), "num_tokens": sums.tokens}
        scores = token_metrics(sums) | corpus_losses(by_corpus)
        return write_scores(data, out, counts, scores)

    def _split_sums(
        self, model: LanguageModel, data: RunData, split: str
    ) -> tuple[LossSum, dict[str, float]]:
        """Loss sums over a split, and the loss of each corpus."""

        def collate(indices: Int64[np.ndarray, " B"]) -> Batch:
            return self.collate(data, list(indices[:, None]), split)

        return held_out_loss(
            model.net,
            self.loss,
            collate,
            data.ids(split).lengths - 1,
            corpora=data.splits[split].corpora,
            label_smoothing=self.recipe.training.label_smoothing,
        )

    @from_main
    def _samples(
        self, model: LanguageModel, data: RunData, split: str
    ) -> list[tuple[list[dict[str, Any]], str, str]]:
        """Prompts of the first held-out chats, their last answers, and greedy outputs."""
        rows = data.texts(split, self.recipe.evaluation.num_samples)
        chats = [load_messages(row[MESSAGES]) for row in rows]
        limit = min(self.objective.sample_tokens, max(1, model.config.max_length // 2))
        most = model.config.max_length - limit
        encoder = ChatEncoder(data.tokenizer)
        short = [c for c in chats if c[:-1] and len(encoder.encode_prompt(c[:-1])) <= most]
        if not short:
            return []
        prompts = [chat[:-1] for chat in short]
        outputs = model.chat(prompts, max_new_tokens=limit, temperature=0.0)
        answers = [chat[-1]["content"] for chat in short]
        return list(zip(prompts, answers, outputs, strict=True))


def open_chats(files: Files) -> FileRows:
    """The chats of a split as JSON, in the column `MESSAGES`."""
    names = (files.messages_field, files.prompt_field, files.response_field)
    defaults = ChatFields()
    fields = ChatFields(*(name or default for name, default in zip(names, defaults, strict=True)))
    return open_records(resolve_paths(files.file), MESSAGES, partial(chat_of_record, fields=fields))


def _rendered_texts(rows: Rows, template: ChatTemplate, specials: list[str]) -> list[str]:
    """The texts between the special tokens of all chats."""
    borders = re.compile("|".join(map(re.escape, specials)))
    texts: list[str] = []
    for index, chat in enumerate(rows[MESSAGES]):
        try:
            texts += filter(None, borders.split(template.render(load_messages(chat))))
        except UserError as error:
            raise UserError(f"{rows.location(index)}: {error}") from None
    return texts
