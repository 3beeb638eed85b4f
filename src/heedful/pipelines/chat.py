"""Chats with a language model: answers to messages, and conversations of several turns."""

from collections.abc import Generator as Stream
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from heedful.data.chats import ChatEncoder, check_messages, is_empty
from heedful.errors import UserError
from heedful.pipelines.inputs import EmptyTextError, LengthError

if TYPE_CHECKING:
    from heedful.pipelines.language_model import LanguageModel

MAX_NEW_TOKENS = 512  # of an answer; fewer if the context is shorter


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
        empty = next(
            (i for i, m in enumerate(chat, 1) if is_empty(m) and not m.get("tool_calls")), None
        )
        if empty is not None:
            raise EmptyTextError(
                f"{where}, message {empty}: it is empty; write a text, or leave it out"
            )
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
    model.options(**{"beam_size": 1, **options})
    encoder, own = encoder_of(model), model.metadata.options
    rows = [encoder.encode_prompt(chat) for chat in chats]
    longest = max(range(len(rows)), key=lambda index: len(rows[index]))
    size, context = len(rows[longest]), model.config.max_length
    if size >= context:
        noun = "the chat" if len(rows) == 1 else f"chat {longest + 1}"
        problem = (
            f"{noun} has {size} tokens, but the model's context is {context}; leave out its first "
            "messages, or shorten them"
        )
        raise LengthError(problem, size, context, hint="")
    options["stop_ids"] = [*options.get("stop_ids", ()), encoder.end_id]
    if encoder.end_id not in model.tokenizer.special_ids:  # then its name would be in the text
        stop = options.get("stop") or own.get("stop", ())
        options["stop"] = [*stop, model.tokenizer.piece(encoder.end_id)]
    if options.get("max_new_tokens") is None:
        most = own.get("max_new_tokens", MAX_NEW_TOKENS)
        options["max_new_tokens"] = min(most, context - size)
    return rows


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

    model: "LanguageModel"
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list, init=False)
    num_left_out: int = field(default=0, init=False)
    num_asked: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raises UserError for a model without a chat template, or that refuses the rest."""
        self.reset()
        encoder_of(self.model).encode_prompt([*self.messages, {"role": "user", "content": "a"}])
        self.model.options(**{"beam_size": 1, **self.options})

    def reset(self) -> None:
        """Begin again, with the system message alone."""
        self.num_left_out = self.num_asked = 0
        self.messages = []
        if self.system is not None:
            self.messages = [{"role": "system", "content": self.system}]

    def ask(self, text: str) -> Stream[str, None, str]:
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
        self, pieces: Stream[str, None, str], messages: list[dict[str, Any]]
    ) -> Stream[str, None, str]:
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
        context, encoder = self.model.config.max_length, encoder_of(self.model)
        room = self.options.get("max_new_tokens") or min(MAX_NEW_TOKENS, context // 4)
        first, count = int(self.system is not None), len(messages)
        while len(messages) > first + 1 and len(encoder.encode_prompt(messages)) + room > context:
            del messages[first : first + 2]
        return count - len(messages)
