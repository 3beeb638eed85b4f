"""Chat templates: conversations as text, by a Jinja template in a sandbox.

The environment is that of `transformers.PreTrainedTokenizerBase.apply_chat_template`, so that a
template gives the same text here and there.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from heedful.errors import UserError
from heedful.files import read_text

Message: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = Sequence[Message]

BUILT_IN = {
    # OpenAI's format, that of Qwen and many others.
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    # Without special tokens but EOS, for a model whose vocabulary is to stay the same.
    "plain": (
        "{% for message in messages %}"
        "{{ message['role'] | capitalize + ': ' + message['content'] }}"
        "{{ (eos_token if message['role'] == 'assistant' else '') + '\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
    ),
}
_SPECIAL_NAME = re.compile(r"<\|[\w.:-]+\|>", re.ASCII)
# Errors in what a template computes, such as the sum of a text and None.
_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
_LONGEST = 1 << 20  # characters of a template


class ChatTemplate:
    """A chat template.

    Args:
        source: the template in Jinja.
        tokens: names of special tokens by the variables of the template, such as `eos_token`.

    Raises:
        UserError: a syntax error, with its line.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        from jinja2 import TemplateSyntaxError

        self.source = source
        self.tokens = dict(tokens)
        try:
            self._template = _compiled(source)
        except TemplateSyntaxError as error:
            raise UserError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}; "
                "correct it"
            ) from None

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation.

        The role `developer` is written as `system`, unless the template names it.

        Args:
            add_generation_prompt: end with the text before an answer.

        Raises:
            UserError: the template refuses the messages, or fails on them.
        """
        from jinja2 import TemplateError

        named = [dict(message) for message in messages]
        for message in named:
            if message.get("role") == "developer" and "developer" not in self.source:
                message["role"] = "system"
        try:
            return str(
                self._template.render(
                    messages=named,
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self.tokens,
                )
            )
        except (TemplateError, *_ERRORS) as error:
            roles = ", ".join(str(message.get("role")) for message in messages) or "none"
            raise UserError(
                f"the chat template refuses a conversation of the roles {roles}: {error}; change "
                "the messages or the template"
            ) from None

    @cached_property
    def special_names(self) -> list[str]:
        """Names such as `<|im_end|>` in the text of the template, in order, each once."""
        return [*dict.fromkeys(_SPECIAL_NAME.findall(self.source))]


def read_chat_template(name: str) -> str:
    """The source of a built-in chat template, or of a file.

    Raises:
        UserError: neither a built-in template nor a file that can be read.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not Path(name).is_file():
        raise UserError(
            f"no chat template {name}: give a file with a Jinja template, or one of "
            f"{', '.join(BUILT_IN)}"
        )
    return read_text(Path(name), most=_LONGEST)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """A compiled template. Imports of Jinja are late: most uses of a tokenizer need none."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `generation`, which marks answers in templates for transformers: its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        """A namespace without private attributes, by which a template could reach Python's."""

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"{name} is a private attribute")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def new_dict(*items: Any, **named: Any) -> dict[Any, Any]:
        """`dict` as a function: a template could use attributes of the type."""
        return dict(*items, **named)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["dict"] = new_dict
    environment.globals["namespace"] = Namespace
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
