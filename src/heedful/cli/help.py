"""The text of `--help`: commands and options in titled groups, with metavars and defaults."""

from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from heedful.errors import UserError
from heedful.options import RUN_TIME

# Sections of --help, before and after those that a command names.
ARGUMENTS, IN_OUT, OPTIONS = "Arguments", "Input and output", "Options"
GENERAL = "General"
_FIRST, _LAST = (ARGUMENTS, IN_OUT, OPTIONS), (RUN_TIME, GENERAL)
_LONGEST_FLAG = 28  # columns; the help of a longer flag begins on the next line
WIDTH = 80


# Other spellings of an option: that of other commands is accepted, and not listed.
_ALSO = {
    "--out": ("-o", "--output"),
    "--output": ("-o", "--out"),
    "--input": ("-i",),
    "--precision": ("--dtype",),
}
_PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _is_of_file(param: Any) -> bool:
    """True for an option whose value is a file or a folder."""
    return not _is_argument(param) and param.metavar in ("FILE", "DIR", "MODEL")


class Command(TyperCommand):
    """A command whose options are listed by the panel that each is declared with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        taken = {name for param in self.params for name in param.opts}
        for param in self.params:
            also = [other for name in param.opts for other in _ALSO.get(name, ())]
            param.opts.extend(other for other in also if other not in taken)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line; an option for one file that is given twice is an error, as only the
        last file would be used."""
        *_, given = self.make_parser(ctx).parse_args(args=[*args])
        for param in dict.fromkeys(given):
            is_one_file = _is_of_file(param) and not param.multiple
            if is_one_file and given.count(param) > 1:
                raise UserError(f"{param.opts[0]} takes one {param.metavar}; give it once")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, with the names of data types that its option `--precision` lists."""
        given = ctx.params.get("precision")
        if isinstance(given, str):
            ctx.params["precision"] = _PRECISIONS.get(given, given)
        elif given:
            ctx.params["precision"] = [_PRECISIONS.get(name, name) for name in given]
        return super().invoke(ctx)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write `Usage: heedful NAME [OPTIONS] ARGUMENTS`."""
        arguments = (param for param in self.get_params(ctx) if _is_argument(param))
        pieces = ["[OPTIONS]", *(argument(param) for param in arguments)]
        formatter.write_usage(ctx.command_path, " ".join(pieces))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section of definitions for each panel."""
        for title, rows in panels(self, ctx).items():
            with formatter.section(title):
                formatter.write_dl(rows, col_max=_LONGEST_FLAG)


class Group(TyperGroup):
    """Commands in groups, with their first sentences wrapped and never cut."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands, without other names of the same ones."""
        return [name for name in super().list_commands(ctx) if not self.commands[name].hidden]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of each group, then the options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            title = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(title, []).append((name, first_sentence(command.help or "")))
        width = max((len(name) for rows in sections.values() for name, _ in rows), default=0)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])
        with formatter.section(OPTIONS):
            rows = [row for panel in panels(self, ctx).values() for row in panel]
            formatter.write_dl(rows, col_max=_LONGEST_FLAG)


def new_group(
    help: str,
    epilog: str | None = None,
    *,
    add_completion: bool = False,
    callback: Callable[..., None] | None = None,
) -> typer.Typer:
    """A group of commands; `callback` has the options of the group itself."""
    return typer.Typer(
        help=help,
        epilog=epilog,
        cls=Group,
        callback=callback,
        add_completion=add_completion,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def panels(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Rows of flag and help text by title.

    In order: arguments, input and output, options without a panel, the panels that the command
    names, run time, and last what every command has.
    """
    params = [param for param in command.get_params(ctx) if not getattr(param, "hidden", False)]
    titles = dict.fromkeys(_panel(param) for param in params)
    named = [title for title in titles if title not in (*_FIRST, *_LAST)]
    order = [title for title in (*_FIRST, *named, *_LAST) if title in titles]
    return {title: [_row(param) for param in params if _panel(param) == title] for title in order}


def first_sentence(text: str) -> str:
    """The first paragraph of a help text on one line."""
    return text.partition("\n\n")[0].replace("\n", " ")


def argument(param: Any) -> str:
    """A positional argument in a usage line: `[NAME]` if optional, `NAME...` if repeated."""
    name = param.metavar or param.name.upper()
    name = name if param.required else f"[{name}]"
    return name if param.nargs == 1 else f"{name}..."


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _panel(param: Any) -> str:
    if _is_argument(param):
        return ARGUMENTS
    return GENERAL if param.name == "help" else getattr(param, "rich_help_panel", "") or OPTIONS


def _row(param: Any) -> tuple[str, str]:
    """A flag with its metavar, and its help with the default."""
    extra = "; ".join(_extra(param))
    text = f"{param.help or ''}  [{extra}]" if extra else param.help or ""
    if _is_argument(param):
        return argument(param), text
    first, *others = [name for name in param.opts if name.startswith("--")]
    unlisted = [name for name in others if name in _ALSO.get(first, ())]
    flags = ", ".join(sorted((name for name in param.opts if name not in unlisted), key=len))
    if param.secondary_opts:
        flags = f"{flags} / {', '.join(param.secondary_opts)}"
    return f"{flags} {param.metavar}" if param.metavar else flags, text


def _extra(param: Any) -> Iterable[str]:
    default = param.default
    if isinstance(param.show_default, str):
        yield f"default: {param.show_default}"
    elif param.show_default and default is not None and default not in ("", [], ()):
        if not isinstance(default, bool):
            yield f"default: {default}"
        elif param.secondary_opts:
            flag = param.opts[0] if default else param.secondary_opts[0]
            yield f"default: {flag}"
    if param.required and not _is_argument(param):
        yield "required"
