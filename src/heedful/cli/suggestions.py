"""One line for wrong arguments, which names the right flag, command or way to give a text."""

from difflib import get_close_matches
from typing import Any

# Names that heedful had or other toolkits have, and the names in heedful.
OTHER_NAMES = {
    "engine": "backend",
    "beam": "beam-size",
    "beams": "beam-size",
    "num-beams": "beam-size",
    "nbest": "num-return",
    "n-best": "num-return",
    "num-return-sequences": "num-return",
    "groups": "num-groups",
    "num-beam-groups": "num-groups",
    "no-repeat": "no-repeat-ngram-size",
    "typical": "typical-p",
    "ban": "banned",
    "bad-words": "banned",
    "draft-tokens": "num-draft-tokens",
    "max-length": "max-new-tokens",
    "file": "input",
    "text": "input",
    "labelled": "input",
    "labeled": "input",
    "output-dir": "out",
    "max-steps": "steps",
    "max-epochs": "epochs",
    "max-minutes": "minutes",
    "learning-rate": "lr",
    "batch-size": "batch-tokens",
    "fp16": "precision",
    "bf16": "precision",
    "tgt": "ref",
    "ref": "tgt",
}
_TEXT_FLAGS = ("prompt", "text", "p", "t")  # of commands whose texts are arguments now


def explain_usage(error: Any) -> str:
    """The error in a command's arguments, with the flag or form to write instead."""
    message = " ".join(error.format_message().split())
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and error.ctx is not None:
        message = f"no such option: {option}{_instead(str(option), error.ctx)}"
    return f"{message[:1].lower()}{message[1:].removesuffix('.')}"


def _instead(option: str, ctx: Any) -> str:
    """`; ` and the flag meant by an unknown one, or the command that has it; empty if unknown."""
    name = option.lstrip("-").partition("=")[0].replace("_", "-")
    flags = _flags(ctx.command)
    arguments = {param.name for param in ctx.command.params if param.param_type_name == "argument"}
    if name in _TEXT_FLAGS and "texts" in arguments:
        return f"; give the text as an argument: {ctx.command_path} MODEL TEXT"
    for other in (name, OTHER_NAMES.get(name), f"{name}s", name.removesuffix("s")):
        if other and f"--{other}" in flags:
            return f"; use --{other}"
    if close := get_close_matches(f"--{name}", flags, n=1, cutoff=0.75):
        return f"; use {close[0]}"
    if "--set" in flags and (key := _recipe_key(name.replace("-", "_"))):
        return f"; use --set {key}=VALUE"
    names = {f"--{name}", f"--{OTHER_NAMES.get(name, name)}"}
    owners = [path for path, command in _commands() if names & _flags(command).keys()]
    if owners:
        listed = ", ".join(owners[:4])
        return f"; it is an option of heedful {listed}{' and others' if len(owners) > 4 else ''}"
    return f"; use {' or '.join(close)}" if (close := get_close_matches(option, flags, n=2)) else ""


def _flags(command: Any) -> dict[str, None]:
    return {
        flag: None
        for param in command.params
        for flag in (*param.opts, *param.secondary_opts)
        if flag.startswith("--")
    }


def _commands() -> list[tuple[str, Any]]:
    """Every command with the words that name it."""
    from typer.main import get_command

    from heedful.cli.app import make_app

    root: Any = get_command(make_app())
    return [
        (f"{name} {inner}".strip(), command)
        for name, group in root.commands.items()
        for inner, command in getattr(group, "commands", {"": group}).items()
    ]


def _recipe_key(name: str) -> str | None:
    """The dotted name of the recipe's key with this last part, if there is exactly one."""
    from heedful.config import Recipe
    from heedful.nested_keys import keys_of

    keys = [key.name for key in keys_of(Recipe) if key.name.rpartition(".")[2] == name]
    return keys[0] if len(keys) == 1 else None
