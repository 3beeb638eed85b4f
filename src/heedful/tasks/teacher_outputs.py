"""Training pairs from the outputs of translators, stored in shards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from heedful.config import Distillation
from heedful.data.columns import Columns, pack_ids, write_columns
from heedful.data.prepared import prepare_once
from heedful.data.reports import DataReport
from heedful.data.tokenizer import Tokenizer
from heedful.pipelines import Translator
from heedful.pipelines.base import Texts
from heedful.pipelines.generations import Generation
from heedful.progress import PrintLine, track
from heedful.tasks.run_data import RunData

PAIRS = "pairs"  # the folder of columns in a shard
SHARD_ROWS = 4_096  # training pairs per shard
Pair = tuple[list[int], list[int]]


class Pass(NamedTuple):
    """One pass over the training data, which yields pairs of ids.

    Attributes:
        kind: "teacher": the sources with outputs of a model with the tokenizers of the data;
            "targets": the pairs of the data; "backward": back-translations with their targets.
        model: None for "targets".
    """

    kind: Literal["teacher", "targets", "backward"]
    model: Translator | None = None


@dataclass
class ShardWriter:
    """Writes pairs in shards, each a folder of prepared data.

    Shards are written atomically; existing ones are reused.

    Args:
        longest: maximum tokens of a side; longer pairs are dropped.
        key: all that the pairs depend on, as JSON.
        about: a description of the result for `heedful cache ls`.
        cache: the folder of prepared data.
    """

    data: RunData
    settings: Distillation
    longest: int
    key: Mapping[str, Any]
    about: Mapping[str, Any]
    cache: Path
    print_line: PrintLine
    _num_written: int = field(default=0, init=False)

    def write(self, passes: Sequence[Pass]) -> list[Path]:
        """The shards of all passes, in the order of the passes and of the data."""
        num_rows = len(self.data.splits["train"])
        paths = []
        with track("translating", num_rows * len(passes)) as advance:
            for number in range(len(passes)):
                is_printed = False
                for start in range(0, num_rows, SHARD_ROWS):
                    rows = range(start, min(start + SHARD_ROWS, num_rows))
                    before = self._num_written
                    paths.append(self._shard(passes[number], number, rows, advance, is_printed))
                    is_printed |= self._num_written > before
                    if self._num_written == before:
                        advance(len(rows))
        return paths

    def _shard(
        self,
        translation: Pass,
        number: int,
        rows: range,
        advance: Callable[[int], None],
        is_printed: bool,
    ) -> Path:
        """The shard of some rows in pass `number`, which is written unless it exists."""

        def fill(directory: Path) -> None:
            """Write the pairs of the rows, by the teacher."""
            if not is_printed and translation.model is not None:
                self._print_start(translation, rows.start)
            candidates = self._pairs(translation, rows, advance)
            pairs = [
                pair for pair in candidates if all(pair) and max(map(len, pair)) <= self.longest
            ]
            columns = {
                side: pack_ids((pair[index] for pair in pairs), tokenizer.vocab_size)
                for index, (side, tokenizer) in enumerate(
                    zip(("src", "tgt"), self.data.tokenizers, strict=True)
                )
            }
            report = DataReport(len(rows), len(pairs), noun="pairs")
            write_columns(directory / PAIRS, Columns(columns, report))
            self._num_written += 1

        key = {**self.key, "pass": number, "first_row": rows.start, "num_rows": len(rows)}
        about = {**self.about, "task": f"{self.about['task']}, unfinished"}
        return prepare_once(self.cache, key, fill, about)

    def _print_start(self, translation: Pass, num_done: int) -> None:
        name = "backward" if translation.kind == "backward" else "teacher"
        num_rows = len(self.data.splits["train"])
        done = f", {num_done:,} of them are done" if num_done else ""
        self.print_line(
            f"{name:10} translates {num_rows:,} texts, beam size {self.settings.beam_size}{done}"
        )

    def _pairs(self, translation: Pass, rows: range, advance: Callable[[int], None]) -> list[Pair]:
        """Ids of source and target of some rows; a side is empty for an output without EOS."""
        stores = [self.data.ids("train", side) for side in ("src", "tgt")]
        sources, targets = ([store[i].tolist() for i in rows] for store in stores)
        if translation.model is None:
            advance(len(rows))
            return list(zip(sources, targets, strict=True))
        src_tokenizer, tgt_tokenizer = self.data.tokenizers
        if translation.kind == "backward":
            texts = tgt_tokenizer.decode_batch(targets)
            back = self._outputs(translation.model, texts, advance)
            return list(zip(_ids(back, src_tokenizer), targets, strict=True))
        outputs = self._outputs(translation.model, sources, advance)
        ids = [list(output.ids) if output.finished else [] for output in outputs]
        return list(zip(sources, ids, strict=True))

    def _outputs(
        self, model: Translator, texts: Texts, advance: Callable[[int], None]
    ) -> list[Generation]:
        """The most probable output for each text."""
        beams = model.generate(
            texts,
            beam_size=self.settings.beam_size,
            stop_rule="optimal",
            too_long="leave_out",
            progress=advance,
            return_details=True,
        )
        return [best for best, *_ in beams]


def _ids(outputs: list[Generation], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of outputs in a tokenizer; empty for an output without EOS or without tokens."""
    encoded = tokenizer.encode_batch([output.text for output in outputs])
    return [
        tokenizer.encode_target(ids) if output.finished and ids else []
        for output, ids in zip(outputs, encoded, strict=True)
    ]
