"""Saved language models: continuations and log-probabilities of texts."""

from collections.abc import Iterator, Sequence
from typing import Any

from heedful.errors import UserError
from heedful.options import Options
from heedful.pipelines.base import Texts
from heedful.pipelines.text_generation import Generator, TextScore

_NEW_TOKENS = 64


class LanguageModel(Generator):
    """A decoder-only net, `net(ids, lengths) -> logits`, with its tokenizer."""

    kind = "language model"

    def prompt_ids(self, prompts: Texts, options: Options | None = None) -> list[list[int]]:
        """Ids of each prompt, after the model's BOS if it has one."""
        # Without BOS, an empty prompt begins with EOS, which separated the training texts.
        rows = self.rows_of(
            prompts, lambda tokenizer, ids: [*tokenizer.prefix_ids, *ids] or [self.end_ids()[0]]
        )
        if [] in rows:
            raise UserError(f"prompt {rows.index([]) + 1} is empty: give it at least one token")
        return rows

    def length_limit(self, row: list[int], options: Options) -> int:
        """`max_new_tokens`, or 64; texts may exceed the net's length (`DecodingState`)."""
        return options.max_new_tokens or _NEW_TOKENS

    def score(
        self, texts: Texts, *, stride: int | None = None, batch_tokens: int | None = None
    ) -> list[TextScore]:
        """Log-probability of each text: the sum over its tokens given the tokens before them.

        The first token counts only where the model has BOS before it.

        Args:
            stride: tokens from the start of one window to the next, for texts longer than the
                net's `max_length`; None: half of it.
            batch_tokens: padded tokens of a batch.

        Raises:
            UserError: a stride outside 1 to `max_length`.
        """
        from heedful.pipelines.scoring import score_texts

        return score_texts(self, texts, stride, batch_tokens)

    def window_sums(self, texts: Any, **sizes: int) -> Any:
        """Loss and correct tokens summed over texts; see `heedful.pipelines.scoring`."""
        from heedful.pipelines.scoring import window_sums

        return window_sums(self, texts, **sizes)

    def batches(
        self, rows: Sequence[Sequence[int]], options: Options, workers: int = 1
    ) -> Iterator[list[int]]:
        """Batches of the prompts that fit the net with their new tokens, then of the longer ones.

        The longer prompts of a batch have equal lengths.
        """
        new = options.max_new_tokens or _NEW_TOKENS
        fitting = [row if len(row) + new <= self.config.max_length else [] for row in rows]
        # The length that counts is the one after the last new token.
        sizes = [range(len(row) + new) if row else () for row in fitting]
        yield from super().batches(sizes, options, workers)
        by_size: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            if not fitting[number]:
                by_size.setdefault(len(row), []).append(number)
        count = workers * max(1, options.row_tokens // self.config.max_length)
        for numbers in by_size.values():
            for first in range(0, len(numbers), count):
                yield numbers[first : first + count]
