"""`heedful chat`: a conversation with a language model in the terminal, or over a pipe."""

import sys
from collections.abc import Generator
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import typer

from heedful import pipelines
from heedful.cli import lines
from heedful.cli.flags import ModelFolder, RunTime, leave_out
from heedful.cli.guard import forget_interruption, one_line
from heedful.cli.help import IN_OUT
from heedful.cli.shared import note
from heedful.errors import UserError

if TYPE_CHECKING:
    from heedful.pipelines.language_model import Conversation

_COMMANDS = {
    "/reset": "forget the conversation and begin again",
    "/exit": "end (as Ctrl-D does)",
    "/help": "list these commands",
}
_PROMPT = "> "
_NOT_STREAMED = (  # options of beam search, and of several outputs
    *("beam_size", "num_return", "length_penalty", "normalization", "stop_rule", "num_groups"),
    *("diversity_penalty", "coverage_penalty", "require", "shortlist", "glossary"),
)


@leave_out(*_NOT_STREAMED, "batch_tokens")
def chat(
    *,
    model: ModelFolder,
    system: str | None = typer.Option(
        None, "--system", metavar="TEXT", help="System message.", rich_help_panel=IN_OUT
    ),
    json: bool = typer.Option(
        False,
        "--json",
        help="Print a line of JSON per answer: the message and its answer.",
        rich_help_panel=IN_OUT,
    ),
    options: dict[str, Any],
    run_time: RunTime,
) -> None:
    """Chat with a language model that has a chat template.

    In a terminal the answer is written while it is generated; Ctrl-C stops it, Ctrl-D ends the
    chat, and /help lists commands. From a pipe each line is a message of one conversation, and its
    answer is written as one line. When the model's context is full, the oldest messages are left
    out, with a note. Options that are not given have the values in the model's metadata.

    Example: heedful chat runs/assistant --system 'Be brief.' --temperature 0.7
    """
    from heedful.pipelines.language_model import Conversation

    opened = run_time.open(model, pipelines.LanguageModel, "chat", many=False)
    draft = options.get("draft")
    if draft not in (None, "lookup"):
        loaded = pipelines.load(str(draft), device=run_time.device, backend="eager")
        options["draft"] = pipelines.expect(loaded, pipelines.LanguageModel, "--draft")
    options["explicit"] = frozenset(options)
    lines.note_unused(options, opened.options(**{"beam_size": 1, **options}), opened)
    conversation = Conversation(opened, system, options)
    if sys.stdin.isatty() and not json:
        _talk(conversation)
    else:
        _answer_lines(conversation, json)


def _talk(conversation: "Conversation") -> None:
    """Read messages in a terminal until it ends, and stream the answers."""
    with suppress(ImportError):  # it edits the line of `input`, and keeps the earlier ones
        import readline  # noqa: F401
    typer.echo(f"{conversation.model!r}\n/help lists commands; Ctrl-D ends", err=True)
    while True:
        try:
            text = input(_PROMPT).strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:  # the line is dropped
            forget_interruption()
            typer.echo()
            continue
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            known = text == "/help"
            rows = [f"{name:<8}{use}" for name, use in _COMMANDS.items()]
            typer.echo("\n".join(rows if known else [f"unknown command {text}", *rows]), err=True)
        elif text:
            _stream_answer(conversation, text)


def _stream_answer(conversation: "Conversation", text: str) -> None:
    """Write an answer piece by piece; Ctrl-C stops it, and an error leaves the message out."""
    try:
        for piece in _ask(conversation, text):
            lines.show(piece, end="")
    except KeyboardInterrupt:
        forget_interruption()
        note("stopped")
    except UserError as error:
        typer.echo(f"error: {one_line(str(error))}", err=True)
    lines.show("")


def _answer_lines(conversation: "Conversation", json: bool) -> None:
    """Answer each line of stdin in one line."""
    number = 0
    with lines.line_writer(None) as write:
        for number, text in enumerate(chain.from_iterable(lines.input_chunks(None)), 1):
            try:
                answer = _final_text(_ask(conversation, text))
            except UserError as error:
                raise UserError(f"line {number}: {error}") from None
            write(lines.json_line(message=text, answer=answer) if json else answer)
    if not number:
        raise UserError("no message: type one, or give lines on stdin")


def _ask(conversation: "Conversation", text: str) -> Generator[str, None, str]:
    """The pieces of an answer; a note says that messages were left out for it."""
    before = conversation.num_left_out
    pieces = conversation.ask(text)
    if (count := conversation.num_left_out - before) > 0:
        context = conversation.model.config.max_length
        note(f"the context of {context:,} tokens is full: left out the oldest {count} messages")
    return pieces


def _final_text(pieces: Generator[str, None, str]) -> str:
    """The final text of a stream."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return str(end.value)
