"""Chats with a language model: answers to messages, and a conversation that goes on."""

from collections.abc import Generator as Stream
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from heedful.data.chats import ChatEncoder, check_messages, is_empty
from heedful.errors import UserError

if TYPE_CHECKING:
    from heedful.pipelines.language_model import LanguageModel

MAX_NEW_TOKENS = 512  # of an answer, but at most half of the model's context


def as_chats(messages: Any) -> tuple[list[list[dict[str, Any]]], bool]:
    """Conversations to answer, and True where a single one was given.

    Raises:
        UserError: anything but lists of messages; an empty message.
    """
    is_single = not isinstance(messages, list | tuple) or any(
        isinstance(message, Mapping) for message in messages
    )
    chats = [messages] if is_single else list(messages)
    for number, chat in enumerate(chats, 1):
        where = "messages" if is_single else f"chat {number}"
        check_messages(chat, where)
        empty = next((i for i, message in enumerate(chat, 1) if is_empty(message)), None)
        if empty is not None:
            raise UserError(f"{where}, message {empty}: it is empty; write a text, or leave it out")
    return [[dict(message) for message in chat] for chat in chats], is_single


def encoder_of(model: "LanguageModel") -> ChatEncoder:
    """The encoder of a model's chats, kept with the model until its tokenizer changes."""
    encoder = model.chat_encoder
    if encoder is None or encoder.tokenizer is not model.tokenizer:
        encoder = model.chat_encoder = ChatEncoder(model.tokenizer)
    return encoder


def chat_rows(model: "LanguageModel", chats: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """The ids of conversations to answer; `options` is completed for the calls of `generate`.

    Raises:
        UserError: no chat template, or one that refuses the messages; a conversation that leaves
            no tokens of the context for an answer.
    """
    encoder = encoder_of(model)
    rows = [encoder.encode_prompt(chat) for chat in chats]
    longest = max(range(len(rows)), key=lambda index: len(rows[index]))
    size, context = len(rows[longest]), model.config.max_length
    if size >= context:
        raise UserError(
            f"chat {longest + 1} has {size} tokens, but the model's context is {context}; leave "
            "out its first messages"
        )
    options["stop_ids"] = [*options.get("stop_ids", ()), encoder.end_id]
    if options.get("max_new_tokens") is None:
        options["max_new_tokens"] = min(answer_limit(model), context - size)
    return rows


def answer_limit(model: "LanguageModel") -> int:
    """The default of `max_new_tokens` in a chat."""
    return int(max(1, min(MAX_NEW_TOKENS, model.config.max_length // 2)))


@dataclass
class Conversation:
    """A conversation with a model, whose oldest messages are left out when its context is full.

    Args:
        system: the system message; None: none.
        options: those of `model.chat`.

    Attributes:
        messages: the system message, questions and answers.
        num_left_out: messages that no longer fit.
    """

    model: "LanguageModel"
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list, init=False)
    num_left_out: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raises UserError for a model without a chat template, or a system message it refuses."""
        self.reset()
        encoder_of(self.model).encode_prompt([*self.messages, {"role": "user", "content": "a"}])
        self.model.options(**self.options)

    def reset(self) -> None:
        """Begin again, with the system message alone."""
        self.num_left_out = 0
        self.messages = []
        if self.system is not None:
            self.messages = [{"role": "system", "content": self.system}]

    def ask(self, text: str) -> Stream[str, None, str]:
        """The answer to a message in pieces, as of `LanguageModel.stream_chat`.

        An answer that is ended early by closing the generator is kept up to there. A message that
        cannot be answered is left out again.

        Raises:
            UserError: a message that is empty, or too long for the context.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            self._fit()
            stream = self.model.stream_chat(self.messages, **self.options)
            while True:
                try:
                    piece = next(stream)
                except StopIteration as end:
                    answer = end.value
                    return answer
                answer += piece
                yield piece
        finally:
            if answer.strip():
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages = before

    def _fit(self) -> None:
        """Leave out the oldest questions and answers until there is room for a new answer."""
        context = self.model.config.max_length
        limit = min(self.options.get("max_new_tokens") or answer_limit(self.model), context - 1)
        first = int(self.system is not None)
        encoder = encoder_of(self.model)
        while len(encoder.encode_prompt(self.messages)) + limit > context:
            if len(self.messages) <= first + 1:
                break  # `stream_chat` refuses it if it is too long for any answer
            self.messages[first : first + 2] = []
            self.num_left_out += 2
