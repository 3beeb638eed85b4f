"""Special tokens and templates of tokenizers in Hugging Face directories.

Sources, by precedence: `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json`,
the defaults of the model's tokenizer class in transformers, the ids in `config.json`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from heedful.data.tokenizer import ROLES
from heedful.errors import UserError
from heedful.files import read_object, read_text


@dataclass(frozen=True)
class Family:
    """Defaults of the tokenizer classes of a model family in transformers.

    Args:
        classes: names of tokenizer classes and model types, in lower case without "-" and "_".
        names: special tokens by role.
        single, pair: templates of a text (`$A`) and of a pair (`$A`, `$B`), with the roles of
            special tokens; `None`: determined by `add_bos_token` and `add_eos_token`.
        adds_bos: the default of `add_bos_token`.
    """

    classes: tuple[str, ...]
    names: Mapping[str, str]
    single: str | None = None
    pair: str | None = None
    adds_bos: bool = False


_FAIRSEQ = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>"}
_FAIRSEQ |= {"cls": "<s>", "mask": "<mask>"}
_MBART = {role: name for role, name in _FAIRSEQ.items() if role != "bos"}
_FAIRSEQ_TEMPLATES = ("cls $A sep", "cls $A sep sep $B sep")
FAMILIES = {
    "bert": Family(
        ("bert", "distilbert", "electra", "mobilebert"),
        {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"},
        "cls $A:0 sep",
        "cls $A:0 sep $B:1 sep:1",
    ),
    "roberta": Family(("roberta", "bart", "longformer", "led"), _FAIRSEQ, *_FAIRSEQ_TEMPLATES),
    "xlm-roberta": Family(("xlmroberta",), _FAIRSEQ, *_FAIRSEQ_TEMPLATES),
    "t5": Family(
        ("t5", "mt5"), {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}, "$A eos", "$A eos $B eos"
    ),
    "gpt2": Family(
        ("gpt2", "gptneo", "gptj"), dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>")
    ),
    "gpt1": Family(("openaigpt",), {"unk": "<unk>"}),
    "llama": Family(
        ("llama", "mistral", "mixtral"),
        {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
        adds_bos=True,
    ),
    # Before a text the model puts the token of its language.
    "nllb": Family(("nllb",), _FAIRSEQ, "$A eos", "$A $B eos"),
    "mbart50": Family(("mbart50",), _MBART, "$A eos", "$A $B eos"),
    "m2m100": Family(
        ("m2m100",),
        {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>"},
        "$A eos",
        "$A $B eos",
    ),
    "marian": Family(
        ("marian",), {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}, "$A eos", "$A $B eos"
    ),
}
MULTILINGUAL = ("nllb", "mbart50", "m2m100")  # families with a token of each language
PLAIN = Family((), {})  # no defaults
_CHAT_TEMPLATE = "chat_template.jinja"
# Tokenizer classes of transformers that use `tokenizer.json` as it is.
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True)
class TokenizerSettings:
    """Tokenizer settings of a Hugging Face directory.

    Args:
        config: `tokenizer_config.json`.
        model: `config.json`.
        class_name: the tokenizer class or model type in the files.
        family: the key in `FAMILIES` of that class.
        explicit: special tokens in the files, by role; `None` where a file sets the role to null.
            They are added to the vocabulary if it lacks them.
        extra: further special tokens.
        added: tokens beyond the vocabulary file, by id.
        chat_template: the Jinja source of the chat template; of several, the default one.
    """

    directory: Path
    config: Mapping[str, Any]
    model: Mapping[str, Any]
    class_name: str | None
    family: str | None
    explicit: Mapping[str, AddedToken | None]
    extra: Sequence[AddedToken]
    added: Mapping[int, AddedToken]
    chat_template: str | None = None

    @property
    def names(self) -> Mapping[str, AddedToken | None]:
        """Special tokens by role: `explicit`, and the defaults of the family."""
        return {**_names(self.family), **self.explicit}

    def name(self, role: str) -> str:
        """The special token of a role. Raises UserError without one."""
        if role not in self.roles:
            raise UserError(f"{self.directory} has no {role}_token, which its tokenizer needs")
        return self.roles[role]

    def require_family(
        self, families: Sequence[str], path: Path, *, default: str | None
    ) -> "TokenizerSettings":
        """The settings, if their family is supported for the vocabulary file `path`.

        The vocabulary alone does not determine the tokenization, so unknown classes are refused.

        Args:
            families: those that are supported.
            default: the family if the files name no class; `None`: required.

        Raises:
            UserError: another family or an unknown class.
        """
        if self.family in families:
            return self
        if self.class_name is None and default is not None:
            return replace(self, family=default)
        raise UserError(
            f"{path} is for a tokenizer of class {self.class_name or '(not given)'}, which is not"
            " supported; load it with transformers' AutoTokenizer and save_pretrained it,"
            " which writes a tokenizer.json that can be read"
        )

    def with_ids(self, backend: Backend, ids: Mapping[str, Any]) -> "TokenizerSettings":
        """The settings, with special tokens for further roles, found by their ids.

        Args:
            ids: by role; of a list (LLaMA 3 has several end tokens) the first, and none if -1.
        """
        model = json.loads(backend.to_str())["model"]
        unk_id = model.get("unk_id", backend.token_to_id(model.get("unk_token") or ""))
        explicit = dict(self.explicit)
        for role, i in [*ids.items(), ("unk", unk_id)]:
            i = i[0] if isinstance(i, list) and i else i
            if isinstance(i, int) and i >= 0 and (name := backend.id_to_token(i)) is not None:
                explicit.setdefault(role, _special(name))
        return replace(self, explicit=explicit)

    def register(self, backend: Backend) -> None:
        """Add the special and added tokens to a tokenizer of the `tokenizers` library.

        Raises UserError if an added token does not get its id.
        """
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        tokens = {token.content: token for _, token in sorted(self.added.items())}
        for role in ROLES:
            special = self.names.get(role)
            # A default of the family that is not in the vocabulary is left out: it has no id.
            if special is not None and (
                role in self.explicit or backend.token_to_id(special.content) is not None
            ):
                tokens.setdefault(special.content, special)
        for token in self.extra:
            tokens.setdefault(token.content, token)
        backend.add_tokens([token for name, token in tokens.items() if name not in known])
        for i, token in self.added.items():
            actual = backend.token_to_id(token.content)
            if token.content not in known and actual != i:
                raise UserError(
                    f"{self.directory} has the id {i} for the token {token.content!r}, but with its"
                    f" vocabulary the id is {actual}; a file is missing"
                )

    @property
    def roles(self) -> dict[str, str]:
        """The special token of each role that has one."""
        return {role: token.content for role, token in self.names.items() if token is not None}

    def set_template(self, backend: Backend, id_of: Callable[[str], int | None]) -> None:
        """Set the family's template as the backend's post-processor."""
        family = FAMILIES.get(self.family or "", PLAIN)
        single, pair = family.single, family.pair
        if single is None or pair is None:
            bos = "bos " * bool(self.config.get("add_bos_token", family.adds_bos))
            eos = " eos" * bool(self.config.get("add_eos_token", False))
            single, pair = f"{bos}$A{eos}", f"{bos}$A{eos} {bos}$B{eos}"
        ids: dict[str, int] = {}

        def fill(entry: str) -> str:
            role, colon, kind = entry.partition(":")
            if role[0] == "$":
                return entry
            name = self.name(role)
            if (i := id_of(name)) is None:
                raise UserError(
                    f"the vocabulary has no {name}, which the template of its model needs"
                )
            ids[name] = i
            return f"{name}{colon}{kind}"

        templates = ([fill(entry) for entry in template.split()] for template in (single, pair))
        of_single, of_pair = templates
        backend.post_processor = processors.TemplateProcessing(
            of_single, of_pair, sorted(ids.items())
        )


def read_settings(directory: Path) -> TokenizerSettings:
    """Read the tokenizer settings of a Hugging Face directory. UserError if a file is damaged."""

    def read(name: str) -> dict[str, Any]:
        path = directory / name
        return read_object(path) if path.is_file() else {}

    config, model = read("tokenizer_config.json"), read("config.json")
    merged = dict(config)
    if "added_tokens_decoder" not in config:  # written by versions that ignore the older files
        merged |= read("special_tokens_map.json")
    family, class_name = _family(config, model)
    try:
        keys = {role: f"{role}_token" for role in ROLES}
        explicit = {role: _special(merged[key]) for role, key in keys.items() if key in merged}
        more = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
        extra = [t for t in map(_special, more) if t is not None and isinstance(more, list)]
        if "added_tokens_decoder" in config:
            added = {int(i): _added(t) for i, t in config["added_tokens_decoder"].items()}
        else:
            specials = [*(_names(family) | explicit).values(), *extra]
            special = {str(token.content) for token in specials if token is not None}
            added = {
                int(i): AddedToken(name, special=name in special, normalized=name not in special)
                for name, i in read("added_tokens.json").items()
            }
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"the tokenizer's settings in {directory} are damaged: {error}") from None
    template = _chat_template(directory, config)
    return TokenizerSettings(
        directory, config, model, class_name, family, explicit, extra, added, template
    )


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template of a directory: of its template file, else of the settings.

    Raises:
        UserError: an entry that is neither a text nor a list of named texts.
    """
    path = directory / _CHAT_TEMPLATE
    if path.is_file():
        return read_text(path)
    content = config.get("chat_template")
    if isinstance(content, list):
        try:
            content = {entry["name"]: entry["template"] for entry in content}.get("default")
        except (TypeError, KeyError):
            content = {}
    if content is not None and not isinstance(content, str):
        raise UserError(f"{directory / 'tokenizer_config.json'}: chat_template must be a text")
    return content


def _family(config: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The key in `FAMILIES` of a directory, and the class name that determines it."""
    class_name = config.get("tokenizer_class") or model.get("tokenizer_class")
    if class_name is None or class_name in GENERIC:
        class_name = model.get("model_type")
    plain = str(class_name).lower().replace("-", "").replace("_", "")
    plain = plain.removesuffix("fast").removesuffix("tokenizer")
    return next((name for name, f in FAMILIES.items() if plain in f.classes), None), class_name


def _names(family: str | None) -> dict[str, AddedToken | None]:
    names = FAMILIES.get(family or "", PLAIN).names
    return {role: _special(name) for role, name in names.items()}


def _special(name: Any) -> AddedToken | None:
    if name is None:
        return None
    if isinstance(name, dict):
        return _added({**name, "special": True})
    return AddedToken(str(name), special=True, normalized=False)


def _added(token: Mapping[str, Any]) -> AddedToken:
    flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return AddedToken(token["content"], **{flag: token[flag] for flag in flags if flag in token})
