"""Conversations: rows of data files, checked, and their token ids with the targets marked."""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import UInt32

from heedful.data.chat_template import ChatTemplate, Message, Messages
from heedful.data.encoding import RowError, TextColumn
from heedful.data.rows import MESSAGES, is_blank
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError, describe, format_names

Answers: TypeAlias = Literal["all", "last"]

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"from", "value"}


class ChatFields(NamedTuple):
    """Names of the fields of a row: of one with all messages, or of one with two texts."""

    messages: str = MESSAGES
    prompt: str = "prompt"
    response: str = "response"


def chat_of_record(record: Mapping[str, Any], where: str, fields: ChatFields) -> str:
    """The conversation of a row of data as JSON; empty for one with an empty message, or whose
    answers all have the weight 0.

    Messages behind the last answer with a loss are left out.

    Args:
        where: the file and line, for errors.

    Raises:
        UserError: missing fields; a conversation that `check_messages` refuses, or without answer.
    """
    # Tables have every field in every row and message, with None where it is missing.
    record = {key: value for key, value in record.items() if value is not None}
    if fields.messages in record:
        messages = record[fields.messages]
        check_messages(messages, where)
    elif fields.prompt in record and fields.response in record:
        texts = {"user": record[fields.prompt], "assistant": record[fields.response]}
        for name, text in zip(fields[1:], texts.values(), strict=True):
            if not isinstance(text, str):
                raise UserError(f"{where}: {name!r} must be a text, not {describe(text)}")
        messages = [{"role": role, "content": text} for role, text in texts.items()]
    else:
        raise UserError(
            f"{where}: no key {fields.messages!r}, nor {fields.prompt!r} and {fields.response!r} "
            f"(found: {format_names(list(map(str, record))) or 'none'}); set the fields to the "
            "right keys"
        )
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise UserError(
            f"{where}: a chat without an answer (roles: {', '.join(roles)}); add a message of the "
            "role assistant, or leave the row out"
        )
    answers = [index for index, message in enumerate(messages) if has_loss(message)]
    messages = messages[: answers[-1] + 1] if answers else []
    if not messages or any(is_empty(message) for message in messages):
        return ""
    known = [
        written_message(message, f"{where}, message {number}")
        for number, message in enumerate(messages, 1)
    ]
    return json.dumps(known, ensure_ascii=False)


def is_empty(message: Message) -> bool:
    """True for a message of blanks without calls of tools; a system message may be empty."""
    is_blank_text = is_blank(message.get("content") or "")
    return message["role"] != "system" and is_blank_text and not message.get("tool_calls")


def has_loss(message: Message) -> bool:
    """True for an answer that is learned: without the weight 0 (OpenAI's format of chats)."""
    return message["role"] == "assistant" and message.get("weight") != 0


def written_message(message: Message, where: str) -> dict[str, Any]:
    """A message as chat templates expect it: without None, with a text as content, and with the
    arguments of its tool calls as mappings, which OpenAI's API has as JSON text.

    Raises:
        UserError: arguments that are neither a mapping nor the JSON text of one.
    """
    known = {key: value for key, value in message.items() if value is not None}
    if calls := known.get("tool_calls"):
        known["tool_calls"] = [_with_arguments(call, where) for call in calls]
    return {**known, "content": known.get("content", "")}


def _with_arguments(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A call of a tool with its arguments as a mapping."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], where)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise UserError(
            f"{where}: the arguments of a tool call must be a JSON object or its text, not "
            f"{describe(arguments)}"
        )
    return {**call, "arguments": parsed}


