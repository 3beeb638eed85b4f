"""Around a command: checks before it begins, its streams and signals, the message of an error."""

import inspect
import io
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from heedful.cli.flags import flags_of, with_flags
from heedful.cli.help import GENERAL, Command
from heedful.errors import UserError
from heedful.files import check_writable

Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=GENERAL),
]
_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d{1,3})?")
_INPUT_OPTIONS = {"input", "src", "tgt", "ref"}  # options whose files are read
_TEXT_OPTIONS = {"glossary", "json_schema"}  # options whose text may be the path of a file
_OUTPUT_OPTIONS = ("output", "alignments", "review")  # options whose files are written
_USAGE_ERROR: Any = typer.BadParameter.__base__  # the parser's own errors
_NO_MEMORY = "not enough memory; take a smaller model, shorter texts, or smaller batches or beams"
# Parts of torch's messages.
_MEMORY_MESSAGES = ("allocate memory", "out of memory", "Storage size calculation overflowed")
_INDEX_MESSAGES = ("index out of range in self", "is out of bounds for dimension")
_received: list[int] = []  # signals that end the process
_converted: list[int] = []  # signals that are exceptions while a command runs
_debug: list[bool] = []  # not empty: show tracebacks
_LONGEST = 1_000  # characters of an error's line


def add_command(
    app: typer.Typer,
    name: str,
    function: Callable[..., None],
    group: str | None = None,
    *,
    hidden: bool = False,
) -> None:
    """Add a command, with flags for its options (`flags_of`), checks of its values, and `--debug`.

    Its help is the function's docstring: paragraphs are wrapped, and lines of examples are not.

    Args:
        hidden: `--help` of the group does not list it, because it is another name of a command.
    """

    parameters, groups = flags_of(function)

    @wraps(function)
    def run(*, debug: bool = False, **values: Any) -> None:
        if debug:
            show_tracebacks()
        _check(values)
        # The folder is the result; stdout only reports it.
        if values.keys() & {"out", "to", "folder"} and isinstance(sys.stdout, _Stdout):
            sys.stdout.may_close = True  # by its reader: the command continues
        for parameter, (make, flags) in groups.items():
            values[parameter] = make(**{flag: values.pop(flag) for flag in flags})
        function(**values)

    only = inspect.Parameter.KEYWORD_ONLY
    parameters.append(inspect.Parameter("debug", only, default=False, annotation=Debug))
    # What typer sees in place of the parameters of `run`.
    shown = [parameter.replace(kind=only) for parameter in parameters]
    vars(run)["__signature__"] = inspect.Signature(shown)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    # By click's mark for it, a paragraph of examples is kept line by line.
    text = "\n\n".join(
        f"\b\n{text}" if text.startswith("Example: ") else text.replace("\n", " ")
        for text in paragraphs
    )
    app.command(name, help=text, cls=Command, rich_help_panel=group, hidden=hidden)(run)


def _check(values: dict[str, Any]) -> None:
    lists = ((name, [*v] if isinstance(v, list) else [v]) for name, v in values.items())
    each = [(name, item) for name, items in lists for item in items]  # of repeated options too
    for _, value in each:
        text = str(value) if isinstance(value, str | Path) else ""
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"{text}: not UTF-8; convert it")
    for name in _INPUT_OPTIONS & values.keys():
        if values[name] is not None and not _exists(values[name]):
            text = "; a text is an argument: MODEL TEXT" if "texts" in values else ""
            raise UserError(f"--{name} {values[name]}: No such file{text}")
    device = values.get("device")
    if device is not None and not _DEVICE.fullmatch(device):
        raise UserError(f"no device {device}; use auto, cpu, cuda, cuda:1 or mps")
    paths = [(name, value) for name, value in each if isinstance(value, Path)]
    paths += [(name, Path(value)) for name, value in each if value and name in _TEXT_OPTIONS]
    for name in _OUTPUT_OPTIONS:
        if (output := values.get(name)) is not None:
            # The table of --review may be beside the documents of a folder: see `ReviewTable`.
            apart = (name, "input", "output") if name == "review" else (name,)
            others = [(other, path) for other, path in paths if other not in apart]
            _check_output(name, output, values.get("input"), others)


