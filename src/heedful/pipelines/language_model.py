"""Language models opened for use: going on with a text, and how likely a text is."""

from collections.abc import Iterator, Sequence
from typing import Any

from heedful.errors import UserError
from heedful.options import Options
from heedful.pipelines.base import Texts
from heedful.pipelines.text_generation import Generator, TextScore

_NEW_TOKENS = 64


class LanguageModel(Generator):
    """A net of one stack, `net(ids, lengths) -> logits`, that goes on with a text."""

    kind = "language model"

    def prompt_ids(self, prompts: Texts, options: Options | None = None) -> list[list[int]]:
        """Ids of each prompt, behind the mark that begins a text where the model has one."""
        # A model without a mark of its own was trained on texts apart by their end.
        rows = self.rows_of(
            prompts, lambda tokenizer, ids: [*tokenizer.prefix_ids, *ids] or [self.end_ids()[0]]
        )
        if [] in rows:
            raise UserError(f"prompt {rows.index([]) + 1} is empty: give it at least one token")
        return rows

    def length_limit(self, row: list[int], options: Options) -> int:
        """As asked for; a text may outgrow the net (`DecodingState`)."""
        return options.max_new_tokens or _NEW_TOKENS

    def score(
        self, texts: Texts, *, stride: int | None = None, batch_tokens: int | None = None
    ) -> list[TextScore]:
        """Log-probability of each text: the sum over its tokens, each given those before it.

        The first token counts only where the model has a beginning-of-text token before it.

        Args:
            stride: tokens from the start of one window to the next, for texts longer than the
                net's `max_length`; default: half of it.
            batch_tokens: padded tokens of a batch.

        Raises:
            UserError: a stride that is not from 1 to the net's length.
        """
        from heedful.pipelines.scoring import score_texts

        return score_texts(self, texts, stride, batch_tokens)

    def window_sums(self, texts: Any, **sizes: int) -> Any:
        """Loss and correct tokens over all of some texts; see `heedful.pipelines.scoring`."""
        from heedful.pipelines.scoring import window_sums

        return window_sums(self, texts, **sizes)

    def batches(
        self, rows: Sequence[Sequence[int]], options: Options, workers: int = 1
    ) -> Iterator[list[int]]:
        """Prompts that fit with what is written behind them; others with those equally long."""
        new = options.max_new_tokens or _NEW_TOKENS
        fitting = [row if len(row) + new <= self.config.max_length else [] for row in rows]
        # By the memory that they will need.
        sizes = [range(len(row) + new) if row else () for row in fitting]
        yield from super().batches(sizes, options, workers)
        by_size: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            if not fitting[number]:
                by_size.setdefault(len(row), []).append(number)
        count = workers * max(1, options.row_tokens // self.config.max_length)
        for numbers in by_size.values():
            yield from (numbers[place : place + count] for place in range(0, len(numbers), count))
