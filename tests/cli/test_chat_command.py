"""`heedful chat`: piped lines, a scripted terminal, and models that cannot chat."""

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend_models import model_of
from chat_formats import chat_model, chat_of
from commands import Commands, assert_refused
from heedful.cli import chat as command
from heedful.pipelines import LanguageModel
from heedful.pipelines.language_model import Conversation


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> tuple[LanguageModel, Path]:
    model, path = chat_model(), tmp_path_factory.mktemp("chat") / "model"
    model.save(path)
    return model, path


def test_each_line_of_a_pipe_is_answered_in_one_conversation(
    commands: Commands, saved: tuple[LanguageModel, Path]
) -> None:
    model, path = saved
    first = model.chat(chat_of("hello", system="be brief"), max_new_tokens=8)
    second = model.chat(chat_of("hello", first, "and?", system="be brief"), max_new_tokens=8)
    flags = (path, "--system", "be brief", "--max-new-tokens", "8")
    plain = commands.run("chat", *flags, stdin=b"hello\nand?\n")
    assert plain.code == 0, plain.err
    assert plain.out.split("\n") == [*(" ".join(t.split("\n")) for t in (first, second)), ""]
    lines = commands.run("chat", *flags, "--json", stdin=b"hello\nand?").out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"message": "hello", "answer": first},
        {"message": "and?", "answer": second},
    ]
    full = commands.run("chat", *flags, stdin=b"hello\nand?\nthe third message\n")
    assert full.code == 0
    assert full.err == "note: the context of 96 tokens is full: left out the oldest 4 messages\n"


@pytest.mark.parametrize(
    ("flags", "stdin", "line"),
    [
        ((), b"", "error: no message: type one, or give lines on stdin"),
        ((), b"a\n\n", "error: line 2: the message is empty; write a text"),
        ((), b"x" * 99, "error: line 1: the chat has 118 tokens, but the model's context is 96"),
        ((), b"\xff\n", "error: stdin, line 1: not UTF-8"),
        (
            ("--max-new-tokens", "0"),
            b"a\n",
            "error: invalid value for '--max-new-tokens': it must be at least 1",
        ),
        (("--beam-size", "2"), b"a\n", "error: no such option: --beam-size; it is an option of"),
    ],
)
def test_input_that_cannot_be_answered(
    commands: Commands, saved: tuple[LanguageModel, Path], flags: Any, stdin: bytes, line: str
) -> None:
    assert_refused(commands.run("chat", saved[1], *flags, stdin=stdin), line)


def test_models_that_cannot_chat(commands: Commands, tmp_path: Path) -> None:
    model_of("bert").save(tmp_path / "bert")
    model_of("gpt2").save(tmp_path / "gpt2")
    for name, line in (
        ("bert", "error: chat needs a language model, but this model is a masked language model"),
        ("gpt2", "error: this model's tokenizer has no chat template, so it is not known"),
    ):
        refused = commands.run("chat", tmp_path / name, stdin=b"a\n")
        assert_refused(refused, line)


class Terminal:
    """A user who types lines; an exception is Ctrl-C or Ctrl-D at the prompt."""

    def __init__(self, *lines: Any) -> None:
        self.lines = iter(lines)

    def __call__(self, prompt: str) -> str:
        assert prompt == "> "
        line = next(self.lines)
        if isinstance(line, type):
            raise line
        return str(line)


def test_a_conversation_in_a_terminal(
    saved: tuple[LanguageModel, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = saved[0]
    conversation = Conversation(model, None, {"max_new_tokens": 8})
    first = model.chat(chat_of("hello"), max_new_tokens=8)
    second = model.chat(chat_of("hello", first, "and?"), max_new_tokens=8)
    typed = ("hello", "", KeyboardInterrupt, " and? ", "/reset", "hello", "/help", "/no", EOFError)
    monkeypatch.setattr(builtins, "input", Terminal(*typed))
    command._talk(conversation)
    out, err = capsys.readouterr()
    assert out == f"{first}\n\n{second}\n{first}\n\n"
    assert err.count("/reset  forget the conversation") == 2
    assert "unknown command /no" in err
    monkeypatch.setattr(builtins, "input", Terminal("x" * 99, "/exit"))
    command._talk(conversation)
    assert "error: the chat has 118 tokens" in capsys.readouterr().err
    assert conversation.messages == chat_of("hello", first)


def test_ctrl_c_stops_an_answer_and_keeps_its_beginning(
    saved: tuple[LanguageModel, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = saved[0]
    conversation = Conversation(model, None, {"max_new_tokens": 8})
    whole, stream = model.stream_chat(chat_of("hello"), max_new_tokens=8), model.stream_chat

    def interrupted(*arguments: Any, **options: Any) -> Iterator[str]:
        pieces = stream(*arguments, **options)
        yield next(pieces)
        yield next(pieces)
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "stream_chat", interrupted)
    monkeypatch.setattr(builtins, "input", Terminal("hello", EOFError))
    command._talk(conversation)
    expected = next(whole) + next(whole)
    out, err = capsys.readouterr()
    assert out == f"{expected}\n\n"
    assert err.endswith("note: stopped\n")
    assert conversation.messages == chat_of("hello", expected)