def _check_output(
    name: str, output: Path, source: object, others: Sequence[tuple[str, Path]]
) -> None:
    """Raise UserError for an output that cannot be written, or that another option names.

    Args:
        name: of the option.
        source: the value of `--input`.
        others: the paths of the other options, and the names of these.
    """
    is_of_folder = isinstance(source, Path) and source.is_dir()
    if not (is_of_folder and output.is_dir()):  # the files of a folder are written to another one
        check_writable(output)
    for other, path in others:
        if other in _OUTPUT_OPTIONS:
            if path.resolve() == output.resolve() and not output.is_char_device():
                raise UserError(f"--{other} and --{name} are both {output}; give another --{name}")
            continue
        if not _exists(path):
            continue
        if output.exists() and os.path.samefile(path, output):
            raise UserError(f"{output} is read and cannot be written too; give another --{name}")
        if path.is_dir() and output.resolve().is_relative_to(path.resolve()):
            raise UserError(f"{output} is inside {path}, which is read; give another --{name}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a name, or with a null
        return False


def run_checked(
    command: Callable[..., Any], explain: Callable[[Any], str] | None = None
) -> NoReturn:
    """Run a command and end the process. Bad input is one line on stderr and code 2.

    Ctrl-C ends with 130, SIGTERM and SIGHUP with 128 + their number, after unfinished files are
    removed. A closed stdout ends a filter with 0; a run continues.

    Args:
        explain: the message for a usage error of the parser; default: the parser's own.
    """
    try:
        _open_streams()
        _convert_signals()
        logging.getLogger("heedful").addFilter(_show_flags)
        code = command(prog_name="heedful", standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        if _received:  # a library can turn a KeyboardInterrupt into another error
            sys.exit(128 + _received[0])
        _end(error, explain)
    # What is written is complete: a signal from here on ends the process without an exception.
    for number in _converted:
        signal.signal(number, signal.SIG_DFL)
    sys.exit(code if isinstance(code, int) else 0)


def _end(error: BaseException, explain: Callable[[Any], str] | None) -> None:
    """End with one line for an error that a user can correct; raise any other again."""
    if isinstance(error, KeyboardInterrupt):
        sys.exit(130)
    if isinstance(error, _USAGE_ERROR):
        _end_usage_error(error, explain)
    text = error_text(error)
    if text is None:
        raise error
    _fail(text)


def error_text(error: BaseException) -> str | None:
    """The line for an error that a user can correct; None for any other, a fault of heedful."""
    if isinstance(error, UserError):
        return with_flags(str(error))
    if isinstance(error, OSError):
        return f"{error.filename or 'cannot read or write'}: {error.strerror or error}"
    if isinstance(error, RecursionError):
        return "something in the input is nested too deep"
    if isinstance(error, IndexError) and any(part in str(error) for part in _INDEX_MESSAGES):
        return "a token is beyond the model's table: its tokenizer is damaged or of another model"
    of_torch = isinstance(error, RuntimeError) and any(
        part in str(error) for part in _MEMORY_MESSAGES
    )
    return _NO_MEMORY if isinstance(error, MemoryError) or of_torch else None


def _show_flags(record: logging.LogRecord) -> bool:
    """Show a warning of the library as one line, with flags in place of arguments of Python."""
    record.msg, record.args = one_line(with_flags(record.getMessage())), ()
    return True


def forget_interruption() -> None:
    """Clear the record of a KeyboardInterrupt that a command has handled."""
    _received.clear()


def show_tracebacks() -> None:
    """Print the traceback of an error before its line."""
    _debug.append(True)


def printable(text: str) -> str:
    """A text with escapes for line breaks and all else that a terminal does not show."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def one_line(text: str) -> str:
    """A text as one line that any terminal shows; a long one is cut in its middle."""
    shown = printable(text)
    half = _LONGEST // 2
    return shown if len(shown) <= _LONGEST else f"{shown[:half]} […] {shown[-half:]}"


class _Stdout(io.TextIOWrapper):
    """UTF-8 on stdout; a failure to write raises one error, not more at exit."""

    may_close = False

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            return self._failed(error)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._failed(error)

    def write_bytes(self, data: bytes) -> None:
        """Write bytes after the text so far."""
        try:
            super().flush()
            self.buffer.write(data)
            self.buffer.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> int:
        # No output is possible, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        if self.may_close:
            return 0
        if isinstance(error, BrokenPipeError):
            raise SystemExit(0)
        raise UserError(f"cannot write to stdout: {error.strerror}") from None


def _open_streams() -> None:
    """Open the standard streams that the caller closed, so that no file gets their descriptors.

    A closed stdin is empty; writing to a closed stdout fails. Text is UTF-8, as in files.
    """
    for handle in range(3):
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if handle < 2 else os.O_WRONLY)
    if sys.stdin is None:  # it was closed, or is a directory
        sys.stdin = io.TextIOWrapper(io.FileIO(os.devnull), encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8")
    elif isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    if sys.stdout is None or isinstance(sys.stdout, io.TextIOWrapper):
        is_terminal = os.isatty(1)
        encoding = sys.stdout.encoding if sys.stdout is not None and is_terminal else "utf-8"
        sys.stdout = _Stdout(
            io.BufferedWriter(io.FileIO(1, "w", closefd=False)),
            encoding=encoding,
            errors="backslashreplace",
            line_buffering=is_terminal,
        )


def _convert_signals() -> None:
    """Turn signals that end the process into exceptions; ignored signals (nohup) stay ignored."""

    def end(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def end_later(unraised: Any) -> None:
        # Python cannot raise in what C code or the end of an object calls: there it would be lost.
        if _received and isinstance(unraised.exc_value, KeyboardInterrupt | SystemExit):
            Timer(0.05, os.kill, (os.getpid(), _received[-1])).start()
        else:
            sys.__unraisablehook__(unraised)

    _received.clear()
    _converted.clear()
    sys.unraisablehook = end_later
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end)
            _converted.append(number)


def _end_usage_error(error: Any, explain: Callable[[Any], str] | None) -> NoReturn:
    """End with the error in the arguments; a group without a command shows its help."""
    context = error.ctx
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message(), nl=False)  # nothing where it is printed already
        sys.exit(0)
    path = "heedful" if context is None else context.command_path
    message = explain(error) if explain else error.format_message()
    _fail(f"{message}; see {path} --help")


def print_traceback() -> None:
    """Print the traceback of the error that is handled, with --debug."""
    if _debug:
        traceback.print_exc()


def _fail(text: str) -> NoReturn:
    print_traceback()
    color = None if os.environ.get("NO_COLOR") else "red"
    typer.secho(f"error: {one_line(text)}", fg=color, err=True)
    sys.exit(2)
