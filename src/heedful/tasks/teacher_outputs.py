"""Pairs made of the outputs of translators, in shards that outlast an interruption."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from heedful.config import Distillation
from heedful.data.columns import Columns, DataReport, pack_ids, write_columns
from heedful.data.prepared import prepare_once
from heedful.data.tokenizer import Tokenizer
from heedful.evaluation.metrics import sentence_chrf
from heedful.pipelines import Translator
from heedful.pipelines.base import Texts
from heedful.pipelines.text_generation import Generation
from heedful.progress import PrintLine, track
from heedful.tasks.run_data import Data

PAIRS = "pairs"  # the folder of columns in a shard
SHARD_ROWS = 4_096  # pairs of the training data that one shard is made of
Pair = tuple[list[int], list[int]]


class Pass(NamedTuple):
    """One pass over the training data that makes pairs of ids.

    Attributes:
        kind: "teacher": the sources with a model's output for each, as its ids; "forward": the
            same by a model with tokenizers of its own, as text; "targets": the data's own pairs;
            "backward": a model's outputs for the targets, as text, each with its target.
        model: None for "targets".
    """

    kind: Literal["teacher", "forward", "targets", "backward"]
    model: Translator | None = None


@dataclass
class ShardWriter:
    """Writes pairs in shards, each a folder of prepared data.

    A shard is there whole or not at all, and is not made again where it is there.

    Args:
        key: all that the pairs depend on, as JSON.
        about: of the result, for `heedful cache ls`.
        longest: tokens of a side at most; other pairs are left out.
        cache: the folder of prepared data.
    """

    data: Data
    settings: Distillation
    longest: int
    key: Mapping[str, Any]
    about: Mapping[str, Any]
    cache: Path
    print_line: PrintLine
    _num_made: int = field(default=0, init=False)

    def write(self, passes: Sequence[Pass]) -> list[Path]:
        """The shards of all passes, in their order; of a pass in the order of the data."""
        num_rows = len(self.data.splits["train"])
        paths = []
        with track("translating", num_rows * len(passes)) as advance:
            for number in range(len(passes)):
                is_said = False
                for begin in range(0, num_rows, SHARD_ROWS):
                    rows = range(begin, min(begin + SHARD_ROWS, num_rows))
                    before = self._num_made
                    paths.append(self._shard(passes[number], number, rows, advance, is_said))
                    is_said |= self._num_made > before
                    if self._num_made == before:
                        advance(len(rows))
        return paths

    def _shard(
        self,
        chosen: Pass,
        number: int,
        rows: range,
        advance: Callable[[int], None],
        is_said: bool,
    ) -> Path:
        def fill(directory: Path) -> None:
            if not is_said and chosen.model is not None:
                self._say_translates(chosen, rows.start)
            pairs = self._pairs(chosen, rows, advance)
            kept = [pair for pair in pairs if all(pair) and max(map(len, pair)) <= self.longest]
            columns = {
                side: pack_ids((pair[index] for pair in kept), tokenizer.vocab_size)
                for index, (side, tokenizer) in enumerate(
                    zip(("src", "tgt"), self.data.tokenizers, strict=True)
                )
            }
            report = DataReport(len(rows), len(kept), noun="pairs")
            write_columns(directory / PAIRS, Columns(columns, report))
            self._num_made += 1

        key = {**self.key, "pass": number, "first_row": rows.start, "num_rows": len(rows)}
        about = {**self.about, "task": f"{self.about['task']}, unfinished"}
        return prepare_once(self.cache, key, fill, about)

    def _say_translates(self, chosen: Pass, num_done: int) -> None:
        name = "backward" if chosen.kind == "backward" else "teacher"
        num_rows = len(self.data.splits["train"])
        done = f", {num_done:,} of them are done" if num_done else ""
        self.print_line(
            f"{name:10} translates {num_rows:,} texts, beam size {self.settings.beam_size}{done}"
        )

    def _pairs(self, chosen: Pass, rows: range, advance: Callable[[int], None]) -> list[Pair]:
        """Ids of source and target of some rows; a side is empty where no output has an end."""
        stores = [self.data.ids("train", side) for side in ("src", "tgt")]
        sources, targets = ([store[i].tolist() for i in rows] for store in stores)
        if chosen.model is None:
            advance(len(rows))
            return list(zip(sources, targets, strict=True))
        of_source, of_target = self.data.tokenizers
        source_texts = of_source.decode_batch(sources)
        target_texts = of_target.decode_batch(targets)
        if chosen.kind == "backward":
            back = self._outputs(chosen.model, target_texts, source_texts, advance)
            return list(zip(_ids(back, of_source), targets, strict=True))
        if chosen.kind == "forward":
            outputs = self._outputs(chosen.model, source_texts, target_texts, advance)
            return list(zip(sources, _ids(outputs, of_target), strict=True))
        outputs = self._outputs(chosen.model, sources, target_texts, advance)
        ids = [list(output.ids) if output.finished else [] for output in outputs]
        return list(zip(sources, ids, strict=True))

    def _outputs(
        self,
        model: Translator,
        texts: Texts,
        wanted: list[str],
        advance: Callable[[int], None],
    ) -> list[Generation]:
        """One output per text: the best, or with `select_by_chrf` the most like the reference."""
        size, by_chrf = self.settings.beam_size, self.settings.select_by_chrf
        found = model.generations(
            texts,
            beam_size=size,
            num_return=size if by_chrf else 1,
            stop_rule="optimal",
            too_long="leave_out",
            progress=advance,
        )
        if not by_chrf:
            return [best for best, *_ in found]
        return [_nearest(outputs, text) for outputs, text in zip(found, wanted, strict=True)]


def _ids(outputs: list[Generation], tokenizer: Tokenizer) -> list[list[int]]:
    """Outputs in ids of a tokenizer; empty where an output has no end, or no token."""
    encoded = tokenizer.encode_batch([output.text for output in outputs])
    return [
        tokenizer.encode_target(ids) if output.finished and ids else []
        for output, ids in zip(outputs, encoded, strict=True)
    ]


def _nearest(outputs: list[Generation], wanted: str) -> Generation:
    """The output that is most like `wanted` by chrF, of those that came to an end where any did."""
    ended = [output for output in outputs if output.finished] or outputs[:1]
    scores = sentence_chrf([output.text for output in ended], [wanted] * len(ended))
    return ended[scores.index(max(scores))]
