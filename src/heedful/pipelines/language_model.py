"""Saved language models: continuations and log-probabilities of texts, and chats."""

import collections.abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from heedful.backends.base import GenerationBackend, GenerationRequest
from heedful.errors import UserError
from heedful.options import Options
from heedful.pipelines.base import Texts
from heedful.pipelines.generations import Generation, best_of
from heedful.pipelines.inputs import EmptyTextError, LengthError
from heedful.pipelines.keywords import GenerationKeywords
from heedful.pipelines.text_generation import Generator

if TYPE_CHECKING:
    from heedful.data.chat_template import Messages
    from heedful.data.chats import ChatEncoder
    from heedful.pipelines.scoring import TextScore

_NEW_TOKENS = 64
MAX_NEW_TOKENS = 512  # of an answer; fewer if the context is shorter


class LanguageModel(Generator):
    """A decoder-only net, `net(ids, lengths) -> logits`, with its tokenizer.

    >>> import heedful
    >>> model = heedful.load_language_model("runs/novel")
    >>> "".join(model.stream("A dog")) == model.generate("A dog")
    True
    """

    kind = "language model"
    _chat_encoder: "ChatEncoder | None" = None

    @overload
    def chat(
        self,
        messages: "Messages",
        *,
        return_details: Literal[False] = False,
        **options: Unpack[GenerationKeywords],
    ) -> str: ...

    @overload
    def chat(
        self,
        messages: "Messages",
        *,
        return_details: Literal[True],
        **options: Unpack[GenerationKeywords],
    ) -> list[Generation]: ...

    @overload
    def chat(
        self,
        messages: "Sequence[Messages]",
        *,
        return_details: Literal[False] = False,
        **options: Unpack[GenerationKeywords],
    ) -> list[str]: ...

    @overload
    def chat(
        self,
        messages: "Sequence[Messages]",
        *,
        return_details: Literal[True],
        **options: Unpack[GenerationKeywords],
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
        chats, is_single = as_chats(messages)
        if not chats:
            return []
        if not return_details:
            options = {"scores": False} | options
        self.options(**{"beam_size": 1} | options)  # refuses several greedy answers
        rows, resolved = self.chat_rows(chats, self.options(**options))
        results: list[Any] = self.generations(rows, self.completed(resolved))
        if not return_details:
            results = best_of(results, resolved.num_return, "text")
        return results[0] if is_single else results

    def stream_chat(
        self, messages: "Messages", **options: Unpack[GenerationKeywords]
    ) -> collections.abc.Generator[str, None, str]:
        """The text of `chat` for one conversation in pieces, as in `stream`."""
        chats, is_single = as_chats(messages)
        if not is_single:
            raise UserError("stream_chat answers one conversation; give a list of messages")
        [row], resolved = self.chat_rows(chats, self.options(**{"beam_size": 1} | options))
        return self.stream_with(row, resolved)

    @property
    def chat_encoder(self) -> "ChatEncoder":
        """The encoder of chats, kept until the tokenizer changes."""
        from heedful.data.chats import ChatEncoder

        encoder = self._chat_encoder
        if encoder is None or encoder.tokenizer is not self.tokenizer:
            encoder = self._chat_encoder = ChatEncoder(self.tokenizer)
        return encoder

    def chat_rows(
        self, chats: "Sequence[Messages]", options: Options
    ) -> tuple[list[list[int]], Options]:
        """The ids of conversations to answer, and the options with the ends and limit of an answer.

        Raises:
            UserError: no chat template, or one that refuses the messages; a conversation that
                leaves no tokens of the context for an answer.
        """
        encoder = self.chat_encoder
        rows = [encoder.encode_prompt(chat) for chat in chats]
        longest = max(range(len(rows)), key=lambda index: len(rows[index]))
        size, context = len(rows[longest]), self.config.max_length
        if size >= context:
            noun = "the chat" if len(rows) == 1 else f"chat {longest + 1}"
            problem = (
                f"{noun} has {size} tokens, but the model's context is {context}; leave out its "
                "first messages, or shorten them"
            )
            raise LengthError(problem, size, context, hint="")
        changes: dict[str, Any] = {"stop_ids": [*options.stop_ids, encoder.end_id]}
        if encoder.end_id not in self.tokenizer.special_ids:  # then its name would be in the text
            changes["stop"] = [*(options.stop or ()), self.tokenizer.piece(encoder.end_id)]
        if "max_new_tokens" not in options.explicit:
            limit = min(options.max_new_tokens or MAX_NEW_TOKENS, context - size)
            changes["max_new_tokens"] = limit
            if "min_new_tokens" not in options.explicit:
                changes["min_new_tokens"] = min(options.min_new_tokens or 0, limit)
        return rows, replace(options, **changes)

    def backend_for_row(self, row: list[int], request: GenerationRequest) -> GenerationBackend:
        """The backend that runs the request of one prompt: the model's, or the net itself."""
        return self.backend_for([row], request)

    def prompt_ids(self, prompts: Texts, options: Options | None = None) -> list[list[int]]:
        """Ids of each prompt, after the model's BOS if it has one.

        Args:
            options: without them texts of any length are accepted, which `score` divides. With
                `too_long="truncate"` a prompt loses its beginning after BOS: its end is continued.

        Raises:
            UserError: a prompt that is longer than the net, unless `too_long` allows it.
        """
        for name in ("src_language", "tgt_language"):
            if getattr(options, name, None) is not None:
                raise UserError(f"{name}=CODE is for translators; leave it out")
        if options is not None and options.glossary is not None:
            raise UserError("glossary=FILE is for translators; leave it out")
        # Without BOS, an empty prompt begins with EOS, which separated the training texts.
        rows = self.rows_of(
            prompts, lambda tokenizer, ids: [*tokenizer.prefix_ids, *ids] or [self.end_ids()[0]]
        )
        if [] in rows:
            index = rows.index([])
            number = index + 1 if options is None else options.number(index)
            raise EmptyTextError(f"prompt {number} is empty: give it at least one token")
        if options is not None:
            self.check_lengths(
                rows, "prompt", options.too_long, map(options.number, count()), cut_start=True
            )
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


def as_chats(messages: Any) -> tuple[list[list[dict[str, Any]]], bool]:
    """Conversations to answer, and True where a single one was given.

    Raises:
        UserError: anything but lists of messages; an empty message.
    """
    from heedful.data.chats import check_messages, is_empty, written_message

    is_single = not isinstance(messages, list | tuple) or any(
        isinstance(message, Mapping) for message in messages
    )
    chats = [messages] if is_single else list(messages)
    written: list[list[dict[str, Any]]] = []
    for number, chat in enumerate(chats, 1):
        where = "messages" if is_single else f"chat {number}"
        check_messages(chat, where)
        empty = next((i for i, m in enumerate(chat, 1) if is_empty(m)), None)
        if empty is not None:
            raise EmptyTextError(
                f"{where}, message {empty}: it is empty; write a text, or leave it out"
            )
        written.append([written_message(m, f"{where}, message {i}") for i, m in enumerate(chat, 1)])
    return written, is_single


@dataclass
class Conversation:
    """A conversation with a model, whose oldest messages are left out when its context is full.

    Args:
        system: the system message; None: none.
        options: those of `model.chat`.

    Attributes:
        messages: the system message, questions and answers.
        num_left_out: messages that were left out because they no longer fit.
        num_asked: messages so far, those that were dropped or left out too.
    """

    model: LanguageModel
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list, init=False)
    num_left_out: int = field(default=0, init=False)
    num_asked: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raises UserError for a model without a chat template, or that refuses the rest."""
        self.reset()
        self.model.chat_encoder.encode_prompt([*self.messages, {"role": "user", "content": "a"}])
        self.model.options(**{"beam_size": 1, **self.options})

    def reset(self) -> None:
        """Begin again, with the system message alone."""
        self.num_left_out = self.num_asked = 0
        self.messages = []
        if self.system is not None:
            self.messages = [{"role": "system", "content": self.system}]

    def ask(self, text: str) -> collections.abc.Generator[str, None, str]:
        """The answer to a message in pieces, see `LanguageModel.stream_chat`.

        The pieces that were read are added to the conversation; if they are blank, the message is
        removed from it. With a seed, each answer has different random numbers.

        Raises:
            UserError: at the call: a message that is empty, or too long for the context.
        """
        if not text.strip():
            raise UserError("the message is empty; write a text")
        options = dict(self.options)
        if isinstance(seed := options.get("seed"), int):
            options["seed"] = [seed + (self.num_asked << 32)]
        messages = [*self.messages, {"role": "user", "content": text}]
        num_left_out = self._fit(messages)
        pieces = self.model.stream_chat(messages, **options)
        self.num_asked += 1
        self.num_left_out += num_left_out
        return self._read(pieces, messages)

    def _read(
        self, pieces: collections.abc.Generator[str, None, str], messages: list[dict[str, Any]]
    ) -> collections.abc.Generator[str, None, str]:
        """The pieces of an answer; at the end it is appended to `messages`."""
        answer = ""
        try:
            for piece in pieces:
                answer += piece
                yield piece
            return answer
        finally:
            if answer.strip():
                self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _fit(self, messages: list[dict[str, Any]]) -> int:
        """Remove the oldest questions and answers until there is room for a new answer.

        Returns the number of removed messages. The last message stays: `stream_chat` refuses it if
        it is too long for any answer.
        """
        context, encoder = self.model.config.max_length, self.model.chat_encoder
        room = self.options.get("max_new_tokens") or min(MAX_NEW_TOKENS, context // 4)
        first, count = int(self.system is not None), len(messages)
        while len(messages) > first + 1 and len(encoder.encode_prompt(messages)) + room > context:
            del messages[first : first + 2]
        return count - len(messages)
