"""Translation: training on pairs of texts, evaluated by decoding."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64

from heedful import task_keys
from heedful.config import OWN_METRICS, Recipe
from heedful.data.collate import Batch, collate_pairs
from heedful.data.encoding import TextColumn
from heedful.data.row_files import FileRows, open_rows
from heedful.data.rows import CORPUS, Rows
from heedful.data.special_tokens import language_tokens
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.evaluation.metrics import (
    Scores,
    corpus_scores,
    metric_problem,
    split_at_spaces,
    usable_metric,
)
from heedful.evaluation.sharing import current_shares
from heedful.fidelity import CHARACTERS, Keep, has_mask_tokens
from heedful.fidelity.rows import MaskedPairs
from heedful.files import write_json, write_lines
from heedful.pipelines import Limits, ModelMetadata, Translator
from heedful.plugins import metric
from heedful.progress import track
from heedful.tasks.corpora import (
    SPLITS,
    SplitFiles,
    all_tags,
    ids_before,
    language_tags,
    languages_of,
    resolve_paths,
    shared_languages,
    split_files,
)
from heedful.tasks.inputs import (
    TWO_STACKS,
    SomeRows,
    joint_tokenizer,
    make_tokenizer,
    raw_data,
    two_stack_keys,
)
from heedful.tasks.noisy_rows import SIDES, RowNoise
from heedful.tasks.run_data import Inherited, RawData, RunData
from heedful.tasks.scoring import FinalScores, held_out_loss, make_evaluation
from heedful.tasks.task import Task
from heedful.training.events import EvaluationResult, Sample

_LIMIT_ROWS = 1 << 20  # training pairs, evenly spaced, by whose lengths outputs are limited


class Translation(Task):
    """Translation, or any other sequence-to-sequence task, from pairs of texts.

    Attributes:
        final_metrics: the metrics of the final scores; the first one also of every evaluation.
    """

    default_model = TWO_STACKS
    recipe_keys = task_keys.PAIRS
    row_columns: ClassVar[tuple[str, ...]] = ("src", "tgt")
    distillation_levels: ClassVar[tuple[str, ...]] = ("word", "sequence")
    final_metrics: ClassVar[tuple[str, ...]] = ("bleu", "chrf", "ter")

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*super().metrics, *metric.names())

    @property
    def usable_metrics(self) -> tuple[str, ...]:
        """`final_metrics` without those that cannot score the target language (packages are
        missing, for example); exact match if none is left."""
        names = self._metrics_for(shared_languages(self.recipe)[1])
        return tuple(names) or ("exact_match",)

    def _metrics_for(self, language: str | None) -> list[str]:
        return [name for name in self.final_metrics if metric_problem(name, language) is None]

    def notes(self) -> list[str]:
        """The scores that are left out, of all targets or of those of a corpus."""
        of_corpora = [languages_of(self.recipe, name)[1] for name in self.recipe.data.corpora]
        left_out: dict[str, list[str]] = {}  # metrics by what they need
        for language in dict.fromkeys([shared_languages(self.recipe)[1], *of_corpora]):
            for name in self.final_metrics:
                if problem := metric_problem(name, language):
                    left_out.setdefault(problem, []).append(name)
        return [
            f"scores are without {', '.join(dict.fromkeys(names))}: {problem}"
            for problem, names in left_out.items()
        ]

    def check(self) -> None:
        """See `Task.check`: the metric and the files of each split."""
        super().check()
        if self.recipe.evaluation.metric not in OWN_METRICS:
            usable_metric(self.recipe.evaluation.metric, shared_languages(self.recipe)[1])
        for key, _, _, files in split_files(self.recipe):
            src, tgt = len(resolve_paths(files.src)), len(resolve_paths(files.tgt))
            if files.file is not None and src + tgt:
                raise UserError(f"{key}: give file, or src and tgt, not both")
            if src != tgt:
                raise UserError(
                    f"{key} names {src} src files but {tgt} tgt files; give as many of both, "
                    f"by {key}.src=FILE {key}.tgt=FILE"
                )

    def raw_data(self) -> RawData:
        return raw_data(self.recipe, lambda entry: open_pairs(entry, self.recipe))

    @property
    def keep(self) -> Keep | None:
        """The pieces of sources that outputs must keep; None: `data.keep` is not set."""
        data = self.recipe.data
        return Keep(tuple(data.keep_patterns)) if data.keep else None

    def train_tokenizers(self, sample: Rows) -> tuple[Tokenizer, Tokenizer]:
        tags, columns = all_tags(self.recipe), {side: sample[side] for side in ("src", "tgt")}
        if self.keep is not None:
            masked = MaskedPairs(self.keep)(sample)
            # Each character of the texts is in the vocabulary.
            columns = {side: [*masked[side], " ".join(CHARACTERS)] for side in columns}
        if self.recipe.tokenizer.joint:
            return joint_tokenizer(self.recipe, Rows(columns), extra_specials=tags)
        src = make_tokenizer(self.recipe, columns["src"], extra_specials=tags)
        return src, make_tokenizer(self.recipe, columns["tgt"])

    def text_columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        src, tgt = tokenizers
        if self.keep is not None and not all(map(has_mask_tokens, tokenizers)):
            raise UserError(
                "data.keep needs a token for each of its masks, which this tokenizer lacks: train "
                "a new one of kind bpe or unigram, or leave data.keep out"
            )
        before = ids_before(self.recipe, src)
        return {
            "src": TextColumn(src, ("src",), "target", before.src),
            "tgt": TextColumn(tgt, ("tgt",), "target", before.tgt),
        }

    def encode_options(
        self, split: str, labels: Sequence[str], inherited: Inherited
    ) -> dict[str, Any]:
        # Test pairs are never dropped: long sources are truncated when they are decoded.
        options = {} if split == "test" else super().encode_options(split, labels, inherited)
        return options if self.keep is None else {**options, "prepare": MaskedPairs(self.keep)}

    def row_noise(self, data: RunData) -> RowNoise:
        """See `Task.row_noise`."""
        training = self.recipe.training
        names = [corpus.name for corpus in data.splits["train"].corpora] or [""]
        return RowNoise(
            training.noise,
            dict(zip(SIDES, data.tokenizers, strict=True)),
            {name: languages_of(self.recipe, name) for name in names},
            seed=training.seed,
            max_length=self.recipe.data.max_length,
            max_tokens=training.batch_tokens,
        )

    def model_keys(self, data: RunData | None, name: str) -> dict[str, object]:
        return two_stack_keys(self.recipe, data, name)

    def describe_model(self, data: RunData, name: str) -> ModelMetadata:
        languages = shared_languages(self.recipe)
        num_rows = len(data.splits["train"])
        rows = np.arange(0, num_rows, -(-num_rows // _LIMIT_ROWS))
        limits = Limits.from_lengths(*self.row_lengths(data, rows))
        tags = language_tags(self.recipe)
        more: dict[str, Any] = {"language_tags": tags, "keep": self.keep}
        if ids_before(self.recipe, data.tokenizers[0]).tgt:
            more["language_codes"] = language_tokens(data.tokenizers[0])
        return ModelMetadata(name, self.recipe.task, *languages, limits, **more)

    def row_lengths(self, data: RunData, rows: SomeRows) -> tuple[Int64[np.ndarray, " n"], ...]:
        return tuple(data.ids("train", side).lengths_of(rows) for side in ("src", "tgt"))

    def collate(self, data: RunData, item: Int64[np.ndarray, " n"], split: str = "train") -> Batch:
        src, tgt = data.ids(split, "src"), data.ids(split, "tgt")
        pad_id = data.tokenizers[1].pad_id
        return collate_pairs(src, tgt, item, start_ids=[data.start_id], pad_id=pad_id)

    def evaluate(self, model: Translator, data: RunData) -> EvaluationResult:
        """Teacher-forced loss on all validation pairs, and scores of the first ones, decoded."""
        settings = self.recipe.evaluation
        sums, by_corpus = held_out_loss(
            model.net,
            self.loss,
            lambda indices: self.collate(data, indices, "valid"),
            *(data.ids("valid", side).lengths for side in ("src", "tgt")),
            corpora=data.splits["valid"].corpora,
            label_smoothing=self.recipe.training.label_smoothing,
        )
        scores: dict[str, float] = {}
        samples: list[Sample] = []
        if settings.decode_sentences:
            rows = self._rows_to_decode(data)
            metrics = {*self.usable_metrics[:1], settings.metric}.difference(OWN_METRICS)
            outputs, decoded = self.decode(model, rows, settings.beam_size, sorted(metrics))
            scores = decoded.values()
            sample_rows = list(zip(rows, outputs, strict=True))[: settings.num_samples]
            samples = [Sample(row["src"], row["tgt"], output) for row, output in sample_rows]
        return make_evaluation(self.recipe, sums, samples, scores, corpora=by_corpus)

    def _rows_to_decode(self, data: RunData) -> list[dict[str, str]]:
        """The first validation rows, of several corpora the first ones of each."""
        count = self.recipe.evaluation.decode_sentences
        names = [corpus.name for corpus in data.splits["valid"].corpora]
        if not names:
            return data.texts("valid", count)
        rows = data.texts("valid")
        by_corpus = [[row for row in rows if row[CORPUS] == name] for name in names]
        return [row for listed in by_corpus for row in listed[: -(-count // len(names))]]

    def compute_final_scores(self, model: Translator, data: RunData, out: Path) -> FinalScores:
        """Decode and score the test sources, or those of valid if there is no test split."""
        settings, rows = self.recipe.evaluation, data.texts(data.final)
        warn = logging.getLogger("heedful").warning
        unnamed = [row["tgt"] for row in rows if self._tgt_language(row) is None]
        if problem := split_at_spaces(unnamed, self.usable_metrics):
            warn(f"{problem}; set data.tgt_language to zh or ja")
        outputs, scores = self.decode(model, rows, settings.final_beam_size, self.usable_metrics)
        content: dict[str, Any] = {"set": data.final, "beam_size": settings.final_beam_size}
        content |= {"length_penalty": settings.length_penalty, **scores.to_dict()}
        for corpus in dict.fromkeys(row[CORPUS] for row in rows if CORPUS in row):
            indices = [index for index, row in enumerate(rows) if row[CORPUS] == corpus]
            part = [outputs[index] for index in indices], [rows[index] for index in indices]
            metrics = self._metrics_for(languages_of(self.recipe, corpus)[1]) or ["exact_match"]
            by_metric = self._score(model, *part, metrics).to_dict()["scores"]
            for name, score in by_metric.items():
                score["name"] += f", {corpus}"
                content["scores"][f"{name}/{corpus}"] = score
        write_json(out / "scores.json", content)
        path = out / f"{data.final}.output.txt"
        if count := write_lines(path, outputs):
            warn(f"{path}: outputs with line breaks, each written as a space: {count:,}")
        return FinalScores(content["scores"])

    def decode(
        self,
        model: Translator,
        rows: Sequence[dict[str, str]],
        beam_size: int,
        metrics: Sequence[str],
    ) -> tuple[list[str], Scores]:
        """The model's outputs for the sources of `rows`, and their scores against the targets.

        The processes that share an evaluation divide the sources.
        The scores ignore case if the target tokenizer lowercases.
        """
        tokenizer = model.src_tokenizer
        before = ids_before(self.recipe, tokenizer)
        texts = [row["src"] for row in rows]
        if self.keep is None:
            ids = tokenizer.encode_batch(texts)
        else:
            ids = tokenizer.encode_batch([self.keep.mask(text).text for text in texts])
        sources = [
            (text, tokenizer.encode_target([*before.src.get(row.get(CORPUS, ""), ()), *row_ids]))
            for text, row, row_ids in zip(texts, rows, ids, strict=True)
        ]
        targets = [self._tgt_language(row) if before.tgt else None for row in rows]
        shares, outputs = current_shares(), [""] * len(sources)

        def translate(target: str | None, own: Sequence[tuple[str, list[int]]]) -> list[str]:
            more: Any = {} if target is None else {"tgt_language": target}
            with track("translating", len(own)) as advance:
                options = model.options(
                    beam_size=beam_size,
                    length_penalty=self.recipe.evaluation.length_penalty,
                    too_long="truncate",
                    scores=False,
                    progress=advance,
                    **more,
                )
                beams = model.generations([row for _, row in own], options)
            kept = model.kept([text for text, _ in own], beams, options)
            return [best.text for best, *_ in kept]

        for target in dict.fromkeys(targets):  # a search has one target language
            indices = [index for index, one in enumerate(targets) if one == target]
            found = shares.map(partial(translate, target), [sources[index] for index in indices])
            for index, output in zip(indices, found, strict=True):
                outputs[index] = output
        return outputs, shares.from_main(lambda: self._score(model, outputs, rows, metrics))

    def _tgt_language(self, row: dict[str, str]) -> str | None:
        """The target language of a row, by its corpus."""
        return languages_of(self.recipe, row.get(CORPUS, ""))[1]

    def _score(
        self,
        model: Translator,
        outputs: list[str],
        rows: Sequence[dict[str, str]],
        metrics: Sequence[str],
    ) -> Scores:
        """The scores of outputs against the targets of `rows`."""
        languages = {self._tgt_language(row) for row in rows}
        return corpus_scores(
            outputs,
            [row["tgt"] for row in rows],
            tgt_language=languages.pop() if len(languages) == 1 else None,
            metrics=metrics,
            lowercase=model.tgt_tokenizer.lowercases,
        )


class GeneratedPairs(Translation):
    """A task that generates its pairs, scored by exact match; subclasses define `generate_pairs`.

    A subclass that reads keys of `data.generated` adds their names to `recipe_keys`.
    """

    recipe_keys = task_keys.GENERATED_PAIRS
    row_columns: ClassVar[tuple[str, ...]] = ()
    final_metrics: ClassVar[tuple[str, ...]] = ("exact_match",)

    def generate_pairs(self, split: str, count: int, unseen: set[str]) -> list[tuple[str, str]]:
        """`count` pairs of a split, equal for equal recipes, with no source that is in `unseen`."""
        raise NotImplementedError

    def raw_data(self) -> RawData:
        sizes, sources = self.recipe.data.generated, set[str]()
        rows: dict[str, dict[str, FileRows] | Rows] = {}
        for split in SPLITS:
            pairs = self.generate_pairs(split, getattr(sizes, f"num_{split}"), sources)
            sources |= {src for src, _ in pairs}
            src, tgt = (list(side) for side in zip(*pairs, strict=True))
            rows[split] = Rows({"src": src, "tgt": tgt})
        return RawData(rows)


_OF_TABLES = ("src_field", "tgt_field", "header")


def open_pairs(entry: SplitFiles, recipe: Recipe) -> FileRows:
    """The pairs of two line-parallel files, or of files with both sides."""
    files, (src, tgt) = entry.files, languages_of(recipe, entry.corpus)
    if files.file is not None:
        return open_rows(
            resolve_paths(files.file),
            {"src": files.src_field, "tgt": files.tgt_field},
            header=files.header,
            languages={side: tag for side, tag in (("src", src), ("tgt", tgt)) if tag},
        )
    if given := [name for name in _OF_TABLES if getattr(files, name) is not None]:
        raise UserError(
            f"{entry.key}.{given[0]} is of a table, which file names; src and tgt are files of "
            "lines without columns: leave it out"
        )
    return open_rows({"src": resolve_paths(files.src), "tgt": resolve_paths(files.tgt)})
