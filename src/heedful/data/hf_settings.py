"""What a Hugging Face directory says of its tokenizer beside the vocabulary: specials and template.

It may say it in several places: `tokenizer_config.json`, `special_tokens_map.json` and
`added_tokens.json`, then what the model's own tokenizer class takes for granted, and last the ids
of `config.json`. That is settled here once.
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
from heedful.files import read_object


@dataclass(frozen=True)
class Family:
    """What tokenizer classes of one family take for granted.

    Args:
        classes: of tokenizers and types of models, in lower case without "-" and "_".
        names: the specials by their roles.
        single, pair: templates of one text (`$A`) and of two, specials by their roles; `None` for
            what `add_bos_token` and `add_eos_token` say.
    """

    classes: tuple[str, ...]
    names: Mapping[str, str]
    single: str | None = None
    pair: str | None = None
    adds_bos: bool = False


_FAIRSEQ = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>"}
_FAIRSEQ |= {"cls": "<s>", "mask": "<mask>"}
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
    "marian": Family(
        ("marian",), {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}, "$A eos", "$A $B eos"
    ),
}
PLAIN = Family((), {})  # nothing is taken for granted
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True)
class Settings:
    """What the files say, and what their family takes for granted.

    `stated` gives a role's special, or `None` where it is said that there is none: these exist even
    if the vocabulary lacks them. `added` are the tokens beside the vocabulary, by id; `extra` are
    further specials. `named` is the tokenizer class or the type of model that the files name,
    `family` the one of ours that it belongs to.
    """

    directory: Path
    config: Mapping[str, Any]
    model: Mapping[str, Any]
    named: str | None
    family: str | None
    stated: Mapping[str, AddedToken | None]
    extra: Sequence[AddedToken]
    added: Mapping[int, AddedToken]

    @property
    def names(self) -> Mapping[str, AddedToken | None]:
        """`stated`, and what the family takes for granted."""
        return {**_names(self.family), **self.stated}

    def name(self, role: str) -> str:
        """The special of a role. Raises UserError where there is none."""
        if role not in self.roles:
            raise UserError(f"{self.directory} names no {role}_token, which its tokenizer needs")
        return self.roles[role]

    def of(self, families: Sequence[str], path: Path, *, otherwise: str | None) -> "Settings":
        """These, once it is sure that the rules for reading `path` are known.

        A vocabulary alone does not say how text is cut, so a class that is not known is refused.

        Args:
            otherwise: the family where the files name no class; `None` to refuse that too.
        """
        if self.family in families:
            return self
        if self.named is None and otherwise is not None:
            return replace(self, family=otherwise)
        raise UserError(
            f"{path} is for a tokenizer of class {self.named or '(none named)'}, whose rules are"
            " not known here; load it with transformers' AutoTokenizer and save_pretrained it,"
            " which writes a tokenizer.json that can be read"
        )

    def with_ids(self, backend: Backend, ids: Mapping[str, Any]) -> "Settings":
        """With names for roles that lack them: by ids, and what the model itself says.

        Of several ids (LLaMA 3's ends) the first counts; -1 is none.
        """
        model = json.loads(backend.to_str())["model"]
        unk_id = model.get("unk_id", backend.token_to_id(model.get("unk_token") or ""))
        stated = dict(self.stated)
        for role, i in [*ids.items(), ("unk", unk_id)]:
            i = i[0] if isinstance(i, list) and i else i
            if isinstance(i, int) and i >= 0 and (name := backend.id_to_token(i)) is not None:
                stated.setdefault(role, _special(name))
        return replace(self, stated=stated)

    def register(self, backend: Backend) -> None:
        """Make the backend find in text every token that is named beside the vocabulary.

        Raises UserError where a token does not get the id that is said.
        """
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        wanted = {token.content: token for _, token in sorted(self.added.items())}
        for role in ROLES:
            special = self.names.get(role)
            # What only the family takes for granted may be lacking: the model has no id for it.
            if special is not None and (
                role in self.stated or backend.token_to_id(special.content) is not None
            ):
                wanted.setdefault(special.content, special)
        for token in self.extra:
            wanted.setdefault(token.content, token)
        backend.add_tokens([token for name, token in wanted.items() if name not in known])
        for i, token in self.added.items():
            found = backend.token_to_id(token.content)
            if token.content not in known and found != i:
                raise UserError(
                    f"{self.directory} gives the token {token.content!r} the id {i}, but its"
                    f" vocabulary leads to {found}; a file is missing"
                )

    @property
    def roles(self) -> dict[str, str]:
        """The special of each role that has one."""
        return {role: token.content for role, token in self.names.items() if token is not None}

    def set_template(self, backend: Backend, id_of: Callable[[str], int | None]) -> None:
        """What the family puts around a text, where no `tokenizer.json` says it."""
        family = FAMILIES.get(self.family or "", PLAIN)
        single, pair = family.single, family.pair
        if single is None or pair is None:
            bos = "bos " * bool(self.config.get("add_bos_token", family.adds_bos))
            eos = " eos" * bool(self.config.get("add_eos_token", False))
            single, pair = f"{bos}$A{eos}", f"{bos}$A{eos} {bos}$B{eos}"
        ids: dict[str, int] = {}

        def filled(part: str) -> str:
            role, colon, kind = part.partition(":")
            if role[0] == "$":
                return part
            name = self.name(role)
            if (i := id_of(name)) is None:
                raise UserError(
                    f"the vocabulary lacks {name}, which its model expects around a text"
                )
            ids[name] = i
            return f"{name}{colon}{kind}"

        one, two = ([filled(part) for part in template.split()] for template in (single, pair))
        backend.post_processor = processors.TemplateProcessing(one, two, sorted(ids.items()))


def read_settings(directory: Path) -> Settings:
    """Raises UserError where a file is damaged."""

    def read(name: str) -> dict[str, Any]:
        path = directory / name
        return read_object(path) if path.is_file() else {}

    config, model = read("tokenizer_config.json"), read("config.json")
    said = dict(config)
    if "added_tokens_decoder" not in config:  # which makes the older files out of date
        said |= read("special_tokens_map.json")
    family, named = _family(config, model)
    try:
        keys = {role: f"{role}_token" for role in ROLES}
        stated = {role: _special(said[key]) for role, key in keys.items() if key in said}
        listed = said.get("extra_special_tokens") or said.get("additional_special_tokens") or []
        extra = [t for t in map(_special, listed) if t is not None and isinstance(listed, list)]
        if "added_tokens_decoder" in config:
            added = {int(i): _added(t) for i, t in config["added_tokens_decoder"].items()}
        else:
            specials = [*(_names(family) | stated).values(), *extra]
            special = {str(token.content) for token in specials if token is not None}
            added = {
                int(i): AddedToken(name, special=name in special, normalized=name not in special)
                for name, i in read("added_tokens.json").items()
            }
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"the tokenizer's settings in {directory} are damaged: {error}") from None
    return Settings(directory, config, model, named, family, stated, extra, added)


def _family(config: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[str | None, str | None]:
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    if named is None or named in _GENERIC:
        named = model.get("model_type")
    plain = str(named).lower().replace("-", "").replace("_", "")
    plain = plain.removesuffix("fast").removesuffix("tokenizer")
    return next((name for name, f in FAMILIES.items() if plain in f.classes), None), named


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
