"""Chats with a language model: answers, streams, and conversations in a context that fills."""

from pathlib import Path
from typing import Any

import pytest

import heedful
from backend_models import model_of
from chat_formats import Chat, chat_model, chat_of
from heedful.data.chats import ChatEncoder
from heedful.errors import UserError
from heedful.pipelines import LanguageModel
from heedful.pipelines.language_model import Conversation

CHATS = [
    chat_of("hello there"),
    chat_of("a", "é今", "c?"),
    chat_of("Ünï 🦜", system="be brief"),
]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return chat_model()


def last(pieces: Any) -> tuple[list[str], str]:
    """The pieces of a stream, and its return value."""
    read = []
    while True:
        try:
            read.append(next(pieces))
        except StopIteration as end:
            return read, end.value


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"draft": "lookup"}])
def test_answers_are_those_of_generate_alone_in_a_batch_and_streamed(
    model: LanguageModel, options: dict[str, Any]
) -> None:
    encoder = ChatEncoder(model.tokenizer)
    options = {"max_new_tokens": 20, **options}
    batch = model.chat(CHATS, **options)
    assert len({*batch}) == 3
    for index, (chat, answer) in enumerate(zip(CHATS, batch, strict=True)):
        own = dict(options)
        if "seed" in own:
            own["seed"] = [3 + (index << 32)]
        row = encoder.encode_prompt(chat)
        ids = model.generate(row, stop_ids=[encoder.end_id], **own)
        assert model.tokenizer.decode(ids) == answer
        assert model.chat(chat, **own) == answer
        pieces, text = last(model.stream_chat(chat, **own))
        assert text == "".join(pieces) == answer
        assert len(pieces) > 3
        [details] = model.chat(chat, return_details=True, **own)
        assert (details.text, details.ids) == (answer, ids)
    assert model.chat([]) == []


def test_an_answer_ends_at_the_end_of_the_template_and_at_other_ids(model: LanguageModel) -> None:
    """The default limit of its tokens is what the context leaves."""
    encoder = ChatEncoder(model.tokenizer)
    assert encoder.end_id not in model.ids.eos_ids
    row = encoder.encode_prompt(CHATS[0])
    [whole] = model.chat(CHATS[0], return_details=True)
    assert len(whole.ids) == model.config.max_length - len(row)
    assert not whole.finished
    end = whole.ids[4]
    [cut] = model.chat(CHATS[0], return_details=True, stop_ids=[end])
    assert cut.ids == whole.ids[: whole.ids.index(end) + 1]
    assert cut.finished
    forced = {3: encoder.end_id}
    [ended] = model.chat(CHATS[0], return_details=True, forced=forced, max_new_tokens=9)
    assert ended.ids == [*whole.ids[:3], encoder.end_id]
    assert ended.finished
    assert ended.text == model.tokenizer.decode(whole.ids[:3])
    other = chat_model()
    for holder in (other.tokenizer, other.tokenizer.decoder):  # an added token, not a special one
        name = "special_ids" if holder is other.tokenizer else "_special_ids"
        setattr(holder, name, getattr(holder, name) - {encoder.end_id})
    assert other.tokenizer.decode([encoder.end_id]) == "<|im_end|>"
    [again] = other.chat(CHATS[0], return_details=True, forced=forced, max_new_tokens=9)
    assert (again.text, again.finished) == (ended.text, True)


def test_a_model_keeps_its_template_when_it_is_saved(model: LanguageModel, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    again = heedful.load_language_model(tmp_path / "model")
    assert again.chat(CHATS, max_new_tokens=8) == model.chat(CHATS, max_new_tokens=8)


def ask(conversation: Conversation, text: str) -> str:
    answer: str = last(conversation.ask(text))[1]
    return answer


def test_a_conversation_goes_on_until_its_context_is_full(model: LanguageModel) -> None:
    conversation = Conversation(model, "be brief", {"max_new_tokens": 8})
    system: Chat = [{"role": "system", "content": "be brief"}]
    expected: Chat = list(system)
    texts = ["one", "two", "three", "four"]
    for text in texts[:1]:
        expected.append({"role": "user", "content": text})
        answer = model.chat(expected, max_new_tokens=8)
        assert ask(conversation, text) == answer
        expected.append({"role": "assistant", "content": answer})
        assert conversation.messages == expected
    for text in texts[1:]:
        ask(conversation, text)
    encoder = ChatEncoder(model.tokenizer)
    assert conversation.num_left_out > 0
    assert conversation.messages[0] == system[0]
    assert conversation.messages[-2]["content"] == "four"
    prompt = encoder.encode_prompt(conversation.messages[:-1])
    assert len(prompt) + 8 <= model.config.max_length
    conversation.reset()
    assert conversation.messages == system
    assert ask(conversation, "one") == model.chat([*system, *chat_of("one")], max_new_tokens=8)


def test_seeds_differ_by_message_and_repeat(model: LanguageModel) -> None:
    options = {"temperature": 1.0, "seed": 5, "max_new_tokens": 12}
    conversations = [Conversation(model, None, options) for _ in range(2)]
    answers = [[ask(conversation, "a") for _ in range(2)] for conversation in conversations]
    assert answers[0] == answers[1]
    chat = chat_of("a", answers[0][0], "a")
    assert answers[0][1] == model.chat(chat, **options | {"seed": [5 + (1 << 32)]})


def test_a_message_without_an_answer_is_dropped_and_a_stopped_answer_kept(
    model: LanguageModel,
) -> None:
    conversation = Conversation(model, options={"max_new_tokens": 8})
    pieces = conversation.ask("hello")
    some = next(pieces) + next(pieces)
    pieces.close()
    before = chat_of("hello", some)
    assert conversation.messages == before
    with pytest.raises(UserError, match="the message is empty"):
        conversation.ask(" ")
    with pytest.raises(UserError, match=r"the chat has .* tokens, but the model's context is 96"):
        conversation.ask("x" * 99)
    conversation.ask("never read")
    assert conversation.messages == before
    assert conversation.num_left_out == 0


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages: a chat is a list of messages with role and content, not 'hello'"),
        (["a"], "chat 1: a chat is a list of messages"),
        ([[]], "chat 1: a chat is a list"),
        ([{"role": "user"}], "messages, message 1: no key 'content'"),
        ([chat_of("a"), [{"role": "bot", "content": "a"}]], "chat 2, message 1: unknown role 'b"),
        (chat_of("a", " ", "b"), "messages, message 2: it is empty; write a text"),
        (chat_of("x" * 99), "the chat has .* tokens, but the model's context is 96; leave out its"),
        (chat_of("\ud800"), "a text contains a lone surrogate"),
    ],
)
def test_messages_that_cannot_be_answered(
    model: LanguageModel, messages: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        model.chat(messages)


def test_models_that_cannot_chat(model: LanguageModel) -> None:
    with pytest.raises(UserError, match="no chat template, so it is not known how to write"):
        model_of("gpt2").chat(CHATS[0])
    with pytest.raises(UserError, match="stop_ids must be a list of token ids, not 3"):
        model.chat(CHATS[0], stop_ids=3)
    with pytest.raises(UserError, match="token id 999 is outside"):
        model.generate("a", stop_ids=[999])
    with pytest.raises(UserError, match="answers one conversation"):
        model.stream_chat(CHATS)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="refuses a conversation of the roles user: no"):
        chat_model("{{ raise_exception('no') }}").chat(CHATS[0])