def check_messages(messages: Any, where: str) -> None:
    """Raise UserError unless `messages` is a list of at least one {"role": ..., "content": ...}.

    Args:
        where: name of the conversation, such as its file and line, for errors.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(
            f"{where}: a chat is a list of messages with role and content, not {describe(messages)}"
        )
    for number, message in enumerate(messages, 1):
        location = f"{where}, message {number}"
        if not isinstance(message, Mapping):
            raise UserError(f"{location}: must have role and content, not be {describe(message)}")
        calls = message.get("tool_calls")
        required = ("role",) if calls else ("role", "content")
        missing = [key for key in required if message.get(key) is None]
        if missing:
            renamed = "; rename from to role and value to content"
            advice = renamed if message.keys() >= _SHAREGPT else "; add it"
            present = format_names(list(map(str, message))) or "none"
            raise UserError(f"{location}: no key {missing[0]!r} (found: {present}){advice}")
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            raise UserError(f"{location}: unknown role {role!r}; use {', '.join(ROLES)}")
        if not isinstance(content, str | None):
            raise UserError(f"{location}: content must be a text, not {describe(content)}")
        if calls:
            _check_calls(calls, role, location)
        if role == "assistant" and message.get("weight") not in (None, 0, 1):
            raise UserError(
                f"{location}: weight must be 0 or 1, not {describe(message['weight'])}; 1 is an "
                "answer with a loss"
            )


def _check_calls(calls: Any, role: str, where: str) -> None:
    """Raise UserError unless calls of tools are a list of mappings of an answer."""
    if not isinstance(calls, list | tuple) or not all(isinstance(c, Mapping) for c in calls):
        raise UserError(f"{where}: tool_calls must be a list of calls, not {describe(calls)}")
    if role != "assistant":
        raise UserError(f"{where}: tool_calls are the assistant's; leave them out")


class EncodedChat(NamedTuple):
    """The ids of a conversation, and for each whether it is part of an answer."""

    ids: list[int]
    is_answer: list[bool]


class ChatEncoder:
    """Conversations as token ids, by the chat template of a tokenizer.

    A conversation is tokenized in parts, because tokens of its whole text may cross the border of
    prompt and answer. The part before an answer is tokenized as it is for a model that is to
    answer, and the answer, which ends with its last special token, as the continuation of it. So a
    conversation's ids begin with those of `encode_prompt` for each of its answers. They equal those
    of `apply_chat_template` in transformers where no token crosses such a border.

    Raises:
        UserError: a tokenizer without a chat template; a template with a syntax error.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise UserError(
                "this model's tokenizer has no chat template, so it is not known how to write "
                "messages as text; fine-tune it on chats (heedful recipes show chat)"
            )
        self.tokenizer = tokenizer
        names = {f"{role}_token": name for role, name in tokenizer.roles.items()}
        self.template = ChatTemplate(tokenizer.chat_template, names)

    def encode_prompt(self, messages: Messages) -> list[int]:
        """The ids of messages that a model is to answer.

        Raises:
            UserError: the template refuses the messages, or does not write a part of them.
        """
        text = self._render(messages, add_generation_prompt=True)
        return self._encode(text, self._spans(messages, text), {}).ids

    def encode_chat(self, messages: Messages, answers: Answers = "all") -> EncodedChat:
        """The ids of a conversation that ends with an answer.

        Args:
            answers: the answers that count as such: all of them, or the last one, without those
                of the weight 0.

        Raises:
            UserError: the template refuses the messages, does not write a part of them, changes an
                earlier answer once later messages follow, or ends no answer with a special token.
        """
        text = self._render(messages)
        spans = self._spans(messages, text)
        indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        trained = indices if answers == "all" else indices[-1:]
        trained = [index for index in trained if has_loss(messages[index])]
        for index in trained:
            if index not in spans:
                advice = (
                    "set objective.answers to last, and give each answer its own row"
                    if answers == "all" and indices[-1] in spans
                    else "use a template that writes an answer behind its generation prompt"
                )
                raise UserError(
                    f"message {index + 1}: the chat template writes this answer differently than "
                    f"behind the prompt that a model answers; {advice}"
                )
        return self._encode(text, spans, trained)

    @cached_property
    def end_id(self) -> int:
        """The id that ends an answer.

        Raises:
            UserError: the template refuses a question and its answer, or ends no answer.
        """
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        encoded = self.encode_chat(chat, "last")
        answer = [i for i, flag in zip(*encoded, strict=True) if flag]
        return answer[-1]

    def _render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation.

        Raises:
            UserError: calls of tools, or their results, that the template does not write, since
                its text is the same with others.
        """
        text = self.template.render(messages, add_generation_prompt=add_generation_prompt)
        calls = [bool(message.get("tool_calls")) for message in messages]
        results = [message["role"] == "tool" for message in messages]
        for name, flags in (("tool_calls", calls), ("messages of the role tool", results)):
            if True not in flags:
                continue
            changed, index = [*messages], flags.index(True)
            content = f"{messages[index]['content']}{'a' * results[index]}"
            changed[index] = {**messages[index], "content": content, "tool_calls": None}
            try:
                other = self.template.render(changed, add_generation_prompt=add_generation_prompt)
            except UserError:
                continue
            if other == text:
                raise UserError(
                    f"message {index + 1}: the chat template does not write {name}; use one that "
                    "does, or leave them out"
                )
        return text

    def _spans(self, messages: Messages, text: str) -> dict[int, tuple[int, int]]:
        """Begin and end of answers in the rendered text, by the index of the message.

        The span of an answer is what the template adds to the prompt that a model answers. Answers
        that the template writes in another way are left out, such as those that it shortens once
        other messages follow.
        """
        spans = {}
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            with suppress(UserError):  # a template may refuse the beginning of a conversation
                prompt = self.template.render(messages[:index], add_generation_prompt=True)
                whole = self.template.render(messages[: index + 1])
                if text.startswith(whole) and whole.startswith(prompt) and whole != prompt:
                    spans[index] = len(prompt), len(whole)
        return spans

    def _encode(
        self, text: str, spans: Mapping[int, tuple[int, int]], wanted: Collection[int]
    ) -> EncodedChat:
        """The ids of a rendered text, and True for those in the wanted spans up to their end."""
        ids: list[int] = []
        is_answer: list[bool] = []
        position, after = 0, ""
        for index, (begin, end) in spans.items():
            before = self.tokenizer.encode_markup(text[position:begin], after)
            answer, size = self._encode_answer(text[:begin], text[begin:end])
            ids += [*before, *answer]
            is_answer += [*[False] * len(before), *[index in wanted] * len(answer)]
            position, after = begin + size, self._names[answer[-1]]
        rest = self.tokenizer.encode_markup(text[position:], after)
        return EncodedChat([*ids, *rest], [*is_answer, *[False] * len(rest)])

    def _encode_answer(self, before: str, text: str) -> tuple[list[int], int]:
        """The ids of an answer up to its end token, and the number of its characters."""
        ids, ends = self.tokenizer.encode_continuation(before, text)
        last = next((i for i in reversed(range(len(ids))) if ids[i] in self._names), None)
        if last is None:
            known = self.tokenizer.markup.added
            names = [name for name in self.template.special_names if name not in known]
            problem = f" ({', '.join(names)} are none of this tokenizer)" if names else ""
            raise UserError(
                f"the chat template ends an answer without a special token{problem}, so that a "
                "model cannot learn to stop; put eos_token behind it"
            )
        return ids[: last + 1], ends[last]

    @cached_property
    def _names(self) -> dict[int, str]:
        """Names of the tokens that can end an answer."""
        unknown = self.tokenizer.unk_id
        return {i: name for name, i in self.tokenizer.markup.added.items() if i != unknown}


@dataclass(frozen=True)
class ChatColumn(TextColumn):
    """A column of conversations: each id is doubled, plus 1 where it is part of an answer.

    Args:
        texts: `MESSAGES` alone.
        special_tokens: "none": the chat template has them.
        answers: the answers with a loss.
    """

    texts: tuple[str, ...] = (MESSAGES,)
    special_tokens: Literal["text", "target", "document", "none"] = "none"
    answers: Answers = "all"

    @cached_property
    def encoder(self) -> ChatEncoder:
        """The encoder, made at its first use, in each process that uses the column."""
        return ChatEncoder(self.tokenizer)

    @property
    def id_limit(self) -> int:
        """An upper bound of the stored ids, which are below it."""
        return 2 * self.tokenizer.vocab_size

    def encode_batch(self, cells: Sequence[list[str]]) -> Sequence[list[Sequence[int]]]:
        """See `TextColumn.encode_batch`."""
        rows: list[Sequence[int]] = []
        for index, text in enumerate(cells[0]):
            try:
                encoded = self.encoder.encode_chat(load_messages(text), self.answers)
            except UserError as error:
                raise RowError(index, str(error)) from None
            rows.append([2 * i + flag for i, flag in zip(*encoded, strict=True)])
        return [rows]

    def count_unknown(self, ids: UInt32[np.ndarray, " T"]) -> int:
        """See `TextColumn.count_unknown`."""
        return super().count_unknown(ids // 2)

    def has_targets(self, ids: Sequence[Sequence[int]]) -> bool:
        """See `TextColumn.has_targets`."""
        return any(i & 1 for i in ids[0][1:])


def load_messages(text: str) -> list[dict[str, Any]]:
    """The messages of a cell of the column `MESSAGES`."""
    messages: list[dict[str, Any]] = json.loads(text)
    return messages
