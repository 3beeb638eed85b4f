"""Chats as text and ids: templates and masks as of transformers, borders of answers, bad rows."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from chat_formats import KINDS, TEMPLATES, Chat, chat_of, write_hf_tokenizer
from heedful.data.chat_template import BUILT_IN, ChatTemplate, read_chat_template
from heedful.data.chats import ChatEncoder, ChatFields, chat_of_record
from heedful.data.hf_tokenizers import read_tokenizer, write_tokenizer
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError

ONE = chat_of("What is the capital of France?", "Paris.")
CHATS = {
    "one": ONE,
    "two": chat_of("Write a list", "1. one\n2. two", "Thank you", " that is  what I wanted! "),
    "system": chat_of("  What?  ", "The capital", system="user: <b>&'\"</b> é 今天"),
    "open": chat_of("Write", "one", "What is that?"),
}
PAIRS = [(kind, name) for kind in KINDS for name in TEMPLATES]


def fits(template: str, chat: str) -> bool:
    return chat != "system" or template in ("chatml", "llama3", "plain")


class Both:
    """A tokenizer here and in transformers, from the same files."""

    def __init__(self, directory: Path, kind: str, template: str) -> None:
        self.path = write_hf_tokenizer(directory / f"{kind}-{template}", kind, template)
        self.hf = AutoTokenizer.from_pretrained(self.path)
        tokenizer = read_tokenizer(self.path)
        assert tokenizer is not None
        self.tokenizer, self.encoder = tokenizer, ChatEncoder(tokenizer)


@pytest.fixture(scope="module")
def both(tmp_path_factory: Any) -> Any:
    """`Both` by kind and template, each made once."""
    folder, made = tmp_path_factory.mktemp("tokenizers"), dict[tuple[str, str], Both]()

    def get(kind: str, template: str) -> Both:
        if (kind, template) not in made:
            made[kind, template] = Both(folder, kind, template)
        return made[kind, template]

    return get


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_give_the_text_of_transformers(both: Any, name: str) -> None:
    pair = both("bytes", name)
    for key, chat in CHATS.items():
        if fits(name, key):
            for prompt in (False, True):
                expected = pair.hf.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=prompt
                )
                actual = pair.encoder.template.render(chat, add_generation_prompt=prompt)
                assert actual == expected
        else:
            with pytest.raises(UserError, match="refuses a conversation of the roles system, user"):
                pair.encoder.template.render(chat)


def test_functions_and_blocks_that_transformers_gives_to_templates(both: Any) -> None:
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 2 %}{% break %}"
        "{% endif %}{% set ns.n = ns.n + 1 %}{{ m | tojson }}{{ dict(a=ns.n) | tojson(indent=1) }}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}\n    {% if tools %}x"
        "{% endif %}\n{{ eos_token ~ missing ~ strftime_now('%Y') }}"
    )
    chat = chat_of("é<", "b", "c")
    pair = both("bytes", "chatml")
    actual = ChatTemplate(source, {"eos_token": "</s>"}).render(chat)
    assert actual == pair.hf.apply_chat_template(chat, chat_template=source, tokenize=False)
    assert actual.endswith(f"</s>{datetime.now().year}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ dict.__subclasses__() }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_runs_in_a_sandbox(attack: str) -> None:
    with pytest.raises(UserError, match=r"^the chat template refuses a conversation of .* user"):
        print(ChatTemplate(attack, {}).render(chat_of("a")))


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_ids_and_answers_are_those_of_transformers(both: Any, kind: str, name: str) -> None:
    """By the blocks `generation` of the template there, and without them here."""
    pair = both(kind, name)
    for key, chat in CHATS.items():
        if not fits(name, key):
            continue
        hf = pair.hf.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        actual = pair.encoder.encode_chat(chat)
        assert actual.ids == hf["input_ids"], key
        assert list(map(int, actual.is_answer)) == hf["assistant_masks"], key
        last = pair.encoder.encode_chat(chat, "last")
        assert last.ids == actual.ids
        answers = [i for i, flag in zip(*actual, strict=True) if flag]
        assert answers[-1] == pair.encoder.end_id
        num_last = sum(last.is_answer)
        assert [i for i, flag in zip(*last, strict=True) if flag] == answers[-num_last:]
        assert answers[-num_last:].count(pair.encoder.end_id) == 1
        prompt = pair.hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        assert pair.encoder.encode_prompt(chat) == prompt["input_ids"]


TEXT = st.text("aT1.\n :é<", min_size=1, max_size=6).filter(str.strip)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([*KINDS, "crossing"]),
    name=st.sampled_from([*TEMPLATES, BUILT_IN["plain"]]),
    texts=st.lists(TEXT, min_size=2, max_size=4),
)
def test_ids_begin_with_the_prompt_of_each_answer(
    both: Any, kind: str, name: str, texts: list[str]
) -> None:
    """So a model learns an answer behind the ids that it will be asked with."""
    encoder = both(kind, name).encoder
    chat = chat_of(*texts[: len(texts) // 2 * 2])
    ids, is_answer = encoder.encode_chat(chat)
    expected = [False] * len(ids)
    for index in range(1, len(chat), 2):
        prompt = encoder.encode_prompt(chat[:index])
        assert ids[: len(prompt)] == prompt
        end = ids.index(encoder.end_id, len(prompt)) + 1
        expected[len(prompt) : end] = [True] * (end - len(prompt))
    assert is_answer == expected


def test_no_token_crosses_the_border_of_an_answer(both: Any) -> None:
    """Where one does in the ids of the whole text, the mask there has no exact place."""
    pair = both("crossing", BUILT_IN["plain"])
    chat = chat_of("What is the capital of France?", "Paris.")
    whole = pair.hf.apply_chat_template(chat, return_dict=True)["input_ids"]
    actual = pair.encoder.encode_chat(chat)
    prompt = pair.encoder.encode_prompt(chat[:1])
    assert whole[: len(prompt)] != prompt
    assert actual.ids != whole
    pieces = pair.tokenizer.tokens([i for i, flag in zip(*actual, strict=True) if flag])
    assert "".join(pieces) == "Paris.</s>"
    assert "".join(pair.tokenizer.tokens(actual.ids)) == pair.encoder.template.render(chat)


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe", "unigram", "wordpiece", "char", "word"])
def test_tokenizers_trained_here_know_the_tokens_of_a_template(kind: str, tmp_path: Path) -> None:
    """In other texts the names of these tokens stay text. Export and import keep the template."""
    names = ("<|im_start|>", "<|im_end|>")
    lines = ["user assistant what does ann like", "tea and milk , < | im_end >"] * 3
    plain = train_tokenizer(lines, kind=kind, vocab_size=300, or_fewer=True, extra_specials=names)
    assert plain.encode("a<|im_end|>").count(5) == 0
    for tokenizer in (plain.extended((), BUILT_IN["chatml"]), plain.extended(["<|x|>"], "{{x}}")):
        tokenizer.save(tmp_path / "own.json")
        assert Tokenizer.load(tmp_path / "own.json").content() == tokenizer.content()
        assert tokenizer.encode("tea and milk") == plain.encode("tea and milk")
    assert tokenizer.markup.added["<|x|>"] == plain.vocab_size
    tokenizer = plain.extended((), BUILT_IN["chatml"])
    write_tokenizer(tokenizer, tmp_path / "hf")
    copy = read_tokenizer(tmp_path / "hf")
    assert copy is not None
    assert copy.chat_template == tokenizer.chat_template
    chat = chat_of("what does ann like", "tea", "and", "milk")
    expected = ChatEncoder(tokenizer).encode_chat(chat)
    assert ChatEncoder(copy).encode_chat(chat) == expected
    assert sum(i == 5 for i, flag in zip(*expected, strict=True) if flag) == 2
    answers = [[]]
    for i, flag in zip(*expected, strict=True):
        answers[-1] += [i] if flag else []
        answers += [[]] if flag and i == 5 else []
    assert [tokenizer.decode(ids) for ids in answers] == ["tea", "milk", ""]
    hf = AutoTokenizer.from_pretrained(tmp_path / "hf")
    if kind == "byte_bpe":  # the others strip the line break before an answer
        assert hf.apply_chat_template(chat, return_dict=True)["input_ids"] == expected.ids


def test_sources_of_a_template_in_a_directory(tmp_path: Path) -> None:
    """The file comes first; of several named templates the default one counts."""
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    directory = write_hf_tokenizer(tmp_path / "a", "bytes", None, chat_template=named)
    assert read_tokenizer(directory).chat_template == "D"  # type: ignore[union-attr]
    assert AutoTokenizer.from_pretrained(directory).get_chat_template() == "D"
    (directory / "chat_template.jinja").write_text("F")
    assert read_tokenizer(directory).chat_template == "F"  # type: ignore[union-attr]
    assert AutoTokenizer.from_pretrained(directory).chat_template == "F"
    directory = write_hf_tokenizer(tmp_path / "b", "bytes", None, chat_template={"x": 1})
    with pytest.raises(UserError, match="chat_template must be a text"):
        read_tokenizer(directory)


def encoder_with(source: str) -> ChatEncoder:
    tokenizer = train_tokenizer(["a b c (us"], kind="char", extra_specials=("<|im_end|>",))
    return ChatEncoder(tokenizer.extended((), source))


def test_a_template_that_changes_earlier_answers() -> None:
    """As templates of reasoning models do, which drop the thoughts of former answers."""
    source = (
        "{% for m in messages %}{{ m.role[0] + '(' }}"
        "{{ (m.content if loop.last else m.content.split('|')[-1]) + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}a({% endif %}"
    )
    encoder = encoder_with(source)
    chat = chat_of("a", "b|c", "b", "a|c")
    with pytest.raises(UserError, match=r"message 2: .* objective\.answers to last"):
        encoder.encode_chat(chat)
    ids, is_answer = encoder.encode_chat(chat, "last")
    assert encoder.tokenizer.decode(ids[: is_answer.index(True)]).endswith("u(ba(")
    assert sum(is_answer) == 4
    assert ids[: is_answer.index(True)] == encoder.encode_prompt(chat[:3])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "syntax error in line 1: Unexpected end"),
        ("{{ messages[0].content + 1 }}", "refuses a conversation of the roles user.*: can only"),
        ("{{ messages[9].content }}", "refuses a conversation of the roles user, assistant: .* 9"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "without a special token, so that"),
        (
            "{% for m in messages %}{{ m.content + '<|e|>' }}{% endfor %}",
            r"without a special token \(<\|e\|> are none of this",
        ),
        ("<|im_end|>", "message 2: the chat template writes .* behind its generation prompt"),
    ],
)
def test_templates_that_cannot_be_used(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        encoder_with(source).encode_chat(ONE)


def test_a_tokenizer_without_template_and_a_template_that_does_not_exist(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["a b c"], kind="char")
    with pytest.raises(UserError, match="no chat template, so it is not known how to write"):
        ChatEncoder(tokenizer)
    with pytest.raises(UserError, match=r"no chat template chatlm: give a file .* chatml, plain$"):
        read_chat_template("chatlm")
    (tmp_path / "t.jinja").write_text("x")
    assert read_chat_template(str(tmp_path / "t.jinja")) == "x"


FIELDS = ChatFields()
TOOLS_OF_USER = {"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, r"no key 'messages', nor 'prompt' and 'response' \(found: 'text'\)"),
        ({"prompt": "a"}, r"nor 'prompt' and 'response' \(found: 'prompt'\)"),
        ({"prompt": "a", "response": 3}, "'response' must be a text, not 3"),
        ({"messages": "a"}, "a chat is a list of messages with role and content, not 'a'"),
        ({"messages": []}, "a chat is a list of messages"),
        ({"messages": ["a"]}, "message 1: must have role and content, not be 'a'"),
        ({"messages": [{"role": "user"}]}, r"message 1: no key 'content' \(found: 'role'\)"),
        ({"messages": [{"from": "human", "value": "a"}]}, "rename from to role and value to co"),
        ({"messages": [*chat_of("a", "b"), {"role": "bot", "content": "c"}]}, "3: unknown role 'b"),
        ({"messages": chat_of("a", ["b"])}, r"message 2: content must be a text, not \['b'\]"),  # type: ignore[arg-type]
        ({"messages": [TOOLS_OF_USER]}, r"message 1: tool_calls are the assistant's"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "1: tool_calls must be a list"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"arguments": "[1"}]}]},
            "message 1: the arguments of a tool call must be a JSON object or its text, not .\\[1.",
        ),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 2}]}, "must be 0 or 1, not"),
        ({"messages": chat_of("a")}, r"a chat without an answer \(roles: user\)"),
        ({"messages": chat_of("a", system="b")}, r"without an answer \(roles: system, user\)"),
    ],
)
def test_rows_that_are_no_chats_are_refused_with_their_place(
    record: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"^f, line 7.*{message}"):
        chat_of_record(record, "f, line 7", FIELDS)


def test_rows_of_both_forms() -> None:
    def read(record: dict[str, Any], fields: ChatFields = FIELDS) -> Chat:
        chat: Chat = json.loads(chat_of_record(record, "f, line 1", fields))
        return chat

    assert read({"prompt": "a", "response": "b", "id": 3}) == chat_of("a", "b")
    assert read({"q": "a", "a": "b"}, ChatFields("m", "q", "a")) == chat_of("a", "b")
    assert read({"messages": [*chat_of("a", "b", "c")]}) == chat_of("a", "b")
    message = {"role": "user", "content": "a", "name": None, "age": 3}
    assert read({"messages": [message, *chat_of("", "b")[1:]]})[0] == {
        "role": "user",
        "content": "a",
        "age": 3,
    }
    assert read({"messages": chat_of("a", "b", system="")})[0]["content"] == ""
    for empty in ({"prompt": " ", "response": "b"}, {"messages": chat_of("a", "b", "c", "\n")}):
        assert chat_of_record(empty, "f, line 1", FIELDS) == ""  # left out, and counted as empty


CALL = {"type": "function", "function": {"name": "w", "arguments": '{"city": "Rome"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOLS = [
    {"role": "user", "content": "q"},
    CALLING,
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
]


def test_calls_of_tools_are_answers_without_a_text() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for content in (None, "", " "):
        rows = [TOOLS[0], {**CALLING, "content": content}, *TOOLS[2:]]
        chat = json.loads(chat_of_record({"messages": rows}, "f, line 1", FIELDS))
        assert [message["content"].strip() for message in chat][1:3] == ["", "sunny"]
        assert chat[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    tokenizer = train_tokenizer(["q w city Rome sunny"], kind="byte")
    tokenizer = tokenizer.extended(["<|im_start|>", "<|im_end|>"], template)
    chat = json.loads(chat_of_record({"messages": TOOLS}, "f, line 1", FIELDS))
    encoded = ChatEncoder(tokenizer).encode_chat(chat)
    answers = [i for i, flag in zip(*encoded, strict=True) if flag]
    assert tokenizer.decode(answers) == 'w{"city": "Rome"}It is sunny.'
    silent = ChatEncoder(tokenizer.extended([], BUILT_IN["chatml"]))
    for ask in (silent.encode_chat, silent.encode_prompt):
        with pytest.raises(UserError, match="message 2: the chat template does not write tool_cal"):
            ask(chat)


def test_answers_of_weight_0_have_no_loss() -> None:
    rows: Any = chat_of("a", "b", "c", "d", "e", "f")
    rows[1]["weight"], rows[3]["weight"], rows[5]["weight"] = 0, 1, 0
    chat = json.loads(chat_of_record({"messages": rows}, "f, line 1", FIELDS))
    assert chat == rows[:4]
    tokenizer = train_tokenizer(["a b c d"], kind="byte")
    tokenizer = tokenizer.extended(["<|im_start|>", "<|im_end|>"], BUILT_IN["chatml"])
    for answers in ("all", "last"):
        encoded = ChatEncoder(tokenizer).encode_chat(chat, answers)
        assert tokenizer.decode([i for i, f in zip(*encoded, strict=True) if f]) == "d"
    rows[3]["weight"] = 0
    assert chat_of_record({"messages": rows}, "f, line 1", FIELDS) == ""


def test_developers_are_written_as_the_system_unless_a_template_names_them() -> None:
    messages = [{"role": "developer", "content": "a"}]
    assert ChatTemplate(BUILT_IN["plain"], {"eos_token": "</s>"}).render(messages) == "System: a\n"
    named = "{% for m in messages %}{{ m.role if m.role == 'developer' }}{% endfor %}"
    assert ChatTemplate(named, {}).render(messages) == "developer"
