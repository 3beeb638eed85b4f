"""The tasks of bulk inference: texts of a shard in, one result for each of them out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from heedful import pipelines
from heedful.errors import UserError
from heedful.options import Options
from heedful.pipelines.generations import Generation
from heedful.progress import Advance

Model = TypeVar("Model", bound="pipelines.SavedModel")
Result = dict[str, Any]  # values for JSON, with None for NaN and infinities
DECODING = "decoding"
_DECODING_NAMES = {option.name for option in fields(Options) if option.metadata["panel"]}
_SEEDS = 2**63
_NOT_FINITE = "the model's output is not a finite number"


@dataclass
class BulkTask(Generic[Model]):
    """A task of a model on the rows of a shard, such as translation.

    Args:
        model: of the kind that the task needs.
        options: of the task, by name.

    Attributes:
        kind: the class of the model in `heedful.pipelines`.
        columns: the names of the texts of a row.
        main: the value of a result that a line of the format text holds; "": none.
        option_names: the options of the task; `DECODING` means all of `Options`.
    """

    model: Model
    options: Mapping[str, Any]

    kind: ClassVar[str] = "SavedModel"
    columns: ClassVar[tuple[str, ...]] = ("text",)
    main: ClassVar[str] = ""
    option_names: ClassVar[tuple[str, ...]] = ()

    def results(
        self, rows: Sequence[Sequence[str]], first: int, numbers: Sequence[int], progress: Advance
    ) -> list[Result]:
        """The result of each row.

        Args:
            rows: the texts of each row, one per column.
            first: the number of the shard's first row among all rows.
            numbers: the index of each row in the shard.
            progress: called with the number of rows of each batch.

        Returns:
            Values by name; only "error" for a row that the model cannot use.

        Raises:
            UserError: a row that the model cannot use; `check` finds out which.
        """
        raise NotImplementedError

    def check(self, texts: Sequence[str], line: int) -> None:
        """Raise UserError for a row that the model cannot use; `line` is its number."""

    def check_options(self) -> None:
        """Raise UserError for options that the model does not have."""
        self.check(["a"] * len(self.columns), 1)

    def arrow_types(self) -> dict[str, Any]:
        """The pyarrow type of each value of a result."""
        raise NotImplementedError

    @classmethod
    def known_options(cls) -> set[str]:
        """The names of all options that the task has."""
        decoding = _DECODING_NAMES if DECODING in cls.option_names else set()
        return {*cls.option_names, *decoding} - {DECODING}


class Generate(BulkTask["pipelines.Generator"]):
    """The best output for a text, and with num_return above 1 all of them."""

    kind = "Generator"
    main = "output"
    option_names = (DECODING, "scores", "truncate", "batch_tokens")

    def results(
        self, rows: Sequence[Sequence[str]], first: int, numbers: Sequence[int], progress: Advance
    ) -> list[Result]:
        """See `BulkTask.results`."""
        seed = self.options.get("seed", 0)
        # The same seeds as by `Options.seeds`, for any size of the shards.
        seeds = [(seed + ((first + number) << 32)) % _SEEDS for number in numbers]
        options = {**self._decoding(), "seed": seeds, "progress": progress}
        outputs = self.model.iterate_generations([[text for text, *_ in rows]], **options)
        return [self._result(generations) for generations in outputs]

    def _decoding(self) -> dict[str, Any]:
        """The options of `Options`."""
        options: dict[str, Any] = {"scores": False, **self.options}
        too_long = "truncate" if options.pop("truncate", False) else "error"
        return {**options, "too_long": too_long}

    def _result(self, generations: list[Generation]) -> Result:
        best = self._values(generations[0])
        if self.options.get("num_return", 1) == 1:
            return best
        return {**best, "outputs": [self._values(generation) for generation in generations]}

    def _values(self, generation: Generation) -> Result:
        values: Result = {"output": generation.text, "finished": generation.finished}
        values["failure"] = generation.failure
        if self.options.get("scores"):
            scores = generation.score, generation.log_prob
            values |= zip(("score", "log_prob"), map(_finite, scores), strict=True)
        return values

    def check(self, texts: Sequence[str], line: int) -> None:
        """See `BulkTask.check`."""
        decoding = {**self._decoding(), "first_number": line}
        rows = self.model.prompt_ids([texts[0]], self.model.options(**decoding))
        self.model.request(rows, **decoding)

    def arrow_types(self) -> dict[str, Any]:
        """See `BulkTask.arrow_types`."""
        import pyarrow as pa

        types = {"output": pa.string(), "finished": pa.bool_(), "failure": pa.string()}
        if self.options.get("scores"):
            types |= {"score": pa.float64(), "log_prob": pa.float64()}
        if self.options.get("num_return", 1) == 1:
            return types
        return {**types, "outputs": pa.list_(pa.struct(list(types.items())))}


class Translate(Generate):
    """The translation of a text; otherwise as `Generate`."""

    kind = "Translator"

    def _values(self, generation: Generation) -> Result:
        """With `reasons` for a review, of a model that keeps pieces of its sources or terms."""
        values = super()._values(generation)
        if self._has_reasons:
            values["reasons"] = list(generation.reasons)
        return values

    def arrow_types(self) -> dict[str, Any]:
        """See `BulkTask.arrow_types`."""
        import pyarrow as pa

        types = super().arrow_types()
        if self._has_reasons:
            types["reasons"] = pa.list_(pa.string())
        return types

    @property
    def _has_reasons(self) -> bool:
        return self.model.metadata.keep is not None or self.options.get("glossary") is not None


class Score(BulkTask["pipelines.LanguageModel"]):
    """The natural log-probability of a text, and figures derived from it."""

    kind = "LanguageModel"
    main = "log_prob"
    option_names = ("batch_tokens",)

    def results(
        self, rows: Sequence[Sequence[str]], first: int, numbers: Sequence[int], progress: Advance
    ) -> list[Result]:
        """See `BulkTask.results`."""
        texts = [text for text, *_ in rows]
        scores = self.model.score(texts, **self.options)
        progress(len(rows))
        return [
            {
                "log_prob": _finite(score.log_prob) if score.num_tokens else None,
                "num_tokens": score.num_tokens,
                "perplexity": _finite(score.perplexity),
                "bits_per_character": _finite(score.bits_per_character(text)),
            }
            for text, score in zip(texts, scores, strict=True)
        ]

    def check(self, texts: Sequence[str], line: int) -> None:
        """See `BulkTask.check`."""
        self.model.prompt_ids([texts[0]])

    def arrow_types(self) -> dict[str, Any]:
        """See `BulkTask.arrow_types`."""
        import pyarrow as pa

        names = "log_prob", "perplexity", "bits_per_character"
        return {"num_tokens": pa.int64(), **dict.fromkeys(names, pa.float64())}


class ScorePairs(BulkTask["pipelines.Translator"]):
    """The natural log-probability of a target given its source."""

    kind = "Translator"
    columns = ("src", "tgt")
    main = "log_prob"
    option_names = ("src_language", "tgt_language", "truncate", "batch_tokens")

    def results(
        self, rows: Sequence[Sequence[str]], first: int, numbers: Sequence[int], progress: Advance
    ) -> list[Result]:
        """See `BulkTask.results`."""
        sources, targets = map(list, zip(*rows, strict=True))
        options = {name: value for name, value in self.options.items() if name != "truncate"}
        scores = self.model.score(sources, targets, **options, too_long=self._too_long)
        progress(len(rows))
        return [
            {"log_prob": _finite(score.log_prob), "num_tokens": score.num_tokens}
            for score in scores
        ]

    @property
    def _too_long(self) -> Any:
        return "truncate" if self.options.get("truncate") else "error"

    def check(self, texts: Sequence[str], line: int) -> None:
        """See `BulkTask.check`."""
        names = ("src_language", "tgt_language")
        languages: Any = {name: self.options.get(name) for name in names}
        sides = [[text] for text in texts]
        self.model.pair_ids(*sides, too_long=self._too_long, **languages)

    def arrow_types(self) -> dict[str, Any]:
        """See `BulkTask.arrow_types`."""
        import pyarrow as pa

        return {"log_prob": pa.float64(), "num_tokens": pa.int64()}


class Embed(BulkTask["pipelines.SavedModel"]):
    """A vector for each text."""

    option_names = ("pooling", "prompt", "prompt_name", "truncate", "batch_tokens")

    def results(
        self, rows: Sequence[Sequence[str]], first: int, numbers: Sequence[int], progress: Advance
    ) -> list[Result]:
        """See `BulkTask.results`."""
        options = {name: value for name, value in self.options.items() if name != "truncate"}
        texts = [text for text, *_ in rows]
        vectors = self.model.vectors(texts, **options, too_long=self._too_long)
        progress(len(rows))
        return [
            {"vector": vector} if all(map(math.isfinite, vector)) else {"error": _NOT_FINITE}
            for vector in vectors.tolist()
        ]

    @property
    def _too_long(self) -> Any:
        return "truncate" if self.options.get("truncate") else "error"

    def check(self, texts: Sequence[str], line: int) -> None:
        """See `BulkTask.check`."""
        prompt = {key: self.options.get(key) for key in ("prompt", "prompt_name")}
        self.model.encode(self.model.with_prompt([texts[0]], **prompt), too_long=self._too_long)

    def arrow_types(self) -> dict[str, Any]:
        """See `BulkTask.arrow_types`."""
        import pyarrow as pa

        return {"vector": pa.list_(pa.float32())}


class Classify(BulkTask["pipelines.Classifier"]):
    """The most probable class of a text; texts that are too long are cut.

    Of a multi-label classifier `label` has all classes of probability 0.5 or more, separated by
    commas; of a regression `label` and `scores` have the values.
    """

    kind = "Classifier"
    main = "label"
    option_names = ("batch_tokens",)

    def results(
        self, rows: Sequence[Sequence[str]], first: int, numbers: Sequence[int], progress: Advance
    ) -> list[Result]:
        """See `BulkTask.results`."""
        texts, *others = map(list, zip(*rows, strict=True))
        options = {"pairs": others[0] if others else None, "progress": progress, **self.options}
        return [
            {"label": result.text, "scores": result.scores}
            if result.is_finite
            else {"error": _NOT_FINITE}
            for result in self.model.classify(texts, **options)
        ]

    def check(self, texts: Sequence[str], line: int) -> None:
        """See `BulkTask.check`."""
        first, *others = texts
        self.model.encode_pairs([first], others or None, "truncate")

    def arrow_types(self) -> dict[str, Any]:
        """See `BulkTask.arrow_types`."""
        import pyarrow as pa

        scores = [(label, pa.float64()) for label in self.model.labels]
        return {"label": pa.string(), "scores": pa.struct(scores)}


class ClassifyPairs(Classify):
    """The most probable class of a pair of texts; otherwise as `Classify`."""

    columns = ("text", "pair")


class Fill(BulkTask["pipelines.MaskedLanguageModel"]):
    """The most probable tokens for each mask of a text."""

    kind = "MaskedLanguageModel"
    option_names = ("candidates", "truncate", "batch_tokens")

    def results(
        self, rows: Sequence[Sequence[str]], first: int, numbers: Sequence[int], progress: Advance
    ) -> list[Result]:
        """See `BulkTask.results`."""
        texts = [text for text, *_ in rows]
        filled = self.model.fill(
            texts,
            **self._candidates,
            too_long=self._too_long,
            batch_tokens=self.options.get("batch_tokens"),
            progress=progress,
        )
        return [
            {"masks": [[asdict(filling) for filling in mask] for mask in masks]}
            if all(math.isfinite(filling.probability) for mask in masks for filling in mask)
            else {"error": _NOT_FINITE}
            for masks in filled
        ]

    @property
    def _too_long(self) -> Any:
        return "truncate" if self.options.get("truncate") else "error"

    @property
    def _candidates(self) -> dict[str, Any]:
        return {"top_k": self.options.get("candidates", 5)}

    def check(self, texts: Sequence[str], line: int) -> None:
        """See `BulkTask.check`."""
        self.model.masked_rows(texts[0], self._too_long)

    def check_options(self) -> None:
        """Raise UserError for a model without a mask, or for candidates below 1."""
        self.model.fill(self.model.mask_token, **self._candidates)

    def arrow_types(self) -> dict[str, Any]:
        """See `BulkTask.arrow_types`."""
        import pyarrow as pa

        fields = [("token", pa.string()), ("probability", pa.float64())]
        fields += [("text", pa.string()), ("id", pa.int64())]
        return {"masks": pa.list_(pa.list_(pa.struct(fields)))}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


TASKS: Mapping[str, type[BulkTask[Any]]] = {
    "translate": Translate,
    "generate": Generate,
    "score": Score,
    "embed": Embed,
    "classify": Classify,
    "fill": Fill,
}
PAIR_TASKS: Mapping[str, type[BulkTask[Any]]] = {"score": ScorePairs, "classify": ClassifyPairs}


def task_class(name: str, *, pairs: bool = False) -> type[BulkTask[Any]]:
    """The task with a name, for texts or for pairs of texts.

    Raises:
        UserError: no such task; a task that has no pairs.
    """
    if name not in TASKS:
        raise UserError(f"task must be {', '.join(TASKS)}, not {name}")
    if pairs and name not in PAIR_TASKS:
        raise UserError(f"pairs are for {' and '.join(PAIR_TASKS)}, not for {name}")
    return (PAIR_TASKS if pairs else TASKS)[name]


def open_task(
    task: type[BulkTask[Any]], model: "pipelines.SavedModel", options: Mapping[str, Any]
) -> BulkTask[Any]:
    """A task for a model.

    Raises:
        UserError: a model of another kind; options that it does not have.
    """
    if task is Score and isinstance(model, pipelines.Translator):
        raise UserError("a translator scores pairs: give pairs=True, and files of two texts a row")
    name = task.__name__.lower().removesuffix("pairs")
    opened = task(pipelines.expect(model, getattr(pipelines, task.kind), name), options)
    opened.check_options()
    return opened
