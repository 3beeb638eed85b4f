"""One line for wrong arguments, which names the right flag, command or way to give a text."""

import re
from difflib import get_close_matches
from typing import Any

from heedful.cli.help import argument

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
_ARGUMENTS = {"config": "recipe"}
# Keys of a recipe that other toolkits have as flags.
_OTHER_KEYS = {
    **dict.fromkeys(("data", "dataset", "train", "train-data", "train-file"), "data.train.file"),
    **dict.fromkeys(("valid", "val", "dev", "valid-file"), "data.valid.file"),
    **{name: f"data.train.{name}" for name in ("src", "tgt", "text", "file")},
    "input": "data.train.text",
    "model": "model.architecture",
    "warmup": "training.schedule.warmup_steps",
}
_TEXT_FLAGS = ("prompt", "text", "p", "t")  # of commands whose texts are arguments now
_SHORT = {"-v": "--version", "-V": "--version"}
_MOST_LISTED = 6  # commands
_PARSED = re.compile(r", unable to parse string as an? \w+")
_PLAIN = {  # the parser's words and ours
    "Value error, ": "",
    "Input should be a valid integer": "it must be a whole number",
    "Input should be a valid number": "it must be a number",
    "Input should be greater than or equal to": "it must be at least",
    "Input should be less than or equal to": "it must be at most",
}


def explain_usage(error: Any) -> str:
    """The error in a command's arguments, with the flag or form to write instead."""
    message = _PARSED.sub("", " ".join(error.format_message().split())).removesuffix(".")
    for words, plain in _PLAIN.items():
        message = message.replace(words, plain)
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and error.ctx is not None:
        message = f"no such option: {option}{_instead(str(option), error.ctx)}"
    elif message.startswith("No such command") and "Did you mean" not in message:
        message += _commands_instead(message, error.ctx)
    return f"{message[:1].lower()}{message[1:]}"


def _commands_instead(message: str, ctx: Any) -> str:
    """`; ` and the commands of a group, if they are few."""
    if message == "No such command 'help'":
        return "; write heedful COMMAND --help"
    names = ctx.command.list_commands(ctx)
    if len(names) > _MOST_LISTED:
        return ""
    return f"; write {' or '.join(f'{ctx.command_path} {name}' for name in names)}"


def _instead(option: str, ctx: Any) -> str:
    """`; ` and the flag meant by an unknown one, or the command that has it; empty if unknown."""
    name = option.lstrip("-").partition("=")[0].replace("_", "-")
    flags = _flags(ctx.command)
    if _SHORT.get(option) in flags:
        return f"; use {_SHORT[option]}"
    params = [param for param in ctx.command.params if param.param_type_name == "argument"]
    arguments = {str(word): param for param in params for word in (param.name, param.metavar)}
    if name in _TEXT_FLAGS and "texts" in arguments:
        return f"; give the text as an argument: {ctx.command_path} MODEL TEXT"
    if param := arguments.get(_ARGUMENTS.get(name, name).upper()):
        line = " ".join(map(argument, params))
        return f"; {param.metavar} is an argument: {ctx.command_path} {line}"
    for other in (name, OTHER_NAMES.get(name), f"{name}s", name.removesuffix("s")):
        if other and f"--{other}" in flags:
            return f"; use --{other}"
    if "--set" in flags and (key := _OTHER_KEYS.get(name)):
        return f"; use --set {key}=VALUE"
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
    from heedful.config.keys import keys_of
    from heedful.zoo import ARCHITECTURES, architecture

    keys = [
        key.name
        for key in keys_of(Recipe)
        if key.name.rpartition(".")[2] == name and not key.is_section
    ]
    if not keys and any(architecture(kind).has_key(name) for kind in ARCHITECTURES):
        return f"model.{name}"
    return keys[0] if len(keys) == 1 else None
