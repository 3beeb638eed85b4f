"""Saved language models: continuations and log-probabilities of texts."""

import collections.abc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from heedful.backends.base import GenerationBackend, GenerationRequest
from heedful.errors import UserError
from heedful.options import Options
from heedful.pipelines.base import Texts
from heedful.pipelines.generations import Generation, texts_of
from heedful.pipelines.inputs import EmptyTextError
from heedful.pipelines.text_generation import Generator

if TYPE_CHECKING:
    from heedful.data.chat_template import Messages
    from heedful.data.chats import ChatEncoder
    from heedful.pipelines.scoring import TextScore

_NEW_TOKENS = 64


class LanguageModel(Generator):
    """A decoder-only net, `net(ids, lengths) -> logits`, with its tokenizer."""

    kind = "language model"
    chat_encoder: "ChatEncoder | None" = None  # see `heedful.pipelines.chat.encoder_of`

    @overload
    def chat(
        self, messages: "Messages", *, return_details: Literal[False] = False, **options: Any
    ) -> str: ...

    @overload
    def chat(
        self, messages: "Messages", *, return_details: Literal[True], **options: Any
    ) -> list[Generation]: ...

    @overload
    def chat(
        self,
        messages: "Sequence[Messages]",
        *,
        return_details: Literal[False] = False,
        **options: Any,
    ) -> list[str]: ...

    @overload
    def chat(
        self, messages: "Sequence[Messages]", *, return_details: Literal[True], **options: Any
    ) -> list[list[Generation]]: ...

    def chat(self, messages: Any, *, return_details: bool = False, **options: Any) -> Any:
        """The answer to a conversation, or one for each of a list of conversations.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists. They are
                written as the tokenizer's chat template does, and an answer ends where it ends one.
            return_details: as in `generate`, and so is `num_return`.
            options: fields of `heedful.options.Options`. The default of max_new_tokens is 512, or
                what the model's context leaves if that is less.

        Raises:
            UserError: a model without a chat template; messages that the template refuses; an
                option out of range; a conversation as long as the model's context.
        """
        from heedful.pipelines.chat import as_chats, chat_rows

        chats, is_single = as_chats(messages)
        if not chats:
            return []
        rows = chat_rows(self, chats, options)
        if not return_details:
            options = {"scores": False} | options
        results = self.generate(rows, return_details=True, **options)
        values = (
            results if return_details else texts_of(results, self.options(**options).num_return)
        )
        return values[0] if is_single else values

    def stream_chat(
        self, messages: "Messages", **options: Any
    ) -> collections.abc.Generator[str, None, str]:
        """The text of `chat` for one conversation in pieces, as in `stream`."""
        from heedful.pipelines.chat import as_chats, chat_rows

        chats, is_single = as_chats(messages)
        if not is_single:
            raise UserError("stream_chat answers one conversation; give a list of messages")
        [row] = chat_rows(self, chats, options)
        return self.stream(row, **options)

    def backend_for_row(self, row: list[int], request: GenerationRequest) -> GenerationBackend:
        """The backend that runs the request of one prompt: the model's, or the net itself."""
        return self._backend_for([row], request)

    def prompt_ids(self, prompts: Texts, options: Options | None = None) -> list[list[int]]:
        """Ids of each prompt, after the model's BOS if it has one.

        Args:
            options: without them texts of any length are accepted, which `score` divides. With
                `too_long="truncate"` a prompt loses its beginning, since its end is continued.

        Raises:
            UserError: a prompt that is longer than the net, unless `too_long` allows it.
        """
        if options is not None and options.tgt_language is not None:
            raise UserError("tgt_language=CODE is for translators; leave it out")
        first = 1 if options is None else options.first_number
        # Without BOS, an empty prompt begins with EOS, which separated the training texts.
        rows = self.rows_of(
            prompts, lambda tokenizer, ids: [*tokenizer.prefix_ids, *ids] or [self.end_ids()[0]]
        )
        if [] in rows:
            number = rows.index([]) + first
            raise EmptyTextError(f"prompt {number} is empty: give it at least one token")
        if options is not None:
            self.check_lengths(rows, "prompt", options.too_long, first, cut_start=True)
        return rows

    def length_limit(self, row: list[int], options: Options) -> int:
        """`max_new_tokens`, or 64; outputs may exceed the net's length (`DecodingState`)."""
        limit = options.max_new_tokens or _NEW_TOKENS
        if "min_new_tokens" in options.explicit:
            return limit
        return max(limit, options.min_new_tokens or 0)

    def score(
        self, texts: Texts, *, stride: int | None = None, batch_tokens: int | None = None
    ) -> "list[TextScore]":
        """Log-probability of each text: the sum over its tokens given the tokens before them.

        The first token counts only where the model has BOS before it.

        Args:
            stride: tokens from the start of one window to the next, for texts longer than the
                net's `max_length`; None: half of it.
            batch_tokens: padded tokens of a batch.

        Raises:
            UserError: a stride outside 1 to `max_length`.

        Example: `model.score(["A dog runs."])[0].log_prob`
        """
        from heedful.pipelines.scoring import score_texts

        return score_texts(self, texts, stride, batch_tokens)

    def window_sums(self, texts: Any, **options: Any) -> Any:
        """Loss and correct tokens summed over texts; see `heedful.pipelines.scoring`."""
        from heedful.pipelines.scoring import window_sums

        return window_sums(self, texts, **options)

    def batches(
        self, rows: Sequence[Sequence[int]], options: Options, workers: int = 1
    ) -> Iterator[list[int]]:
        """Batches of the prompts that fit the net with their new tokens, then of the longer ones.

        The longer prompts of a batch have equal lengths.
        """
        new = self.length_limit([], options)
        fitting = [row if len(row) + new <= self.config.max_length else [] for row in rows]
        # The length that counts is the one after the last new token.
        sizes = [range(len(row) + new) if row else () for row in fitting]
        yield from super().batches(sizes, options, workers)
        by_size: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            if row and not fitting[number]:
                by_size.setdefault(len(row), []).append(number)
        count = workers * max(1, options.row_tokens // self.config.max_length)
        for numbers in by_size.values():
            for first in range(0, len(numbers), count):
                yield numbers[first : first + count]
